"""The tokens by which trajectories are compared: what was sampled, and what stands before it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.filtering.verdicts import STEPS
from schemas.pictures import identities
from schemas.ragged import IntArray, Ragged, gather, offsets_of, zipped
from schemas.types import as_table

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def sequence_hashes(values: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint64]:
    """Hash every sequence of `length` adjacent values; none if there are fewer values.

    Example:
        >>> found = sequence_hashes(np.array([1, 2, 1, 2, 3], np.uint64), 2)
        >>> len(found), found[0] == found[2], found[0] == found[1]
        (4, True, False)
    """
    hashed = np.zeros(max(len(values) - length + 1, 0), np.uint64)
    for place in range(length):
        hashed = (hashed ^ values[place : place + len(hashed)]) * MULTIPLIER
        hashed ^= hashed >> _SHIFT
    return hashed


def regions(rows: pl.Series, num_before: int) -> tuple[Ragged, IntArray]:
    """Cut the sampled tokens of each step, with the tokens before them, out of the rows.

    Args:
        rows: [N] structs of `response_ids`, the joined steps (`STEPS`) and, unless `num_before` is
            0, `prompt_token_ids`; with `pictures`, tokens are `identity_ids`.
        num_before: Maximum number of tokens before the sampled ones.

    Returns:
        tokens: Tokens of K regions, one per step, in order of rows.
        owners: [K] row of each region.

    Example:
        A row with the prompt [1, 2, 3] and the response [4], and one token before:

        >>> tokens, owners = regions(rows, 1)
        >>> tokens.row(0).tolist(), owners.tolist()
        ([3, 4], [0])
    """
    table = as_table(rows.struct.unnest().drop(STEPS))
    if num_before:
        prompts, responses = identities(table)
        parts = [prompts, responses]
    else:
        responses = Ragged.from_arrow(table.column("response_ids"))
        parts = [responses]
    prompt_lengths = parts[0].lengths if num_before else np.zeros(len(rows), np.int64)
    steps = rows.struct.field(STEPS)
    counts = np.maximum(steps.list.len().fill_null(1).to_numpy().astype(np.int64), 1)
    owners = np.repeat(np.arange(len(rows)), counts)
    starts, lengths = np.zeros(len(owners), np.int64), responses.lengths[owners]
    is_joined = np.repeat((steps.list.len().fill_null(0) > 0).to_numpy(), counts)
    spans = steps.drop_nulls().explode(empty_as_null=False)
    starts[is_joined] = spans.struct.field("start").to_numpy()
    lengths[is_joined] = spans.struct.field("length").to_numpy()
    whole = zipped(*parts)
    sampled_at = prompt_lengths[owners] + starts
    before = np.minimum(sampled_at, num_before)
    sizes = before + lengths
    values = gather(whole.values, whole.offsets[owners] + sampled_at - before, sizes)
    return Ragged(values, offsets_of(sizes), np.ones(len(owners), np.bool_)), owners
