"""Find trajectories that repeat the tokens of an earlier one, or the text of an evaluation set."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.filtering import STEPS, Filter
from pipelines.frames import Frame, as_lazy
from rollout_io.dataset.opening import open_input
from rollout_io.dataset.trajectory_facts import joined_steps
from rollout_io.formats.parsing.jsonl import decode_line, read_lines
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.columns import PICTURES
from schemas.errors import ConfigError, InputError
from schemas.imports import requires_extra
from schemas.pictures import identities
from schemas.ragged import IntArray, Ragged, gather, offsets_of, zipped
from schemas.types import as_table

Signatures = npt.NDArray[np.uint32]

SHINGLE_TOKENS = 5
CONTEXT_TOKENS = 256
"""Maximum number of tokens before a step's sampled tokens that are compared too."""

_NUM_HASHES, _SEED = 256, 20_260_101
_MARGIN = 1.7
"""Standard deviations below the threshold at which a pair is still found: 95 % of those at it."""

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
NUM_WORDS, LEAST_WORDS = 8, 5
LEAST_SHARE = 0.5
TEXT_CONTEXT_TOKENS = 1024
"""Maximum number of tokens before a step's sampled tokens that are searched too."""
_WORD = re.compile(r"\w+")
_COLUMNS = {"trajectory_id": pl.String, "line": pl.Int64, "share": pl.Float64}
Hashes = npt.NDArray[np.uint64]


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


def overlaps(frame: Frame, evaluation: str | Path, vocabulary: TokenBytes) -> pl.DataFrame:
    """Find the trajectories that contain most of an example of an evaluation set.

    A trajectory overlaps with an example if at least half of the sequences of 8 adjacent words in
    one of the example's texts (its question, its answer, a message) occur in the trajectory
    (8-grams and a half, as in Tulu 3, arXiv:2411.15124, section 3.2). Words are runs of letters,
    digits and underscores, in lower case. A text of under 8 words is one sequence, if it has at
    least 5 words; shorter texts are not compared. The text of a trajectory is that of each step's
    sampled tokens and up to 1,024 tokens before them.

    Args:
        frame: Rows of complete trajectories, merged or not.
        evaluation: JSON Lines; every string in a line is a text of its example.
        vocabulary: Bytes of each token.

    Returns:
        One line per overlapping trajectory, in order: trajectory_id, line (of the example it shares
        most with, from 1), share (of the sequences of its text).

    Raises:
        InputError: `json_line`: a line is not JSON; `evaluation_set`: no text has 5 words.

    Example:
        >>> overlaps(scan("rollouts/"), "gsm8k_test.jsonl", load_token_bytes("Qwen3-8B/"))
        [('task-7_0', 12, 0.94)]
    """
    sought = _Sequences.read(Path(evaluation))

    def found_in(rows: pl.Series) -> pl.Series:
        return pl.Series(rows.name, sought.found_in(rows, vocabulary), pl.List(pl.Int64))

    frame = as_lazy(frame).with_columns(joined_steps(as_lazy(frame)).alias(STEPS))
    names = ("prompt_token_ids", "response_ids", STEPS)
    hits = pl.struct(names).map_batches(
        found_in, return_dtype=pl.List(pl.Int64), is_elementwise=True
    )
    rows = frame.select("trajectory_id", found=hits).filter(pl.col("found").list.len() > 0)
    lines: dict[str, set[int]] = {}
    for trajectory_id, numbers in rows.collect(engine="streaming").rows():
        lines.setdefault(trajectory_id, set()).update(numbers)
    best = ((name, *sought.best(numbers)) for name, numbers in lines.items())
    over = [one for one in best if one[2] >= LEAST_SHARE]
    return pl.DataFrame(over, schema=_COLUMNS, orient="row")


def overlapping(trajectories: pl.DataFrame, evaluation: str | Path) -> Filter:
    """Drop the trajectories that `overlaps` found in an evaluation set.

    Args:
        trajectories: Result of `overlaps`.
        evaluation: Path of the evaluation set, for reports.
    """
    drops = pl.col("trajectory_id").is_in(trajectories["trajectory_id"].implode())
    return Filter(name=f"overlap with {evaluation}", drops=drops)


class _Sequences:
    """The sequences of words of an evaluation set.

    Attributes:
        hashes: [K] distinct hashes of all sequences, sorted.
        texts: For each text, its line and the indices of its sequences.
    """

    def __init__(self, texts: list[tuple[int, list[str]]]) -> None:
        per_text = [(line, np.unique(_hashes(words, NUM_WORDS))) for line, words in texts]
        self.hashes = np.unique(np.concatenate([hashes for _, hashes in per_text]))
        self.lengths = sorted({min(len(words), NUM_WORDS) for _, words in texts})
        self.texts = [(n, np.searchsorted(self.hashes, hashes)) for n, hashes in per_text]
        self.texts_with: dict[int, list[int]] = {}
        for number, (_, indices) in enumerate(self.texts):
            for index in indices.tolist():
                self.texts_with.setdefault(index, []).append(number)

    @classmethod
    def read(cls, path: Path) -> _Sequences:
        """Read all texts of at least 5 words from JSON Lines."""
        decoder = msgspec.json.Decoder()
        texts = []
        with open_input(path) as file:
            for line in read_lines(file):
                value = decode_line(decoder, line.content, f"{path}:{line.number}")
                texts += [(line.number, _words(text)) for text in _strings(value)]
        texts = [(number, words) for number, words in texts if len(words) >= LEAST_WORDS]
        if not texts:
            finding, expected = (
                "no line has a text to compare",
                f"texts of at least {LEAST_WORDS} words",
            )
            raise InputError("evaluation_set", str(path), finding, expected)
        return cls(texts)

    def found_in(self, rows: pl.Series, vocabulary: TokenBytes) -> list[list[int]]:
        """Return, for each row, the indices of the sequences that occur in it."""
        tokens, owners = regions(rows, TEXT_CONTEXT_TOKENS)
        hits: list[list[int]] = [[] for _ in range(len(rows))]
        for region, row in enumerate(owners.tolist()):
            words = _words(vocabulary.text(tokens.row(region)))
            for length in self.lengths:
                hashes = _hashes(words, length) if len(words) >= length else self.hashes[:0]
                at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
                hits[row] += at[self.hashes[at] == hashes].tolist()
        return hits

    def best(self, indices: set[int]) -> tuple[int, float]:
        """Return the line of the text of which the largest share of sequences is found, and it."""
        numbers = Counter(number for i in indices for number in self.texts_with[i])
        shares = {
            number: num_hits / len(self.texts[number][1]) for number, num_hits in numbers.items()
        }
        number = max(shares, key=lambda one: (shares[one], -one))
        return self.texts[number][0], shares[number]


def _hashes(words: list[str], length: int) -> Hashes:
    """Hash all sequences of `length` adjacent words; a shorter text is one sequence."""
    length = min(length, len(words))
    word_hashes = pl.Series(words, dtype=pl.String).hash(seed=length).to_numpy()
    return sequence_hashes(word_hashes, length)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _strings(value: Any) -> Iterator[str]:
    nodes = [value]
    while nodes:
        node = nodes.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
