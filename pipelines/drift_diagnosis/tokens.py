"""Decode tokens of single rows on demand, and find where two token lists agree again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.merging.prefix_tree import Ancestry, PrefixTree
from rollout_io.dataset.prefix_layout import Ids, is_encoded
from schemas.pictures import identity_ids
from schemas.ragged import IntArray, Ragged

# 8 tokens in a row rarely recur by chance; the multiplier is 2**64 / golden ratio, made odd.
_GRAM = 8
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Steps:
    """The N rows of a table, decoded one at a time.

    Attributes:
        holder: [N] the row that stores the last token before `begin` (see `Ancestry`).
        begin: [N] number of leading tokens that the row takes from its parent; 0 if it stores its
            entire prompt.
        prompt_lengths: [N] number of tokens in each prompt.
        own: The part of each prompt that the row stores.
        responses: The responses.
    """

    holder: IntArray
    begin: IntArray
    prompt_lengths: IntArray
    own: Ragged
    responses: Ragged

    @classmethod
    def of(cls, table: pa.Table, tree: PrefixTree) -> Steps:
        """Wrap the rows of a table in either layout."""
        encoded = is_encoded(table)
        name = "prompt_suffix_ids" if encoded else "prompt_token_ids"
        own = Ragged.from_arrow(table.column(name))
        responses = Ragged.from_arrow(table.column("response_ids"))
        begin = tree.shared if encoded else np.zeros(table.num_rows, np.int64)
        return cls(Ancestry(tree).holder, begin, tree.prompt, own, responses)

    def seen(self, pictures: pa.ChunkedArray | None) -> Steps:
        """Return the rows with `identity_ids`, which tell the tokens of pictures apart."""
        own = identity_ids(self.own, self.begin, pictures)
        return replace(
            self, own=own, responses=identity_ids(self.responses, self.prompt_lengths, pictures)
        )

    def prompt(self, row: int) -> Ids:
        """Decode the prompt of a row."""
        return self._leading(row, int(self.prompt_lengths[row]))

    def content(self, row: int) -> Ids:
        """Decode the prompt and response of a row into one array."""
        return np.concatenate([self.prompt(row), self.responses.row(row)])

    def _leading(self, row: int, stop: int) -> Ids:
        parts: list[Ids] = []
        while stop > 0:
            begin = int(self.begin[row])
            if stop > begin:
                from_prompt = self.own.row(row)[: stop - begin]
                rest = stop - begin - len(from_prompt)
                parts += [self.responses.row(row)[:rest], from_prompt]
                stop = begin
            row = int(self.holder[row])
        return np.concatenate([self.own.values[:0], *reversed(parts)])


def changed(lost: Ids, now: Ids) -> tuple[int, int] | None:
    """Count the leading tokens of each list that differ before both agree again.

    The lists agree where their next 8 tokens are equal, or all remaining tokens of `lost` if there
    are fewer than 8. If this holds at several positions, the result is the one with the fewest
    changed tokens; if it holds nowhere, the result is None.

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


def returns(response: Ids, now: Ids) -> bool:
    """True if any 8 consecutive tokens of a response (or all, if it is shorter) occur in a prompt.

    False for an empty response.
    """
    size = min(_GRAM, len(response))
    if not size or len(now) < size:
        return False
    return bool(np.isin(_grams(response, size), _grams(now, size)).any())


def _meets_at_the_end(lost: Ids, now: Ids) -> tuple[int, int] | None:
    near = now[: 2 * len(lost) + _GRAM].astype(np.int64).tobytes()
    starts = range(max(0, len(lost) - _GRAM), len(lost))
    places = ((start, _find(lost[start:].astype(np.int64).tobytes(), near)) for start in starts)
    return min(((a, b) for a, b in places if b >= 0), key=sum, default=None)


def _find(tokens: bytes, among: bytes) -> int:
    """Find a run of int64 tokens in a longer one; return the index of the first match, or -1."""
    at = among.find(tokens)
    # A match that does not start at a multiple of 8 bytes straddles two tokens.
    while at % 8 and at >= 0:
        at = among.find(tokens, at + 1)
    return at // 8


def _grams(tokens: Ids, size: int) -> npt.NDArray[np.uint64]:
    """[tokens - size + 1] Hash the `size` tokens starting at each position."""
    values = tokens.astype(np.uint64)
    count = len(tokens) - size + 1
    result = np.zeros(count, np.uint64)
    for offset in range(size):
        result = result * _BASE + values[offset : offset + count]
    return result
