"""Rows that no writer of ours makes, and a trainer must not train on."""

import polars as pl
import pyarrow as pa
import pytest

from schemas.columns import arrow_schema
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import VOCAB, step
from trainer.batch import index_rows
from trainer.batches.forest import RowLimit
from trainer.batches.plan import make_plan
from trainer.run.dataset_checks import check_rows

NAN, INF = float("nan"), float("inf")
SAMPLED = {"rollout_logprobs": [-1.0, -2.0], "temperature": 1.0}


def config(**settings):
    return train_config(dataset="d", model="m", out="o", **settings)


def two_trajectories(**values):
    """Two steps each, of one group."""
    return [
        step("a", repetition, index, [1], [2, 3], reward=float(repetition * index)) | values
        for repetition in range(2)
        for index in range(2)
    ]


def table_of(rows):
    names = tuple({name for row in rows for name in row})
    return pl.DataFrame(pa.Table.from_pylist(rows, schema=arrow_schema(names)))


def checked(rows, **settings):
    index, made = index_rows(table_of(rows).lazy()), config(**settings)
    returns = pl.DataFrame(
        {
            "instance_id": ["a", "a"],
            "trajectory_id": ["a_0", "a_1"],
            "return": [0.0, 1.0],
            "error": pl.Series([None, None], dtype=pl.String),
        }
    )
    limit = RowLimit(num_tokens=99, reason="", hint="")
    return check_rows(index, make_plan(returns, made), made, vocab_size=VOCAB, limit=limit)


def changed(row, **values):
    rows = two_trajectories()
    rows[row] |= values
    return rows


def test_rows_that_are_in_order_are_let_through():
    assert len(checked(two_trajectories(**SAMPLED), estimator="gae")) == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            changed(2, temperature=NAN),
            r".*: found temperature NaN; expected a finite .*\[temperature\]",
        ),
        (
            changed(2, temperature=INF),
            r".*: found temperature inf; expected a finite .*\[temperature\]",
        ),
    ],
)
def test_rows_without_a_finite_temperature_are_refused(rows, message):
    with pytest.raises(RolloutError, match=message):
        checked(rows)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward": NAN}, r"trajectory 'a_0', row 0.*\[reward_finite\]"),
        ({"rewards": [0.0, INF]}, "reward_finite"),
        ({"rewards": [0.0, None]}, "reward_finite"),
    ],
)
def test_step_rewards_that_would_spoil_a_batch_are_refused(values, message):
    with pytest.raises(RolloutError, match=message):
        checked(changed(0, **values), estimator="reinforce++")
