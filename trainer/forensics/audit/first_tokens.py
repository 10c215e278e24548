"""Choose the rows and tokens that an audit forwards first, so that little work is repeated later."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from schemas.ragged import BoolArray, IntArray
from trainer.forensics.audit.rescoring import num_distinct_tokens
from trainer.forensics.audit.rows import AuditRows
from trainer.forensics.audit.token_scores import FloatArray

SAMPLE_TOKENS, SAMPLE_ROWS = 4_000, 24
"""Limits on the sample from which the noise is estimated; the smaller one applies."""
MOST_REPEATED = 0.01
"""If splitting a group would forward more than this fraction of all distinct tokens twice, the
sample includes the whole group."""
GOLDEN = 0.6180339887
"""Multiples of this number, modulo 1, are spread evenly, even if there are only a few."""
FEWEST = 4
"""Minimum number of tokens that the first pass scores in each span; shorter spans are scored whole."""
LAST_TOKENS = 12
"""Half of the scored tokens of a span are chosen from this number of tokens at the span's end."""


def choose_sample(rows: AuditRows, usable: IntArray) -> IntArray:
    """Choose a sample of rows, spread over the dataset, from which to estimate the noise.

    The sample consists of complete groups, because a later pass would have to forward the prompt of
    an incomplete group again. A large group whose rows share few tokens may be split.
    """
    wanted = min(len(usable), SAMPLE_ROWS, max(len(usable) // 10, 4))
    lengths = np.bincount(rows.span_row, rows.span_length, minlength=rows.num_rows)
    group = rows.group[usable]
    names = np.unique(group)
    order = names[np.argsort(np.arange(len(names)) * GOLDEN % 1)]
    found: list[int] = []
    for name in order.tolist():
        members = usable[group == name]
        part = members[: wanted - len(found)]
        if len(members) > SAMPLE_ROWS and repeats_little(rows, part, members, usable):
            members = part
        found += members.tolist()
        if len(found) >= wanted or lengths[found].sum() >= SAMPLE_TOKENS:
            break
    return np.array(sorted(found), np.int64)


def repeats_little(rows: AuditRows, part: IntArray, members: IntArray, usable: IntArray) -> bool:
    """True if few tokens are repeated when a part of a group is forwarded separately."""
    return num_repeated(rows, part, members) <= MOST_REPEATED * num_distinct_tokens(rows, usable)


def num_repeated(rows: AuditRows, part: IntArray, members: IntArray) -> int:
    """Count the tokens that are forwarded twice if `part` of `members` is forwarded separately."""
    each = (part, np.setdiff1d(members, part))
    return sum(num_distinct_tokens(rows, one) for one in each) - num_distinct_tokens(rows, members)


def with_labels_of_group(rows: AuditRows, usable: IntArray, label: IntArray) -> BoolArray:
    """[N, R] true where candidate n is the label of any usable row in the group of row r."""
    found = np.zeros((int(label.max(initial=-1)) + 1, rows.num_rows), np.bool_)
    group, labelled = rows.group, usable[label[usable] >= 0]
    of_group = np.zeros((len(found), int(group.max(initial=-1)) + 1), np.bool_)
    of_group[label[labelled], group[labelled]] = True
    found[:, usable] = of_group[:, group[usable]]
    return found


def choose_tokens(rows: AuditRows, usable: IntArray, share: float) -> BoolArray:
    """[T] true at the tokens that a first pass scores, about a fraction `share` of sampled tokens.

    The same number of tokens is chosen in every span, at least `FEWEST`, because checking the label
    of a short span takes as many tokens as checking the label of a long span. Half are chosen among
    the last tokens, to reveal weights that were swapped mid-response; half are spread over the rest.
    Each chosen token is the least likely one of its part of the span, because a nearly certain
    token has the same log-probability under all weights.
    """
    spans = np.flatnonzero(np.isin(rows.span_row, usable))
    lengths = rows.span_length[spans]
    low, high = FEWEST, int(lengths.max(initial=FEWEST))
    while low < high:
        middle = (low + high + 1) // 2
        fits = np.minimum(lengths, middle).sum() <= share * lengths.sum()
        low, high = (middle, high) if fits else (low, middle - 1)
    found = np.zeros(len(rows.responses.values), np.bool_)
    for start, length in zip(rows.span_start[spans].tolist(), lengths.tolist(), strict=True):
        stored = np.nan_to_num(rows.logprobs[start : start + length])
        found[start + np.array(_of_span(stored, low), np.int64)] = True
    return found


def _of_span(stored: FloatArray, number: int) -> list[int]:
    """Choose `number` tokens of a span by their stored log-probabilities; return their indices."""
    length = len(stored)
    if length <= number:
        return list(range(length))
    at_end = (number + 1) // 2
    last = min(max(length // 2, at_end), max(LAST_TOKENS, at_end))
    edges = [
        *np.linspace(0, length - last, number - at_end + 1).astype(np.int64).tolist(),
        *np.linspace(length - last, length, at_end + 1).astype(np.int64).tolist()[1:],
    ]
    return [first + int(np.argmin(stored[first:after])) for first, after in pairwise(edges)]


def first_portion(rows: AuditRows, among: IntArray, most: int) -> IntArray:
    """Return the first groups of `among`: up to `most` distinct tokens, but at least one group."""
    group = rows.group[among]
    ends = np.append(np.flatnonzero(np.diff(group) != 0) + 1, len(among))
    tokens = num_distinct_tokens(rows, among)
    while tokens > most and len(ends) > 1:
        ends = ends[: max(len(ends) * most // tokens, 1)]
        tokens = num_distinct_tokens(rows, among[: ends[-1]])
    return among[: ends[-1]]
