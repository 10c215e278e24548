"""Find token ids, or a text in the decoded tokens, without decoding the `prefix` layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rollout_io.dataset.prefix_layout import (
    Tokens,
    encode_prefixes,
    is_encoded,
    trajectory_starts,
)
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import IntArray, Ragged, gather, offsets_of, ranges, zipped

FOUND_COLUMNS = ("trajectory_id", "step_index", "prompt_token_ids", "response_ids")
"""Columns that `find` needs (the prefix columns may replace `prompt_token_ids`)."""

TEXT_COLUMNS = ("trajectory_id", "step_index", "messages", "response_text")
"""Columns that `find_in_texts` needs."""

_TOKEN_BYTES = 4
_AROUND, _AROUND_CHARS = 16, 60


@dataclass(frozen=True, slots=True)
class Match:
    """One occurrence of the sought ids or text.

    Attributes:
        trajectory_id, step_index: The first row of the trajectory that contains the occurrence.
        position: Index of its first token in the row's prompt + response; None in a logged text.
        before: Text of up to 16 tokens before the occurrence (ids, without a vocabulary).
        found: Text of its tokens: all tokens with a part of a sought text.
        after: Text of up to 16 tokens after it.
    """

    trajectory_id: str
    step_index: int
    position: int | None
    before: str
    found: str
    after: str


def find(
    table: pa.Table, sought: Tokens | str, vocabulary: TokenBytes | None = None
) -> Iterator[Match]:
    """Yield the occurrences in a table of complete trajectories, by row and position.

    An occurrence within tokens that a row repeats from an earlier row of its trajectory is reported
    only for the earlier row. So each row is searched only in the tokens that the `prefix` layout
    stores, and in as many tokens before them as an occurrence may overlap.

    Args:
        table: Valid table with `FOUND_COLUMNS`, in either layout.
        sought: [K] adjacent token ids, or a text; not empty. A text may begin and end inside tokens.
        vocabulary: Bytes of each token. To search for a text without it: `find_in_texts`.

    Example:
        Steps with prompts [1, 2] and [1, 2, 3, 9] and responses [3] and [4]:

        >>> [(m.step_index, m.position) for m in find(table, np.array([2, 3], np.int32))]
        [(0, 1)]
        >>> [(m.step_index, m.position) for m in find(table, np.array([3, 9, 4], np.int32))]
        [(1, 2)]
    """
    table = table if is_encoded(table) else encode_prefixes(table)
    most_tokens = len(sought.encode("utf-8", "replace") if isinstance(sought, str) else sought)
    suffixes = Ragged.from_arrow(table.column("prompt_suffix_ids"))
    tokens_of = zipped(suffixes, Ragged.from_arrow(table.column("response_ids")))
    shared = to_numpy(table.column("prefix_length")).astype(np.int64)
    before = _ends_of_prefixes(table, tokens_of, shared, max(most_tokens - 1, _AROUND))
    lengths = np.minimum(tokens_of.lengths, most_tokens - 1)
    heads = Ragged(
        gather(tokens_of.values, tokens_of.offsets[:-1], lengths),
        offsets_of(lengths),
        tokens_of.valid,
    )
    overlap = before.lengths.tolist()
    places = [
        (row, overlap[row] + first, overlap[row] + last)
        for row, first, last in _places(tokens_of, sought, vocabulary)
    ]
    for row, first, last in _places(zipped(before, heads), sought, vocabulary):
        if first < overlap[row] < last:
            places.append((row, first, last))
    ids, steps = table.column("trajectory_id"), table.column("step_index")
    for row, first, last in sorted(places):
        tokens = np.concatenate([before.row(row), tokens_of.row(row)])
        yield Match(
            trajectory_id=ids[row].as_py(),
            step_index=steps[row].as_py(),
            position=int(shared[row]) - overlap[row] + first,
            before=_spelled(tokens[max(first - _AROUND, 0) : first], vocabulary),
            found=_spelled(tokens[first:last], vocabulary),
            after=_spelled(tokens[last : last + _AROUND], vocabulary),
        )


def find_in_texts(table: pa.Table, text: str) -> Iterator[Match]:
    """Yield the logged texts that contain a text: messages and responses, each where it first occurs.

    Args:
        table: Valid table of complete trajectories with `TEXT_COLUMNS`; the nullable may be absent.
        text: The text, not empty.
    """
    trajectory, seen = None, set[str]()
    for row in table.to_pylist():
        if row["trajectory_id"] != trajectory:
            trajectory, seen = row["trajectory_id"], set()
        texts = [*_strings(row.get("messages"), text), row.get("response_text") or ""]
        for value in dict.fromkeys(t for t in texts if text in t and t not in seen):
            before, _, after = value.partition(text)
            around = before[-_AROUND_CHARS:], text, after[:_AROUND_CHARS]
            yield Match(row["trajectory_id"], row["step_index"], None, *around)
        seen.update(texts)


def _spelled(ids: Tokens, vocabulary: TokenBytes | None) -> str:
    return " ".join(map(str, ids.tolist())) if vocabulary is None else vocabulary.text(ids)


def _ends_of_prefixes(
    table: pa.Table, tokens_of: Ragged, shared: IntArray, most_tokens: int
) -> Ragged:
    """Return the last tokens, at most `most_tokens`, of the prefix that each row shares."""
    starts = trajectory_starts(table)
    first_row = np.repeat(starts, np.diff(starts, append=table.num_rows))
    parents = first_row + filled(table.column("parent_step_index"), 0)
    lengths = np.minimum(shared, most_tokens)
    after = shared - shared[parents]  # where the prefix ends in the parent's own tokens
    reach = np.minimum(lengths, np.maximum(after, 0))
    offsets = offsets_of(lengths)
    values = np.zeros(int(offsets[-1]), tokens_of.values.dtype)
    at_end = ranges(offsets[1:] - reach, reach)
    values[at_end] = tokens_of.values[ranges(tokens_of.offsets[parents] + after - reach, reach)]
    # The rest of a prefix that begins before the parent's own tokens comes from its ancestors.
    for row in np.flatnonzero(reach < lengths).tolist():
        missing, end, above = int(lengths[row] - reach[row]), int(shared[row]), int(parents[row])
        while missing:
            end = min(end, int(shared[above]))
            above = int(parents[above])
            num_own = max(end - int(shared[above]), 0)
            taken = min(num_own, missing)
            out = int(offsets[row]) + missing
            begin = int(tokens_of.offsets[above]) + num_own
            values[out - taken : out] = tokens_of.values[begin - taken : begin]
            missing -= taken
    return Ragged(values, offsets, np.ones(table.num_rows, np.bool_))


def _places(
    rows: Ragged, sought: Tokens | str, vocabulary: TokenBytes | None
) -> Iterator[tuple[int, int, int]]:
    """Yield the occurrences inside rows as (row, index of first token, index after the last)."""
    tokens = np.ascontiguousarray(rows.values, np.int32)
    if isinstance(sought, str):
        assert vocabulary is not None
        needle, content = sought.encode("utf-8", "replace"), vocabulary.join(tokens)
        starts = np.fromiter(_occurrences(content, needle), np.int64)
        ends = np.cumsum(vocabulary.lengths(tokens)) if len(starts) else starts
        firsts = np.searchsorted(ends, starts, side="right")
        lasts = np.searchsorted(ends, starts + len(needle) - 1, side="right") + 1
    else:
        starts = np.fromiter(_occurrences(tokens.tobytes(), sought.tobytes()), np.int64)
        firsts = starts[starts % _TOKEN_BYTES == 0] // _TOKEN_BYTES
        lasts = firsts + len(sought)
    in_row = rows.row_of(firsts)
    is_inside = lasts <= rows.offsets[in_row + 1]
    begins = rows.offsets[in_row]
    columns = (values[is_inside].tolist() for values in (in_row, firsts - begins, lasts - begins))
    yield from zip(*columns, strict=True)


def _occurrences(content: bytes, needle: bytes) -> Iterator[int]:
    at = content.find(needle)
    while at >= 0:
        yield at
        at = content.find(needle, at + 1)


def _strings(messages: str | None, text: str) -> Iterator[str]:
    """Yield the strings in logged messages; none if the JSON cannot contain the text."""
    if messages is None or ("\\" not in messages and text not in messages):
        return
    try:
        nodes = [json.loads(messages)]
    except (ValueError, RecursionError):
        yield messages
        return
    while nodes:
        node = nodes.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += node.values()
