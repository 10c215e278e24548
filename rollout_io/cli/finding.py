"""`rollouts inspect --find`: where a text or token ids occur in a dataset."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa

from rollout_io.cli.output import emit, emit_json, note
from rollout_io.dataset.finding import FOUND_COLUMNS, TEXT_COLUMNS, Match, find, find_in_texts
from rollout_io.dataset.reader import iter_tables, read_metadata, scan
from rollout_io.retokenize.local import remembered_tokenizer
from rollout_io.retokenize.token_bytes import TokenBytes, load_token_bytes
from rollout_io.terminal import printable
from schemas.errors import ConfigError, count
from schemas.numpy_arrays import to_arrow

if TYPE_CHECKING:
    from rollout_io.dataset.prefix_layout import Tokens

_IDS = re.compile(r"\d{1,9}([\s,]+\d{1,9})*")


def print_matches(
    dataset: str,
    sought: str | Tokens,
    tokenizer: str | None,
    trajectory_ids: list[str] | None,
    limit: int,
    *,
    as_json: bool,
) -> None:
    """Search a dataset, print the first matches, and count all of them.

    Args:
        dataset: Path of the dataset.
        sought: A text, or [K] adjacent token ids.
        tokenizer: Its tokens are searched for a text. None: the dataset's; without it, the logged
            texts are searched.
        trajectory_ids: Ids of the trajectories to search; None: all.
        limit: Maximum number of matches to print.
        as_json: Print them as JSON.
    """
    named = tokenizer or remembered_tokenizer(read_metadata(dataset))
    vocabulary = None if named is None else load_token_bytes(named)
    matches = _matches(dataset, sought, vocabulary, trajectory_ids)
    shown = list(islice(matches, limit))
    num_matches, trajectories = len(shown), {match.trajectory_id for match in shown}
    for match in matches:
        num_matches += 1
        trajectories.add(match.trajectory_id)
    if as_json:
        emit_json([dataclasses.asdict(match) for match in shown])
    else:
        for match in shown:
            emit(_line(match))
    if isinstance(sought, str) and vocabulary is None:
        note(
            "only logged messages and responses were searched; pass --tokenizer DIR for all tokens"
        )
    total = f"{count(num_matches, 'match', 'es')} in {count(len(trajectories), 'trajectory')}"
    note(f"{total}; the first {len(shown)} shown" if len(shown) < num_matches else total)


def ids_of(text: str) -> Tokens:
    """Parse token ids separated by commas or spaces.

    Raises:
        ConfigError: `choices`: the text has other characters.

    Example:
        >>> ids_of("12,13").tolist()
        [12, 13]
    """
    import numpy as np

    if not _IDS.fullmatch(text.strip()):
        expected = "whole numbers below 10^9, separated by commas or spaces"
        raise ConfigError("choices", "--find-ids", repr(text[:40]), expected)
    return np.array(re.findall(r"\d+", text), np.int32)


def _matches(
    dataset: str,
    sought: str | Tokens,
    vocabulary: TokenBytes | None,
    trajectory_ids: list[str] | None,
) -> Iterator[Match]:
    names: tuple[str, ...] = FOUND_COLUMNS
    if isinstance(sought, str) and vocabulary is None:
        present = scan(dataset).collect_schema().names()
        names = tuple(name for name in TEXT_COLUMNS if name in present)
    chosen = None if trajectory_ids is None else pl.Series(trajectory_ids, dtype=pl.String)
    for table in iter_tables(dataset, names, decode=False):
        searched = table if chosen is None else _only(table, chosen)
        if isinstance(sought, str) and vocabulary is None:
            yield from find_in_texts(searched, sought)
        else:
            yield from find(searched, sought, vocabulary)


def _only(table: pa.Table, trajectory_ids: pl.Series) -> pa.Table:
    ids = pl.Series(table.column("trajectory_id"))
    return table.filter(to_arrow(ids.is_in(trajectory_ids.implode()).to_numpy()))


def _line(match: Match) -> str:
    where = f"{match.trajectory_id}  step {match.step_index}"
    if match.position is not None:
        where += f", token {match.position}"
    shown = " ".join(f"{match.before}[{match.found}]{match.after}".split())
    return f"{printable(where)}: {printable(shown)}"
