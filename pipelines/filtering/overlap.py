"""Find the trajectories whose text overlaps with an evaluation set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.filtering.regions import regions, sequence_hashes
from pipelines.filtering.verdicts import STEPS, Filter
from pipelines.tables import Frame, as_lazy
from rollout_io.dataset.opening import open_input
from rollout_io.dataset.trajectory_facts import joined_steps
from rollout_io.formats.parsing.jsonl import decode_line, read_lines
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.errors import InputError

NUM_WORDS, LEAST_WORDS = 8, 5
LEAST_SHARE = 0.5
CONTEXT_TOKENS = 1024
"""Maximum number of tokens before a step's sampled tokens that are searched too."""

_WORD = re.compile(r"\w+")
_COLUMNS = {"trajectory_id": pl.String, "line": pl.Int64, "share": pl.Float64}

Hashes = npt.NDArray[np.uint64]


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
        tokens, owners = regions(rows, CONTEXT_TOKENS)
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
