"""The rows of a batch: read, with what trains of them (`Batch.trains`), and cut into micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch
from accelerate import Accelerator
from torch import Tensor

import pipelines
from pipelines.frames import ROUTING
from rollout_io.dataset.trajectory_facts import row_digest
from schemas.columns import COLUMN_BY_NAME, PICTURES
from schemas.ragged import BoolArray, IntArray, Ragged, offsets_of
from schemas.types import with_absent
from trainer.batches.chains import Chains, Origins, make_chains
from trainer.batches.forest import Forest, MiniBatch, chain_forests, chain_lengths, with_sets
from trainer.batches.pictures import (
    FACTS,
    BatchPictures,
    PictureReader,
    picture_facts,
    place_pictures,
    with_pictures,
)
from trainer.batches.plan import Plan
from trainer.batches.sampling_support import SUPPORT, TEACHER, covers_trained_tokens, sets_of
from trainer.batches.tree import make_trie, tree_forests
from trainer.config.sections import BatchConfig
from trainer.distributed.processes import over_processes
from trainer.models.router_replay import Routes

OPTIONAL_COLUMNS: dict[str, pl.DataType] = {
    "rollout_logprobs": pl.List(pl.Float32()),
    "temperature": pl.Float32(),
    "top_p": pl.Float32(),
    "top_k": pl.Int32(),
    "sampling_extra": pl.String(),
    "reward": pl.Float64(),
    "rewards": pl.List(pl.Float64()),
}
UNUSED_COLUMNS = ("messages", "response_text", "metrics", "source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """R rows with T response tokens in total, including failed and masked trajectories.

    With several processes, each has the tokens of the rows that it forwards: the other rows are
    empty here, and only their sizes are known.

    Attributes:
        names: [R] trajectory and step of each row, for messages.
        prompts: Prompt tokens of the R rows; those of pictures have numbers (see `pictures`).
        responses: Response tokens of the R rows, likewise.
        group: [R] group of each row, an index into `group_names`.
        group_names: Instance id of each group.
        trajectory: [R] trajectory of each row, 0..num_trajectories-1.
        mini_batch: [R] optimizer step, within the batch, that each row belongs to.
        trains: [T] bool: the loss mask, but false in failed or masked trajectories, in greedy rows
            and for tokens beyond `max_row_tokens`.
        greedy: [R] bool: rows excluded from training only because they were sampled at temperature
            0, where a token has probability 1 and thus no gradient.
        truncated: [R] bool: rows with tokens excluded from training only due to `max_row_tokens`.
        advantages: [T] float32; initially the advantage of the token's trajectory; see
            `trainer.run.batch_advantages`.
        chains: The trained tokens in temporal order, with their rewards.
        temperature: [T] float32.
        rollout_logprobs: [T] float32 nats; NaN in rows without log-probabilities.
        num_targets: [R] int64 trained tokens of each row, in whichever process.
        num_response: [R] int64 response tokens of each row, in whichever process.
        routes: Recorded experts to replay in the R rows; None if there are none.
        support: [T] rows: the sets of ids that the sampler could draw; None if there are none.
        teacher: [T] rows each: a teacher's most likely ids, and their log-probabilities in nats;
            None if there are none.
        pictures: Pictures that the rows show: see `trainer.batches.pictures`; None if there are none.
        old_logprobs, ref_logprobs, values: [T] float32 outputs of the models at the start of the
            batch, NaN at untrained tokens; None where the run does not need them.
        raw_advantages: [T] advantages before `advantage.batch_normalize`.
        value_targets: [T] target values for the critic; None without one.
        weights, selected: [T] columns of the mini-batch that is trained: see
            `trainer.loss.with_target_weights`.
        groups: Groups of the batch, in the order of the plan.
        mini_batches: Micro-batches of each optimizer step.
        next_kl_coef: KL coefficient of the next batch.
        generated: Metrics of the batch as generated, for its first update; in the main process.
        origins: Where the dataset stores the T tokens, in the main process; None: not needed.
    """

    names: tuple[str, ...]
    prompts: Ragged
    responses: Ragged
    group: IntArray
    group_names: tuple[str, ...]
    trajectory: IntArray
    mini_batch: IntArray
    trains: BoolArray
    greedy: BoolArray
    truncated: BoolArray
    advantages: Tensor
    chains: Chains
    temperature: Tensor
    rollout_logprobs: Tensor
    num_targets: IntArray
    num_response: IntArray
    routes: Routes | None = None
    support: Ragged | None = None
    teacher: tuple[Ragged, Ragged] | None = None
    pictures: BatchPictures | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    raw_advantages: Tensor | None = None
    value_targets: Tensor | None = None
    weights: Tensor | None = None
    selected: Tensor | None = None
    groups: tuple[str, ...] = ()
    mini_batches: tuple[MiniBatch, ...] = ()
    next_kl_coef: float = 0.0
    generated: dict[str, float] = field(default_factory=dict)
    origins: Origins | None = None

    @property
    def global_slots(self) -> IntArray:
        """[T] index of each token among the response tokens of all processes."""
        first = offsets_of(self.num_response)[:-1] - self.responses.offsets[:-1]
        return np.arange(len(self.trains)) + np.repeat(first, self.responses.lengths)

    def scope(self, config: BatchConfig) -> IntArray:
        """[R] number of the scope in which trees share tokens: the group or the trajectory."""
        return self.group if config.tree_scope == "group" else self.trajectory

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Columns with model outputs at the start of the batch, which resuming within it needs."""
        columns = {
            "old_logprobs": self.old_logprobs,
            "ref_logprobs": self.ref_logprobs,
            "values": self.values,
        }
        return {name: values for name, values in columns.items() if values is not None}


def index_rows(
    rollouts: pl.LazyFrame, *, imitates: bool = False, placeholder: int | None = None
) -> pl.DataFrame:
    """Collect the lengths, token range and sampling settings of every row in one streaming pass.

    `num_forwarded_tokens` is the cost of forwarding the row as a chain: the number of prompt and
    response tokens before the last trained token (or before the last token if none is trained).
    `num_untrained_at_start` is the number of tokens before the first trained one (undefined if none
    is trained). With `imitates`, rows at temperature 0 are trained, too: see `to_batch`. With the
    `placeholder` of a model, there are facts about pictures: see `picture_facts`.
    """
    present = rollouts.collect_schema()
    has_sets, has_pictures = SUPPORT in present, PICTURES in present
    rollouts = with_absent(_with_optional_columns(rollouts), [SUPPORT, *TEACHER])
    if imitates:
        rollouts = rollouts.with_columns(_unscaled())
    greedy = _is_greedy()
    columns = rollouts.collect_schema().names()
    digested = [name for name in columns if name in COLUMN_BY_NAME and name not in UNUSED_COLUMNS]
    names = ("prompt_token_ids", "response_ids", "loss_mask")
    prompt, response, mask = (pl.col(name).list for name in names)
    highest = pl.element().list.max()
    in_sets = (pl.col(name).list.eval(highest).list.max() for name in (SUPPORT, TEACHER[0]))
    num_prompt, num_response = prompt.len().cast(pl.Int64), response.len().cast(pl.Int64)
    num_untrained_first = mask.eval(pl.element().cast(pl.Int8)).list.arg_max()
    num_untrained_at_end = mask.reverse().list.eval(pl.element().cast(pl.Int8)).list.arg_max()
    return rollouts.select(
        "instance_id",
        "trajectory_id",
        "step_index",
        "temperature",
        "top_p",
        "top_k",
        "sampling_extra",
        "token_source",
        name=_row_name(),
        num_trained_tokens=pl.when(greedy).then(0).otherwise(mask.sum().cast(pl.Int64)),
        greedy=greedy & mask.any(),
        num_forwarded_tokens=num_prompt + num_response - 1 - num_untrained_at_end.cast(pl.Int64),
        num_untrained_at_start=num_prompt + num_untrained_first.cast(pl.Int64),
        highest_token=pl.max_horizontal(prompt.max(), response.max(), *in_sets),
        pictures=pl.struct(*names, PICTURES).map_batches(
            partial(picture_facts, placeholder=placeholder),
            return_dtype=FACTS,
            is_elementwise=True,
        )
        if has_pictures
        else pl.lit(None, FACTS),
        has_logprobs=pl.col("rollout_logprobs").is_not_null(),
        has_support=pl.struct("loss_mask", SUPPORT, "rollout_logprobs").map_batches(
            covers_trained_tokens, return_dtype=pl.Boolean, is_elementwise=True
        )
        if has_sets
        else pl.lit(value=False),
        has_teacher=pl.all_horizontal(pl.col(name).is_not_null() for name in TEACHER),
        most_teacher_ids=pl.col(TEACHER[0]).list.eval(pl.element().list.len()).list.max(),
        has_reward=pl.col("reward").is_not_null() | pl.col("rewards").is_not_null(),
        finite_reward=pl.col("reward").is_finite().fill_null(value=True)
        & pl.col("rewards")
        .list.eval(pl.element().is_finite().fill_null(value=False))
        .list.all()
        .fill_null(value=True),
        digest=row_digest(digested),
    ).collect(engine="streaming")


def _is_greedy() -> pl.Expr:
    """Build the condition that a row was sampled at temperature 0.

    A merged row has a single temperature, because steps with different ones are never merged.
    """
    return (pl.col("temperature") == 0).fill_null(value=False)


def _unscaled() -> pl.Expr:
    """Build `temperature`, with 1 in greedy rows."""
    one = pl.lit(1.0, OPTIONAL_COLUMNS["temperature"])
    return pl.when(_is_greedy()).then(one).otherwise("temperature").alias("temperature")


def read_rows(
    rollouts: pl.LazyFrame, plan: Plan, groups: Sequence[str], config: BatchConfig
) -> pl.DataFrame:
    """Read the rows of the given groups for `to_batch`: merged if configured, joined to the plan.

    Rows are in the order of `groups`, so reading several lists of groups and concatenating the
    tables gives the same result as reading all groups at once. Without `replay_routing`, routes are
    dropped. With `replay_routing`, steps whose routes differ are not merged, so that each is
    forwarded with the experts that sampled it.
    """
    names = UNUSED_COLUMNS if config.replay_routing else (*UNUSED_COLUMNS, ROUTING)
    unused = [name for name in names if name in rollouts.collect_schema()]
    rows = rollouts.filter(pl.col("instance_id").is_in(list(groups))).drop(unused)
    if config.sequence_layout != "merge":
        rows = pipelines.unmerge(rows)
    elif config.merge_rule == "keep":
        rows = pipelines.part_by_routes(rows)
    else:
        rows = pipelines.merge(rows, config.merge_rule or "lineage", same_routes=True)
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
            *(
                name
                for name in ("segments", ROUTING, SUPPORT, PICTURES, *TEACHER)
                if name in rows.collect_schema()
            ),
            *columns,
        )
        .collect()
    )
    order = {group: number for number, group in enumerate(groups)}
    number = table["instance_id"].replace_strict(order, return_dtype=pl.Int64).to_numpy()
    return table[np.argsort(number, kind="stable")]


ROW_FACTS = ("num_targets", "num_response", "greedy", "truncated")
"""Columns of `to_batch` about rows whose tokens are in another process."""


def to_batch(
    table: pl.DataFrame,
    max_row_tokens: int | None = None,
    *,
    imitates: bool = False,
    pictures: PictureReader | None = None,
) -> Batch:
    """Convert the table that `read_rows` returns to a batch.

    If it has the columns `ROW_FACTS`, tokens of some rows are in other processes, and null here.

    Tokens beyond the first `max_row_tokens` of a row are excluded from training, as are rows at
    temperature 0. With `imitates`, for losses without advantages, the latter are trained at
    temperature 1. Pictures are shown if there is a reader of them.
    """
    if imitates:
        table = table.with_columns(_unscaled())
    prompts = _ragged(table["prompt_token_ids"])
    responses = _ragged(table["response_ids"])
    shown: BatchPictures | None = None
    if pictures is not None and PICTURES in table.columns:
        prompts, responses, shown = place_pictures(prompts, responses, table[PICTURES], pictures)
    logprobs = _ragged(table["rollout_logprobs"])
    flat_logprobs = np.full(len(responses.values), np.nan, dtype=np.float32)
    flat_logprobs[np.repeat(logprobs.valid, responses.lengths)] = logprobs.values

    def per_token(name: str, fill: float) -> Tensor:
        values = table[name].fill_null(fill).to_numpy().astype(np.float32)
        return torch.from_numpy(np.repeat(values, responses.lengths))

    row_trains = np.repeat(table["trains"].to_numpy(), responses.lengths)
    in_loss = _ragged(table["loss_mask"]).values.astype(np.bool_) & row_trains
    is_greedy = table.select(_is_greedy()).to_series().to_numpy()
    num_rows, row = len(table), responses.row_of(np.arange(len(in_loss)))
    greedy = is_greedy & (np.bincount(row[in_loss], minlength=num_rows) > 0)
    trains = in_loss & ~is_greedy[row]
    beyond = np.zeros_like(trains)
    if max_row_tokens is not None:
        position = np.arange(len(row)) - responses.offsets[row] + prompts.lengths[row]
        beyond = trains & (position >= max_row_tokens)
        trains &= ~beyond
    sizes: dict[str, Any] = {
        "num_targets": np.bincount(row[trains], minlength=num_rows),
        "num_response": responses.lengths,
        "greedy": greedy,
        "truncated": np.bincount(row[beyond], minlength=num_rows) > 0,
    }
    if ROW_FACTS[0] in table.columns:
        sizes = {name: table[name].to_numpy() for name in ROW_FACTS}
    return Batch(
        **sizes,
        names=tuple(table["name"]),
        prompts=prompts,
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
        routes=routes_of(table),
        support=sets_of(table, responses.lengths) if SUPPORT in table.columns else None,
        teacher=_teacher(table, responses.lengths),
        pictures=shown,
    )


def without_sets(batch: Batch) -> Batch:
    """Return a batch whose log-probabilities are normalised over the entire vocabulary.

    The sampler's log-probabilities over a set cannot be compared with those: they become NaN.
    """
    if batch.support is None:
        return batch
    has_set = torch.from_numpy(batch.support.lengths > 0)
    logprobs = batch.rollout_logprobs.masked_fill(has_set, torch.nan)
    return dataclasses.replace(batch, support=None, rollout_logprobs=logprobs)


def _teacher(table: pl.DataFrame, lengths: IntArray) -> tuple[Ragged, Ragged] | None:
    if not {*TEACHER} <= {*table.columns}:
        return None
    ids, logprobs = (sets_of(table, lengths, name) for name in TEACHER)
    return None if ids is None or logprobs is None else (ids, logprobs)


def routes_of(table: pl.DataFrame) -> Routes | None:
    """Return the recorded experts of the rows of a table; None if no row has any."""
    if ROUTING not in table.columns or table[ROUTING].is_null().all():
        return None
    return Routes.from_arrow(table.select(ROUTING).to_arrow().column(ROUTING))


def groups_with_gradient(accelerator: Accelerator, batch: Batch) -> frozenset[str]:
    """Return the instance ids of groups that have a trained token with a nonzero advantage."""
    with_gradient = np.flatnonzero(batch.trains & (batch.advantages.numpy() != 0))
    groups = batch.group[batch.responses.row_of(with_gradient)]
    moves = np.bincount(groups, minlength=len(batch.group_names)) > 0
    groups = np.flatnonzero(over_processes(accelerator, moves, "max"))
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


def cut_batch(batch: Batch, config: BatchConfig) -> list[MiniBatch]:
    """Split a batch into mini-batches, and each into micro-batches of `tokens_per_micro_batch`.

    With the layout `tree`, every row must be a single step.
    """
    tokens = batch.prompts, batch.responses
    routes, budget = batch.routes, config.tokens_per_micro_batch
    lengths = chain_lengths(*tokens, batch.trains)
    scope = batch.scope(config)
    mini_batches = []
    for number in range(int(batch.mini_batch.max(initial=-1)) + 1):
        rows = np.flatnonzero(batch.mini_batch == number)
        if config.sequence_layout == "tree":
            trie = make_trie(*tokens, lengths, scope, rows, routes)
            forests = tree_forests(trie, *tokens, batch.trains, budget, routes)
            forests = completed(forests, batch)
            num_distinct, num_tokens = trie.num_tokens, sum(forest.num_tokens for forest in forests)
            repeated_share = num_tokens / max(num_distinct, 1) - bool(forests)
            mini_batches.append(
                MiniBatch(
                    forests=forests,
                    num_distinct_tokens=num_distinct,
                    metrics={"repeated_share": repeated_share},
                )
            )
        else:
            forests = chain_forests(*tokens, batch.trains, rows, budget, routes)
            mini_batches.append(MiniBatch(forests=completed(forests, batch)))
    return mini_batches


def completed(forests: Sequence[Forest], batch: Batch) -> list[Forest]:
    """Add the sets of ids of a batch, and its pictures, to micro-batches of its rows."""
    forests = with_sets(forests, batch.support) if batch.support else list(forests)
    return with_pictures(forests, batch.pictures) if batch.pictures else forests
