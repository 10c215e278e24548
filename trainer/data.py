"""From a dataset to batches: one pass over ids and lengths, then a batch's tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

import pipelines
from schemas.ragged import BoolArray, IntArray, Ragged
from trainer.chains import Chains, make_chains
from trainer.plan import Plan

OPTIONAL_COLUMNS: dict[str, pl.DataType] = {
    "rollout_logprobs": pl.List(pl.Float32()),
    "temperature": pl.Float32(),
    "top_p": pl.Float32(),
    "top_k": pl.Int32(),
    "reward": pl.Float64(),
    "rewards": pl.List(pl.Float64()),
}
UNUSED_COLUMNS = ("messages", "response_text", "metrics", "source", "rollout_expert_indices")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """R rows, T response tokens in all; trajectories that failed or are masked included.

    Attributes:
        names: [R] trajectory and step of each row, for messages.
        prompts: Prompt tokens of the R rows.
        responses: Response tokens of the R rows.
        group: [R] group of the row, an index into `group_names`.
        group_names: Instance id of each group.
        trajectory: [R] trajectory of the row, 0..num_trajectories-1.
        mini_batch: [R] which optimizer step of the batch the row belongs to.
        trains: [T] bool: the loss mask, false in trajectories that failed or are masked.
        advantages: [T] float32; as loaded, the trajectory's: see `trainer.estimate`.
        chains: The trained tokens in the order of their trajectories' steps.
        temperature: [T] float32.
        rollout_logprobs: [T] float32 nats; NaN in rows without.
    """

    names: tuple[str, ...]
    prompts: Ragged
    responses: Ragged
    group: IntArray
    group_names: tuple[str, ...]
    trajectory: IntArray
    mini_batch: IntArray
    trains: BoolArray
    advantages: Tensor
    chains: Chains
    temperature: Tensor
    rollout_logprobs: Tensor


def index_rows(rollouts: pl.LazyFrame) -> pl.DataFrame:
    """Lengths, token range and sampling of every row. Tokens stream by, none are kept.

    `num_forwarded_tokens` is what the row costs as a chain: prompt plus the response up to, not
    including, its last trained token (less than the prompt where nothing trains).
    """
    rollouts = _with_optional_columns(rollouts)
    names = ("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "rewards")
    prompt, response, mask, logprobs, rewards = (pl.col(name).list for name in names)
    num_prompt, num_response = prompt.len().cast(pl.Int64), response.len().cast(pl.Int64)
    num_untrained_at_end = mask.reverse().list.eval(pl.element().cast(pl.Int8)).list.arg_max()
    return rollouts.select(
        "instance_id",
        "trajectory_id",
        "step_index",
        "temperature",
        "top_p",
        "top_k",
        "token_source",
        name=_row_name(),
        num_prompt_tokens=num_prompt,
        num_trained_tokens=mask.sum().cast(pl.Int64),
        num_forwarded_tokens=num_prompt + num_response - 1 - num_untrained_at_end.cast(pl.Int64),
        lowest_token=pl.min_horizontal(prompt.min(), response.min()),
        highest_token=pl.max_horizontal(prompt.max(), response.max()),
        has_logprobs=pl.col("rollout_logprobs").is_not_null(),
        has_reward=pl.col("reward").is_not_null() | pl.col("rewards").is_not_null(),
        finite_reward=pl.col("reward").is_finite().fill_null(value=True)
        & _holds("rewards", pl.element().is_finite()),
        aligned=pl.all_horizontal(
            (other.len() == response.len()).fill_null(value=default)
            for other, default in ((mask, False), (logprobs, True), (rewards, True))
        ),
        complete=pl.all_horizontal(_holds(name, pl.element().is_not_null()) for name in names[:3]),
        token_sum=prompt.sum().cast(pl.Int64) + response.sum().cast(pl.Int64),
        logprobs_finite=_holds("rollout_logprobs", pl.element().is_finite()),
        logprobs_nonpositive=_holds("rollout_logprobs", pl.element() <= 0),
    ).collect(engine="streaming")


def _holds(name: str, condition: pl.Expr) -> pl.Expr:
    """Whether every element of a list is so; of no list, yes."""
    every = pl.col(name).list.eval(condition.fill_null(value=False)).list.all()
    return every.fill_null(value=True)


def load_batch(
    rollouts: pl.LazyFrame, plan: Plan, groups: Sequence[str], sequence_layout: str
) -> Batch:
    """Load the rows of some groups, in the layout that is to be forwarded."""
    return to_batch(read_rows(rollouts, plan, groups, sequence_layout))


def read_rows(
    rollouts: pl.LazyFrame, plan: Plan, groups: Sequence[str], sequence_layout: str
) -> pl.DataFrame:
    """Read the rows of some groups, merged or not, with what the plan says of them: for `to_batch`.

    They are in the order of `groups`, so tables of some groups each, one below the other, are that
    of all.
    """
    unused = [name for name in UNUSED_COLUMNS if name in rollouts.collect_schema()]
    rows = rollouts.filter(pl.col("instance_id").is_in(list(groups))).drop(unused)
    rows = pipelines.merge(rows) if sequence_layout == "merge" else pipelines.unmerge(rows)
    columns = ["trains", "advantage", "mini_batch"]
    table = (
        _with_optional_columns(rows)
        .with_columns(name=_row_name())
        .join(
            plan.trajectories.lazy().select("trajectory_id", *columns),
            on="trajectory_id",
            maintain_order="left",
        )
        .select(
            "name",
            "instance_id",
            "trajectory_id",
            "prompt_token_ids",
            "response_ids",
            "loss_mask",
            *OPTIONAL_COLUMNS,
            *(["segments"] if "segments" in rows.collect_schema() else []),
            *columns,
        )
        .collect()
    )
    order = {group: number for number, group in enumerate(groups)}
    number = table["instance_id"].replace_strict(order, return_dtype=pl.Int64).to_numpy()
    return table[np.argsort(number, kind="stable")]


def to_batch(table: pl.DataFrame) -> Batch:
    """Flatten a table of rows, with their trajectories' trains, advantage and mini_batch."""
    responses = _ragged(table["response_ids"])
    logprobs = _ragged(table["rollout_logprobs"])
    flat_logprobs = np.full(len(responses.values), np.nan, dtype=np.float32)
    flat_logprobs[np.repeat(logprobs.valid, responses.lengths)] = logprobs.values

    def per_token(name: str, fill: float) -> Tensor:
        values = table[name].fill_null(fill).to_numpy().astype(np.float32)
        return torch.from_numpy(np.repeat(values, responses.lengths))

    row_trains = np.repeat(table["trains"].to_numpy(), responses.lengths)
    trains = _ragged(table["loss_mask"]).values.astype(np.bool_) & row_trains
    return Batch(
        names=tuple(table["name"]),
        prompts=_ragged(table["prompt_token_ids"]),
        responses=responses,
        group=_numbered(table["instance_id"]),
        group_names=tuple(table["instance_id"].unique().sort()),
        trajectory=_numbered(table["trajectory_id"]),
        mini_batch=table["mini_batch"].to_numpy().astype(np.int64),
        trains=trains,
        advantages=per_token("advantage", 0.0),
        chains=make_chains(table.to_arrow(), trains),
        temperature=per_token("temperature", 1.0),
        rollout_logprobs=torch.from_numpy(flat_logprobs),
    )


def groups_with_gradient(batch: Batch) -> frozenset[str]:
    """Instance ids of the groups with a trained token whose advantage is not 0."""
    moving = np.flatnonzero(batch.trains & (batch.advantages.numpy() != 0))
    groups = np.unique(batch.group[batch.responses.row_of(moving)])
    return frozenset(batch.group_names[group] for group in groups)


def _numbered(ids: pl.Series) -> IntArray:
    return ids.rank("dense").to_numpy().astype(np.int64) - 1


def _ragged(column: pl.Series) -> Ragged:
    return Ragged.from_arrow(column.to_arrow())


def _row_name() -> pl.Expr:
    return pl.format("trajectory '{}', row {}", "trajectory_id", "step_index")


def _with_optional_columns(rollouts: pl.LazyFrame) -> pl.LazyFrame:
    present = rollouts.collect_schema()
    absent = {name: kind for name, kind in OPTIONAL_COLUMNS.items() if name not in present}
    return rollouts.with_columns(
        pl.lit(None, dtype=kind).alias(name) for name, kind in absent.items()
    )
