"""The sampled steps of sequences: their places, and digests of their tokens."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.numpy_arrays import to_numpy
from schemas.pictures import identities
from schemas.ragged import IntArray, Ragged, list_lengths, offsets_of

_DIGEST_BYTES = 16


class Tokens:
    """The tokens of N sequences, and the samples made of them.

    Args:
        table: Rows with full prompts, merged or not.

    Attributes:
        prompts: [N] int32 ids.
        responses: [N] int32 ids.
        masks: [N] bool, the `loss_mask`.
        suffix: Ending of the names of columns with prompts and completions.
    """

    suffix = "_ids"

    def __init__(self, table: pa.Table) -> None:
        self.prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
        self.responses = Ragged.from_arrow(table.column("response_ids"))
        self.masks = Ragged.from_arrow(table.column("loss_mask"))
        self._starts, self._lengths, self._first = _spans(table, self.responses.lengths)

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return the start and the length, in the response, of each step of a sequence."""
        steps = slice(self._first[row], self._first[row + 1])
        return list(zip(self._starts[steps].tolist(), self._lengths[steps].tolist(), strict=True))

    def trained(self, row: int) -> list[int]:
        """Return the numbers of the steps of a sequence whose tokens all train."""
        mask, spans = self.masks.row(row), enumerate(self.spans(row))
        return [i for i, (at, num) in spans if num and mask[at : at + num].all()]

    def whole(self, row: int) -> dict[str, Any]:
        """Return a sequence as a sample of TRL's SFT trainer: its ids, and 1 where they train."""
        prompt, mask = self.prompts.row(row), self.masks.row(row)
        masks = np.concatenate([np.zeros(len(prompt), np.int8), mask.astype(np.int8)])
        ids = np.concatenate([prompt, self.responses.row(row)])
        return {"input_ids": ids, "assistant_masks": masks}

    def step(self, row: int, step: int) -> tuple[Any, Any, dict[str, Any]]:
        """Return the prompt of a step, which is all tokens before it, its sampled tokens, and {}."""
        start, length = self.spans(row)[step]
        response = self.responses.row(row)
        before = np.concatenate([self.prompts.row(row), response[:start]])
        return before, response[start : start + length].copy(), {}  # keeps no table in memory


def _spans(table: pa.Table, lengths: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return start and length of all steps, and the [N + 1] first step of each row."""
    alone = np.zeros(len(lengths), np.int64), lengths, np.arange(len(lengths) + 1)
    if "segments" not in table.column_names:
        return alone
    column = table.column("segments")
    is_merged = to_numpy(column.is_valid())
    count = np.where(is_merged, list_lengths(column), 1)
    first, is_listed = offsets_of(count), np.repeat(is_merged, count)
    flat = pc.list_flatten(column)
    starts, sizes = np.zeros(int(first[-1]), np.int64), np.repeat(lengths, count)
    starts[is_listed] = to_numpy(pc.struct_field(flat, "start"))
    sizes[is_listed] = to_numpy(pc.struct_field(flat, "length"))
    return starts, sizes, first


def _digest(ids: IntArray) -> blake2b:
    return blake2b(ids.data, digest_size=_DIGEST_BYTES)


def index_steps(table: pa.Table, first_row: int) -> pl.DataFrame:
    """List the steps of sequences.

    Args:
        table: Merged rows of complete trajectories.
        first_row: Number of the first row.

    Returns:
        instance_id, trajectory_id; row (int64) and step (int64, its number in the row); context
        and sampled (16-byte digests of the tokens and pictures before the step, and of the step); trains (true
        if every token of the step trains); place (step_index before merging), num_tokens, and
        is_cut_off (true if the engine stopped at its limit). Time grows with the tokens of the sequences, not with
        the sum of the prompts.

    Example:
        A sequence with prompt [1, 2] and response [3, 9, 4], in which 9 is an observation, has two
        steps: [3] after [1, 2], and [4] after [1, 2, 3, 9].
    """
    tokens, (prompts, responses) = Tokens(table), identities(table)
    rows, steps, contexts, sampled, trains = [], [], [], [], []
    for row in range(table.num_rows):
        response, trained = responses.row(row).astype(np.int64), tokens.trained(row)
        digest, done = _digest(prompts.row(row).astype(np.int64)), 0
        for step, (start, length) in enumerate(tokens.spans(row)):
            digest.update(response[done:start].data)
            ids = _digest(response[start : start + length])
            rows.append(row)
            steps.append(step)
            contexts.append(digest.digest())
            sampled.append(ids.digest())
            trains.append(step in trained)
            done = start
    names = table.select(["instance_id", "trajectory_id"]).take(pa.array(rows, pa.int64()))
    lengths = [length for row in range(table.num_rows) for _, length in tokens.spans(row)]
    reasons = _per_step(table, "stop_reason", rows)
    frame = pl.from_arrow(names)
    assert isinstance(frame, pl.DataFrame)
    return frame.with_columns(
        pl.Series("row", rows, pl.Int64) + first_row,
        pl.Series("step", steps, pl.Int64),
        pl.Series("context", contexts, pl.Binary),
        pl.Series("sampled", sampled, pl.Binary),
        pl.Series("trains", trains, pl.Boolean),
        pl.Series("place", _per_step(table, "step_index", rows), pl.Int64),
        pl.Series("num_tokens", lengths, pl.Int64),
        pl.Series("is_cut_off", [reason == "length" for reason in reasons], pl.Boolean),
    )


def _per_step(table: pa.Table, name: str, rows: list[int]) -> list[Any]:
    """Return the value of each step: its segment's if that has one, else its row's."""
    if name not in table.column_names:
        return [None] * len(rows)
    values, step_values = table.column(name).to_pylist(), list[Any]()
    segments: list[Any] = [None] * len(values)
    if "segments" in table.column_names:
        segments = table.column("segments").to_pylist()
    for row_segments, value in zip(segments, values, strict=True):
        step_values += (
            [value]
            if row_segments is None
            else [segment.get(name, value) for segment in row_segments]
        )
    return step_values
