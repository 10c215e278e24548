"""Rows that no writer of ours makes, and a trainer must not train on."""

from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from schemas.columns import arrow_schema
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import VOCAB, step
from trainer.batch import index_rows
from trainer.batches.forest import RowLimit
from trainer.batches.plan import make_plan
from trainer.checks import check_rows, corrects_for_sampler
from trainer.config.train_config import TrainConfig

NAN, INF = float("nan"), float("inf")
SAMPLED = {"rollout_logprobs": [-1.0, -2.0], "temperature": 1.0}


def config(**settings: Any) -> TrainConfig:
    return train_config(dataset="d", model="m", out="o", **settings)


def two_trajectories(**values: Any) -> list[dict[str, Any]]:
    """Two steps each, of one group."""
    return [
        step("a", repetition, index, [1], [2, 3], reward=float(repetition * index)) | values
        for repetition in range(2)
        for index in range(2)
    ]


def table_of(rows: list[dict[str, Any]]) -> pl.DataFrame:
    names = tuple({name for row in rows for name in row})
    return pl.DataFrame(pa.Table.from_pylist(rows, schema=arrow_schema(names)))


def checked(rows: list[dict[str, Any]], **settings: Any) -> pl.DataFrame:
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


def changed(row: int, **values: Any) -> list[dict[str, Any]]:
    rows = two_trajectories()
    rows[row] |= values
    return rows


def test_rows_with_images_are_trained_on_only_if_the_user_asks_for_the_text_alone() -> None:
    images = [{"blob": f"sha256:{'0' * 64}", "position": None}]
    for values in (changed(2, images=images), changed(2, images=[{"blob": None, "position": 0}])):
        with pytest.raises(RolloutError, match=r"'a_1', row 0.*images.*\[images_in_row\]"):
            checked(values)
        assert len(checked(values, images="text")) == 4
    assert len(checked(changed(2, images=[]))) == 4


def test_rows_that_are_in_order_are_let_through() -> None:
    assert len(checked(two_trajectories(**SAMPLED), estimator="gae")) == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [two_trajectories()[i] for i in (0, 2, 1, 3)],
            r".*'a_0', row 1.*\[contiguous_trajectory\]",
        ),
        ([two_trajectories()[i] for i in (1, 0, 2, 3)], r".*'a_0', row 0.*\[step_index_sequence\]"),
        (changed(3, step_index=0), r"trajectory 'a_1', row 0.*\[step_index_sequence\]"),
        (changed(1, instance_id="b"), r"trajectory 'a_0', row 1.*\[unique_trajectory\]"),
        (changed(2, response_ids=[None, 3]), r".*'a_1', row 0.*\[columns_and_types\]"),
        (
            changed(2, prompt_token_ids=[None]),
            r".* loss_mask contains null.*\[columns_and_types\]",
        ),
        (
            changed(2, loss_mask=[True, None]),
            r".* loss_mask contains null.*\[columns_and_types\]",
        ),
        (
            changed(2, prompt_token_ids=[]),
            r".*'a_1', row 0.*: found 0 prompt tokens; .*\[nonempty_prompt\]",
        ),
        (
            changed(2, response_ids=[-1, 3]),
            r".*'a_1', row 0.*: found token id -1; .*\[token_range\]",
        ),
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
def test_rows_out_of_order_or_with_holes_are_refused(
    rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        checked(rows)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward": NAN}, r"trajectory 'a_0', row 0.*\[reward_finite\]"),
        ({"rewards": [0.0, INF]}, "reward_finite"),
        ({"rewards": [0.0, None]}, "reward_finite"),
        ({"rewards": [0.0]}, "lengths_align"),
    ],
)
def test_step_rewards_that_would_spoil_a_batch_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        checked(changed(0, **values), estimator="reinforce++")


@pytest.mark.parametrize(
    ("logprobs", "rule"),
    [
        ([-1.0, NAN], "logprobs_finite"),
        ([-INF, -1.0], "logprobs_finite"),
        ([-1.0, None], "logprobs_finite"),
        ([0.5, -1.0], "logprobs_nonpositive"),
    ],
)
def test_logprobs_that_are_none_are_refused_where_they_weigh(
    logprobs: list[float | None], rule: str
) -> None:
    rows = two_trajectories(**SAMPLED)
    rows[3] |= {"rollout_logprobs": logprobs}
    index = checked(rows)
    with pytest.raises(RolloutError, match=rf"trajectory 'a_1', row 1.*\[{rule}\]"):
        corrects_for_sampler(index, config(), "processed")
    assert not corrects_for_sampler(index, config(tis_ratio_type=None), "processed")


def test_an_index_of_rows_without_optional_columns_has_nothing_to_refuse() -> None:
    index = index_rows(table_of(two_trajectories()).lazy())
    names = ("aligned", "complete", "finite_reward", "logprobs_finite", "logprobs_nonpositive")
    assert_frame_equal(
        index.select(pl.col(names).all()), pl.DataFrame({name: [True] for name in names})
    )
