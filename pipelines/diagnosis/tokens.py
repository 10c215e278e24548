"""Prompts and whole steps of single rows of a table, and where two token lists meet again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.tree import PrefixTree
from rollout_io.prefix import Tokens, is_encoded
from schemas.ragged import IntArray, Ragged

_GRAM = 8
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Steps:
    """The N rows of a table, whose tokens are put together on demand.

    Attributes:
        parent: [N] as in the tree.
        begin: [N] tokens that the row takes over from its parent; 0 where it holds its prompt.
        prompt_lengths: [N] tokens of the prompt.
        own: The rows' own part of the prompt.
        responses: The rows' responses.
    """

    parent: IntArray
    begin: IntArray
    prompt_lengths: IntArray
    own: Ragged
    responses: Ragged

    @classmethod
    def of(cls, table: pa.Table, tree: PrefixTree) -> Steps:
        """The rows of a table in either layout."""
        encoded = is_encoded(table)
        name = "prompt_suffix_ids" if encoded else "prompt_token_ids"
        own = Ragged.from_arrow(table.column(name))
        responses = Ragged.from_arrow(table.column("response_ids"))
        begin = tree.shared if encoded else np.zeros(table.num_rows, np.int64)
        return cls(tree.parent, begin, tree.prompt, own, responses)

    def prompt(self, row: int) -> Tokens:
        """[tokens] int32: the prompt of a row."""
        return self._leading(row, int(self.prompt_lengths[row]))

    def content(self, row: int) -> Tokens:
        """[tokens] int32: prompt and response of a row."""
        return np.concatenate([self.prompt(row), self.responses.row(row)]).astype(np.int32)

    def _leading(self, row: int, stop: int) -> Tokens:
        parts: list[Tokens] = []
        while stop > 0:
            begin = int(self.begin[row])
            if stop > begin:
                from_prompt = self.own.row(row)[: stop - begin]
                rest = stop - begin - len(from_prompt)
                parts += [self.responses.row(row)[:rest], from_prompt]
                stop = begin
            row = int(self.parent[row])
        return np.concatenate([np.zeros(0, np.int32), *reversed(parts)]).astype(np.int32)


def changed(lost: Tokens, now: Tokens) -> tuple[int, int] | None:
    """How many leading tokens of each differ until both go on with the same tokens.

    "The same" is the next 8 tokens, or all that is left of `lost` where that is less. Of several
    places the one with the fewest changed tokens; None where they never meet.

    Example:
        >>> changed(np.array([26951, 3834, 198, 12]), np.array([94224, 198, 12, 41151]))
        (2, 1)
    """
    size = min(_GRAM, len(lost))
    if len(lost) > size <= len(now):
        grams, first = np.unique(_grams(now, size), return_index=True)
        wanted = _grams(lost, size)
        at = np.minimum(np.searchsorted(grams, wanted), len(grams) - 1)
        places = np.flatnonzero(grams[at] == wanted)
        if len(places):
            best = int(places[(places + first[at[places]]).argmin()])
            return best, int(first[at[best]])
    return _meets_at_the_end(lost, now)


def returns(response: Tokens, now: Tokens) -> bool:
    """Whether 8 neighbouring tokens of a response (all, where it has fewer) stand in a prompt.

    An empty response returns nowhere.
    """
    size = min(_GRAM, len(response))
    if not size or len(now) < size:
        return False
    return bool(np.isin(_grams(response, size), _grams(now, size)).any())


def _meets_at_the_end(lost: Tokens, now: Tokens) -> tuple[int, int] | None:
    near = now[: 2 * len(lost) + _GRAM].astype(np.int32).tobytes()
    starts = range(max(0, len(lost) - _GRAM), len(lost))
    places = ((start, _find(lost[start:].astype(np.int32).tobytes(), near)) for start in starts)
    return min(((a, b) for a, b in places if b >= 0), key=sum, default=None)


def _find(tokens: bytes, among: bytes) -> int:
    """Index of the first token of the first occurrence of some int32 tokens, -1 for none."""
    at = among.find(tokens)
    while at % 4 and at >= 0:
        at = among.find(tokens, at + 1)
    return at // 4


def _grams(tokens: Tokens, size: int) -> npt.NDArray[np.uint64]:
    """[tokens - size + 1] a hash of the tokens from each position on."""
    values = tokens.astype(np.uint64)
    count = len(tokens) - size + 1
    result = np.zeros(count, np.uint64)
    for offset in range(size):
        result = result * _BASE + values[offset : offset + count]
    return result
