"""Whatever a generator of the user's own returns: rows, or an error, for every trajectory."""

import asyncio
import copy
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.generation.skyrl import OwnGenerator
from pipelines.generation.tasks import rows_of
from rollout_io import TrajectoryID
from schemas.checker import validate
from tests.helpers.examples import examples
from tests.helpers.generation_helpers import config_of, tasks_of

NAME = "tests.pipelines.generation.test_own_generator_outputs:Returning"
SOUND = {
    "prompt_token_ids": [[1, 2], [1, 2, 3, 4], [1, 2]],
    "response_ids": [[3], [5, 6], [7, 8]],
    "rewards": [0.0, 1.0, 0.5],
    "loss_masks": [[1], [1, 0], [1, 1]],
    "stop_reasons": ["stop", "stop", "length"],
    "rollout_metrics": {"generate/own": 1.0},
    "rollout_logprobs": [[-1.5], [-0.5, 0.0], [-0.25, -2.0]],
    "trajectory_ids": [TrajectoryID("t0", 0), TrajectoryID("t0", 0), TrajectoryID("t0", 1)],
    "rollout_expert_indices": None,
    "is_last_step": [False, True, True],
    "env_metrics": [{}, {"turns": 2.0}, None],
    "trajectory_generation_times": None,
    "pixel_values": None,
}
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ANYTHING = st.recursive(
    LEAVES | st.just(b"x"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)


class Returning:
    output = None

    def __init__(self, engine, tokenizer, config):
        pass

    async def generate(self, _):
        return self.output


def finished(tokenizer, output, tasks):
    Returning.output = output
    config = config_of(environment=None, generator=NAME)
    engine = SimpleNamespace(policy_version=3)
    return asyncio.run(OwnGenerator(engine, tokenizer, config, "train").finish(tasks))


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_whatever_comes_back_every_trajectory_is_written_whole_or_as_failed(tokenizer, data):
    output = copy.deepcopy(SOUND)
    for _ in range(data.draw(st.integers(1, 2))):
        field = data.draw(st.sampled_from(sorted(SOUND)))
        if isinstance(output[field], list) and output[field] and data.draw(st.booleans()):
            row = data.draw(st.integers(0, len(output[field]) - 1))
            known = SOUND[field] or [None]
            output[field][row] = data.draw(ANYTHING | st.sampled_from(list(known)))
        else:
            output[field] = data.draw(ANYTHING)
    tasks = tasks_of(1, 2)
    found = finished(tokenizer, output, tasks)
    assert [one.task for one in found] == tasks
    for one in found:
        assert set(one.rows["trajectory_id"].to_pylist()) == {one.task.trajectory_id}
        assert one.error is None or NAME in one.error or "placeholder" in one.error
    validate(rows_of(found), vocab_size=tokenizer.vocab_size)


def test_a_sound_output_is_written_as_it_is(tokenizer):
    found = finished(tokenizer, SOUND, tasks_of(1, 2))
    assert [one.error for one in found] == [None, None]
    table = rows_of(found)
    for column, field in (("response_ids", "response_ids"), ("reward", "rewards")):
        assert table[column].to_pylist() == SOUND[field]
    assert set(table["policy_version"].to_pylist()) == {3}
