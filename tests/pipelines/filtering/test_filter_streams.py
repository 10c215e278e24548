import polars as pl
import pytest
from polars.io.plugins import register_io_source

from pipelines import place_outcomes, place_rewards, trajectory_returns
from pipelines.filtering import apply_filters, apply_masks, keep_rows
from pipelines.filters import reward_range
from pipelines.mixing import mix
from pipelines.rewards import place_token_rewards
from tests.helpers.filter_helpers import one_step, table

NUM_PIECES = 400


class Source:
    """A dataset of many pieces that counts how many were read since the last reset."""

    def __init__(self):
        self.num_read = 0

    def frame(self, name):
        def pieces(columns, predicate, n_rows, batch_size):
            del n_rows, batch_size
            for number in range(NUM_PIECES):
                self.num_read += 1
                piece = pl.from_arrow(table(*one_step(0.0, 1.0, instance=f"{name}{number}")))
                piece = piece if predicate is None else piece.filter(predicate)
                yield piece if columns is None else piece.select(columns)

        schema = pl.from_arrow(table(*one_step(1.0))).schema
        return register_io_source(pieces, schema=schema)


def outcomes_of(frame):
    return trajectory_returns(frame).select("trajectory_id", pl.col("return").alias("reward"))


TRANSFORMS = {
    "filter": lambda f: apply_filters(f, [reward_range(minimum=0.5)])[0],
    "mask": lambda f: apply_masks(f, [reward_range(minimum=0.5)])[0],
    "rows": lambda f: keep_rows(f, "step_index = 0")[0],
    "moved": lambda f: keep_rows(f, "step_index = 0", move_outcome=True)[0],
    "outcomes": lambda f: place_outcomes(f, outcomes_of(f)),
    "rewards": place_rewards,
    "token rewards": lambda f: place_token_rewards(place_rewards(f)),
    "mix": lambda f: mix({"x": f, "y": Source().frame("other")})[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_first_rows_come_out_before_the_last_are_read(name):
    source = Source()
    frame = TRANSFORMS[name](source.frame("g"))
    source.num_read = 0
    batches = frame.collect_batches(chunk_size=1, lazy=True, engine="streaming")
    assert len(next(batches))
    assert 0 < source.num_read < NUM_PIECES
    del batches


@pytest.mark.slow
def test_what_does_not_stream_reads_all_first():
    source = Source()
    frame = source.frame("g").sort("trajectory_id")
    assert len(next(frame.collect_batches(chunk_size=1, lazy=True, engine="streaming")))
    assert source.num_read == NUM_PIECES
