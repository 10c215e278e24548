"""Find trajectories that repeat most of the tokens of an earlier one, by MinHash."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.filtering.regions import regions, sequence_hashes
from pipelines.filtering.verdicts import STEPS, Filter
from schemas.columns import PICTURES
from schemas.errors import ConfigError
from schemas.imports import requires_extra
from schemas.ragged import IntArray, Ragged, gather, offsets_of, zipped

Signatures = npt.NDArray[np.uint32]

SHINGLE_TOKENS = 5
CONTEXT_TOKENS = 256
"""Maximum number of tokens before a step's sampled tokens that are compared too."""

_NUM_HASHES, _SEED = 256, 20_260_101
_MARGIN = 1.7
"""Standard deviations below the threshold at which a pair is still found: 95 % of those at it."""


def near_duplicates(similarity: float, within: Literal["group", "dataset"] = "group") -> Filter:
    """Drop trajectories that are similar to an earlier one that is kept, whatever their rewards.

        similarity(a, b) = |S_a & S_b| / |S_a | S_b|          (Jaccard)

    S is the set of all sequences of 5 adjacent tokens (`schemas.pictures.identity_ids`) among the sampled tokens of each step and up
    to 256 tokens before them. So a long system prompt that all trajectories share does not make them
    similar, but short answers to different questions differ. Merging changes no set. Failed
    trajectories are neither dropped nor compared.

    The similarity is estimated by MinHash (Broder 1997) with 256 hash functions, so its standard
    deviation is sqrt(s (1 - s) / 256), at most 0.03. A pair is found with a probability of 95 % if
    its similarity is `similarity`, of more if it is greater, and of under 5 % if it is 0.09 less.

    Args:
        similarity: Least similarity, above 0.5 and at most 1. At 1, prefer `duplicates`, which is
            exact.
        within: Compare trajectories within each group, or across the dataset.

    Raises:
        ConfigError: `choices`: the similarity is out of range.
        MissingExtra: `extra_installed`: the package rensa is not installed.

    Example:
        Two attempts with the prompt [0] and the responses [1, ..., 99, 100] and [1, ..., 99, 7] share
        96 of 98 sequences:

        >>> judge(frame, [near_duplicates(0.9)])["reason"].to_list()
        [None, 'at least 0.9 similar in group']
    """
    if not 0.5 < similarity <= 1:
        expected = "a number above 0.5 and at most 1"
        raise ConfigError("choices", "similarity", str(similarity), expected)
    with requires_extra("dedup", "near duplicates"):
        import rensa  # noqa: F401

    names = ("prompt_token_ids", "response_ids", PICTURES, STEPS)
    row = pl.struct(names).map_batches(_signatures, return_dtype=pl.Binary, is_elementwise=True)

    def repeats(found: pl.Series) -> pl.Series:
        return pl.Series(found.name, _similar_to_earlier(found.to_list(), similarity), pl.Boolean)

    value = pl.when(pl.col("error").is_null()).then("value")
    drops = value.map_batches(repeats, return_dtype=pl.Boolean)
    drops = drops.over("instance_id") if within == "group" else drops
    name = f"at least {similarity:g} similar in {within}"
    return Filter(name=name, row=row, fold=pl.Expr.implode, drops=drops)


def _similar_to_earlier(found: Iterable[list[bytes] | None], similarity: float) -> list[bool]:
    """Compare trajectories in order, each with those that were not similar to an earlier one."""
    deviation = (similarity * (1 - similarity) / _NUM_HASHES) ** 0.5
    least_equal = (similarity - _MARGIN * deviation) * _NUM_HASHES
    width = _band_width(least_equal / _NUM_HASHES)
    kept: list[Signatures] = []
    bands: defaultdict[bytes, list[int]] = defaultdict(list)
    answers = []
    for rows in found:
        if rows is None:
            answers.append(False)
            continue
        joined = np.frombuffer(b"".join(rows), np.uint32).reshape(len(rows), -1).min(axis=0)
        keys = [i.to_bytes(2) + band.tobytes() for i, band in enumerate(joined.reshape(-1, width))]
        candidates = {number for key in keys for number in bands.get(key, ())}
        is_similar = any(np.count_nonzero(kept[i] == joined) >= least_equal for i in candidates)
        answers.append(is_similar)
        if not is_similar:
            for key in keys:
                bands[key].append(len(kept))
            kept.append(joined)
    return answers


def _band_width(similarity: float) -> int:
    """Return the widest band of hashes of which a pair shares one with a probability of 99.9 %."""
    widths = (16, 8, 4, 2)
    fits = (w for w in widths if (1 - similarity**w) ** (_NUM_HASHES // w) < 0.001)
    return next(fits, 1)


def _signatures(rows: pl.Series) -> pl.Series:
    """Compute the MinHash signature of each row."""
    import rensa

    hashes = _shingles(rows)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        hashes.values, hashes.offsets.astype(np.uint64), _NUM_HASHES, _SEED
    )
    found = np.array(matrix.to_rows(), np.uint32).reshape(len(rows), _NUM_HASHES)
    return pl.Series(rows.name, [one.tobytes() for one in found], dtype=pl.Binary)


def _shingles(rows: pl.Series) -> Ragged:
    """Hash all sequences of 5 adjacent tokens of each row's regions, [N] rows of uint64."""
    found, owners = regions(rows, CONTEXT_TOKENS)
    padding = np.maximum(SHINGLE_TOKENS - found.lengths, 0)  # a shorter region is one sequence
    padded = zipped(_constant(padding, found.values.dtype), found)
    tokens = padded.values.astype(np.uint64)
    hashed = sequence_hashes(tokens, SHINGLE_TOKENS)
    lengths = padded.lengths - SHINGLE_TOKENS + 1
    values = gather(hashed, padded.offsets[:-1], lengths)
    in_row = np.bincount(owners, lengths, minlength=len(rows)).astype(np.int64)
    return Ragged(values, offsets_of(in_row), np.ones(len(rows), np.bool_))


def _constant(lengths: IntArray, dtype: np.dtype[Any]) -> Ragged:
    offsets = offsets_of(lengths)
    return Ragged(np.full(offsets[-1], -1, dtype), offsets, np.ones(len(lengths), np.bool_))
