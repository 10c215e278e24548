"""Sets of ids that could have been drawn, over which log-probabilities are normalised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from schemas.ragged import BoolArray, IntArray, Ragged, gather, list_lengths, offsets_of
from trainer.batches.overlap import to_device

SUPPORT = "sampling_support"
TEACHER = ("teacher_token_ids", "teacher_logprobs")
LARGEST_ERROR = 1e-3
"""Error of a log-probability of 0 that rounding can explain, nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSets:
    """The sets of a micro-batch's M targets; L of the targets have one.

    Attributes:
        free: [M - L] int64 targets without a set: any id could have been drawn.
        limited: [L] int64 targets with a set.
        position: [M] int64 index of each target in the concatenation of `free` and `limited`.
        lengths: [L] int64 size of each set, on the CPU.
        ids: int64 ids of all sets, concatenated.
    """

    free: Tensor
    limited: Tensor
    position: Tensor
    lengths: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> TargetSets:
        """Copy to a device, except the lengths, for which a GPU would have to wait."""
        names = ("free", "limited", "position", "ids")
        return replace(self, **{name: to_device(getattr(self, name), device) for name in names})


def target_sets(support: Ragged, slots: Tensor) -> TargetSets | None:
    """Look up the sets of targets; None if none of them has one.

    Args:
        support: Sets of a batch's T response tokens, [T] rows.
        slots: [M] int64 targets, as indices into the response tokens.

    Example:
        >>> sets = Ragged(np.array([3, 5]), np.array([0, 0, 2]), np.ones(2, bool))
        >>> found = target_sets(sets, torch.tensor([1, 0]))
        >>> found.limited.tolist(), found.free.tolist(), found.ids.tolist()
        ([0], [1], [3, 5])
    """
    starts = support.offsets[slots.numpy()]
    lengths = support.offsets[slots.numpy() + 1] - starts
    limited, free = np.flatnonzero(lengths > 0), np.flatnonzero(lengths == 0)
    if not len(limited):
        return None
    arrays: dict[str, Any] = {
        "free": free,
        "limited": limited,
        "position": np.argsort(np.concatenate([free, limited])),
        "lengths": lengths[limited],
        "ids": gather(support.values, starts[limited], lengths[limited]),
    }
    return TargetSets(**{k: torch.from_numpy(v.astype(np.int64)) for k, v in arrays.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSets:
    """A teacher's most likely ids for each of a micro-batch's M targets.

    Attributes:
        lengths: [M] int64 number of ids of each target, on the CPU.
        ids: int64 ids of all targets, concatenated.
        logprobs: float32 log-probabilities of the ids, nats.
        is_reverse: Compute the reverse KL divergence; false: the cross-entropy.
    """

    lengths: Tensor
    ids: Tensor
    logprobs: Tensor
    is_reverse: bool

    def to(self, device: torch.device) -> TeacherSets:
        """Copy to a device, except the lengths."""
        ids, logprobs = to_device(self.ids, device), to_device(self.logprobs, device)
        return replace(self, ids=ids, logprobs=logprobs)


def teacher_sets(teacher: tuple[Ragged, Ragged], slots: Tensor, *, is_reverse: bool) -> TeacherSets:
    """Look up the teacher's ids of targets.

    Args:
        teacher: Ids and log-probabilities of a batch's T response tokens, [T] rows each.
        slots: [M] int64 targets, as indices into the response tokens.
        is_reverse: See `TeacherSets`.
    """
    ids, logprobs = teacher
    starts = ids.offsets[slots.numpy()]
    lengths = ids.offsets[slots.numpy() + 1] - starts
    values = gather(ids.values, starts, lengths).astype(np.int64)
    return TeacherSets(
        lengths=torch.from_numpy(lengths.astype(np.int64)),
        ids=torch.from_numpy(values),
        logprobs=torch.from_numpy(gather(logprobs.values, starts, lengths).astype(np.float32)),
        is_reverse=is_reverse,
    )


def sets_of(table: pl.DataFrame, lengths: IntArray, name: str = SUPPORT) -> Ragged | None:
    """Return the sets of a table's response tokens, one row per token; None if it has none.

    Args:
        table: Rows of a dataset.
        lengths: Number of response tokens of each row; a row without sets has empty ones.
        name: The column.
    """
    if table[name].is_null().all():
        return None
    has_sets = np.repeat(table[name].is_not_null().to_numpy(), lengths)
    sets = Ragged.from_arrow(table[name].drop_nulls().explode(empty_as_null=False).to_arrow())
    sizes = np.zeros(len(has_sets), np.int64)
    sizes[has_sets] = sets.lengths
    return Ragged(sets.values, offsets_of(sizes), np.ones(len(sizes), np.bool_))


def covers_trained_tokens(rows: pl.Series) -> pl.Series:
    """Return true for each row in which every trained token has a set that its logprob fits.

    The log-probability of a token that was the only one to draw is 0 if it is normalised over the
    set, and shows otherwise that it is not.

    Args:
        rows: Structs of `loss_mask`, `sampling_support` and `rollout_logprobs`.
    """
    mask = Ragged.from_arrow(rows.struct.field("loss_mask").to_arrow())
    column = rows.struct.field(SUPPORT)
    sets = column.list.eval(pl.element().list.len())
    sizes, is_set = list_lengths(sets.to_arrow()), Ragged.from_arrow(sets.to_arrow())
    covered: BoolArray = is_set.valid & (sizes == mask.lengths)
    slot = np.flatnonzero(mask.values)
    row = mask.row_of(slot)
    slot, row = slot[covered[row]], row[covered[row]]
    at = is_set.offsets[row] + slot - mask.offsets[row]
    covered[row[is_set.values[at] == 0]] = False
    logprobs = Ragged.from_arrow(rows.struct.field("rollout_logprobs").to_arrow())
    fits = (logprobs.lengths == mask.lengths)[row]
    slot, row, at = slot[fits], row[fits], at[fits]
    sampled = logprobs.values[logprobs.offsets[row] + slot - mask.offsets[row]]
    covered[row[(is_set.values[at] == 1) & (sampled < -LARGEST_ERROR)]] = False
    return pl.Series(rows.name, covered)
