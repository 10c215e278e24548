"""Build the table of breaks, one row per step that does not continue the previous step; and report it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.drift_diagnosis.breaks import (
    HINTS,
    KEEPS_TOKENS,
    Break,
    Cause,
    Parting,
    Steps,
    Told,
    changed,
    find_breaks,
    tell,
)
from pipelines.drift_diagnosis.texts import (
    TEXTS,
    Reading,
    decode,
    read_messages,
    read_text,
    special_ids,
)
from pipelines.frames import Frame, as_lazy, over_tables
from pipelines.merging.lineage import PrefixTree, continued_rows, prefix_tree
from pipelines.merging.merge import unmerge_table
from pipelines.merging.segments import is_joined
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.prefix_layout import Ids, decode_prefixes, is_encoded
from rollout_io.dataset.reader import iter_tables, pieces, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.retokenize import ChatTokenizer, load_tokenizer
from schemas.columns import PICTURES
from schemas.errors import count
from schemas.numpy_arrays import to_arrow
from schemas.pictures import pictures_of
from schemas.ragged import IntArray
from schemas.types import PREFIX_TYPES

# Ids shown before and after a break: enough to recognise the place in a terminal.
NUM_KEPT, NUM_SHOWN = 12, 48

SCHEMA: dict[str, Any] = {
    "trajectory_id": pl.String,
    "step_index": pl.Int32,
    "agent": pl.String,
    "cause": pl.String,
    "continues_lineage": pl.Boolean,
    "from_step_index": pl.Int32,
    "token_index": pl.Int64,
    "num_lost_tokens": pl.Int64,
    "kept_ids": pl.List(pl.Int32),
    "lost_ids": pl.List(pl.Int32),
    "now_ids": pl.List(pl.Int32),
    "kept_text": pl.String,
    "lost_text": pl.String,
    "now_text": pl.String,
    "evidence": pl.String,
}
"""Columns of the table of breaks (see `drift`)."""

_TOKENS = (
    *("trajectory_id", "step_index", "prompt_token_ids", "response_ids", "agent"),
    PICTURES,
)

_Line: TypeAlias = tuple[str, dict[str, Any], str]
_KEYS = ("cause", "agent", "step_index")
_TEXT_SIDES = ("kept_text", "lost_text", "now_text")
_ID_SIDES = ("kept_ids", "lost_ids", "now_ids")
_SUMS = ("num_breaks", "num_continuing_lineage", "num_lost_tokens")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Prefix breaks found in a table of complete trajectories.

    Attributes:
        breaks: One row per break (`SCHEMA`).
        num_steps: Number of steps in the table.
        following: Number of steps that have a prompt and are not the first of their trajectory, by
            step_index.
    """

    breaks: pl.DataFrame
    num_steps: int
    following: Mapping[int, int]

    @property
    def num_following(self) -> int:
        """Number of steps that have a prompt and are not the first of their trajectory."""
        return sum(self.following.values())


def drift(frame: Frame, tokenizer: ChatTokenizer | PathLike | None = None) -> pl.LazyFrame:
    """Explain why steps do not continue the previous step: one row per break, in row order.

    A step is compared with its parent in the prefix tree: the earlier step that shares the longest
    prefix with its prompt. If the parent belongs to another agent, the step is compared with the
    latest earlier step of the same agent. If there is no parent, it is compared with the previous
    step. Merged rows are split first.

    Args:
        frame: Complete trajectories. `agent`, `messages` and `response_text` improve the diagnosis.
        tokenizer: The tokenizer that produced the ids, or its directory; if None, the
            diagnosis uses messages or only token ids.

    Returns:
        One row per break, with these columns:

            trajectory_id, step_index, agent   the step
            cause                              a key of `HINTS`
            continues_lineage                  true if the step continues an earlier step other than
                                               the previous one, so that no token is lost
            from_step_index                    the earlier step that the step is compared with
            token_index                        the first token of the prompt that differs
            num_lost_tokens                    number of tokens of the earlier step from token_index
                                               on; 0 if the step was not meant to repeat them:
                                               `new_agent`, `overlap` or continues_lineage
            kept_ids                           up to 12 ids before token_index
            lost_ids, now_ids                  up to 48 ids from token_index on, in the earlier step
                                               and in the prompt, until the two agree again
            kept_text, lost_text, now_text     these ids as text; null without a tokenizer
            evidence                           the observation that indicates the cause

    Example:
        Prompts [69622, 11397] and [69622, 11397, 94224, 198, 12, 41151]; the first response is
        [26951, 3834, 198, 12], the same text as 94224, 198, 12:

        >>> drift(steps).select("token_index", "lost_ids", "now_ids").collect().rows()
        [(2, [26951, 3834], [94224])]
    """
    frame = as_lazy(frame)
    if isinstance(tokenizer, str | os.PathLike):
        loaded: ChatTokenizer | None = load_tokenizer(tokenizer, needs_template=False)
    else:
        loaded = tokenizer
    names = _names(frame.collect_schema().names(), loaded)
    return over_tables(frame.select(names), lambda table: diagnose(table, loaded).breaks.to_arrow())


def diagnose_dataset(
    path: PathLike, tokenizer: ChatTokenizer | None = None, workers: Workers | None = None
) -> Iterator[Diagnosis]:
    """Diagnose a dataset piece by piece; prompts are decoded only where a break is found."""
    names = _names(scan(path).collect_schema().names(), tokenizer)
    if workers is None or workers == Workers():
        yield from _diagnoses(names, tokenizer, path)
        return
    for part in workers.map_in_order(partial(_all_diagnoses, names, tokenizer), pieces(path)):
        yield from part


def _diagnoses(
    names: list[str], tokenizer: ChatTokenizer | None, path: PathLike
) -> Iterator[Diagnosis]:
    for table in iter_tables(path, names, decode=False):
        yield diagnose(table, tokenizer)


def _all_diagnoses(
    names: list[str], tokenizer: ChatTokenizer | None, path: PathLike
) -> list[Diagnosis]:
    return list(_diagnoses(names, tokenizer, path))


def diagnose(table: pa.Table, tokenizer: ChatTokenizer | None = None) -> Diagnosis:
    """Apply `drift` to an Arrow table of complete trajectories, in either layout."""
    if is_joined(table).any():
        table = unmerge_table(decode_prefixes(table) if is_encoded(table) else table)
    tree = prefix_tree(table)
    steps = Steps.of(table, tree)
    seen = steps.seen(pictures_of(table))
    agents = _agents(table)
    causes: dict[int, Told] = {}
    rows = []
    for one in find_breaks(tree, seen, _continued(table, tree), agents):
        parting = _parting(one, tree, steps)
        if one.resumes:
            told = _left_for(one.row, causes, agents)
        else:
            told = tell(one, parting, partial(_read, table, one, parting, tokenizer))
        causes[one.row] = told
        rows.append(_row(table, one, parting, told, _parting(one, tree, seen), tokenizer))
    has_prompt = tree.prompt > 0
    follows = has_prompt & (np.arange(table.num_rows) != tree.start)
    breaks = pl.DataFrame(rows, SCHEMA, orient="row")
    following = Counter(table.column("step_index").filter(to_arrow(follows)).to_pylist())
    return Diagnosis(breaks, int(has_prompt.sum()), following)


def _agents(table: pa.Table) -> list[str | None]:
    is_told = "agent" in table.column_names
    return table.column("agent").to_pylist() if is_told else [None] * table.num_rows


def _continued(table: pa.Table, tree: PrefixTree) -> IntArray:
    """[N] Find the row that each row continues, judging by tokens only."""
    names = [n for n in table.column_names if n in _TOKENS or n in PREFIX_TYPES]
    return continued_rows(table.select(names), "lineage", tree)


def _names(present: list[str], tokenizer: ChatTokenizer | None) -> list[str]:
    if "segments" in present:
        return [name for name in present if name != "rollout_expert_indices"]
    reads_text = tokenizer is not None and len(special_ids(tokenizer)) > 0
    wanted = _TOKENS if reads_text else _TOKENS + TEXTS
    return [name for name in wanted if name in present]


def _parting(found: Break, tree: PrefixTree, steps: Steps) -> Parting:
    before, prompt = steps.content(found.origin), steps.prompt(found.row)
    return Parting(before, int(tree.prompt[found.origin]), prompt, found.shared)


def _left_for(row: int, causes: dict[int, Told], agents: list[str | None]) -> Told:
    """Determine why a step resumes an earlier step, from the steps between the two."""
    first = row - 1
    while first not in causes and first > 0:
        first -= 1
    names = {agents[row], agents[row - 1]}
    cause, _ = causes.get(first, ("overlap", ""))
    is_other = len(names) > 1 if None not in names else cause == "new_agent"
    told: Cause = "new_agent" if is_other else "overlap"
    return told, "continues that step; other steps are in between"


def _read(
    table: pa.Table, found: Break, parting: Parting, tokenizer: ChatTokenizer | None
) -> Reading | None:
    reading = None
    if tokenizer is not None:
        reading = read_text(parting.before, parting.prompt, parting.shared, tokenizer)
    names = [name for name in TEXTS if name in table.column_names]
    if reading is not None or not names:
        return reading
    rows = table.select(names).take([found.origin, found.row]).to_pylist()
    return read_messages(*rows)


def _row(
    table: pa.Table,
    found: Break,
    parting: Parting,
    told: Told,
    seen: Parting,
    tokenizer: ChatTokenizer | None,
) -> list[Any]:
    cause, evidence = told
    meets = changed(seen.lost, seen.now) if len(seen.lost) else None
    num_lost, num_now = meets or (len(parting.lost), len(parting.now))
    keeps = found.resumes or cause in KEEPS_TOKENS
    shown = (
        parting.prompt[max(0, parting.shared - NUM_KEPT) : parting.shared],
        parting.lost[:num_lost][:NUM_SHOWN],
        parting.now[:num_now][:NUM_SHOWN],
    )
    return [
        table.column("trajectory_id")[found.row].as_py(),
        table.column("step_index")[found.row].as_py(),
        table.column("agent")[found.row].as_py() if "agent" in table.column_names else None,
        cause,
        found.resumes,
        table.column("step_index")[found.origin].as_py(),
        found.shared,
        0 if keeps else len(parting.lost),
        *(ids.tolist() for ids in shown),
        *(_text(ids, tokenizer) for ids in shown),
        evidence,
    ]


def _text(ids: Ids, tokenizer: ChatTokenizer | None) -> str | None:
    return None if tokenizer is None else decode(ids, tokenizer)


@dataclass(slots=True)
class Report:
    """Counts over all breaks of a dataset, and the first breaks in full.

    Attributes:
        limit: Maximum number of breaks to keep in full; None keeps all.
        num_steps: Number of steps.
        following: Number of steps that follow another step of their trajectory, by step_index.
        shown: The first breaks.
    """

    limit: int | None = None
    num_steps: int = 0
    following: Counter[int] = field(default_factory=Counter)
    shown: list[dict[str, Any]] = field(default_factory=list)
    _groups: pl.DataFrame = field(default_factory=lambda: _grouped(pl.DataFrame(schema=SCHEMA)))

    @classmethod
    def of(cls, pieces: Iterable[Diagnosis], limit: int | None = None) -> Report:
        """Summarise the diagnoses of all pieces, keeping at most `limit` breaks in full."""
        report = cls(limit)
        for piece in pieces:
            report.num_steps += piece.num_steps
            report.following.update(piece.following)
            groups = pl.concat([report._groups, _grouped(piece.breaks)])
            report._groups = groups.group_by(_KEYS).agg(pl.col(_SUMS).sum())
            left = None if limit is None else limit - len(report.shown)
            report.shown += islice(piece.breaks.iter_rows(named=True), left)
        return report

    @property
    def num_following(self) -> int:
        """Number of steps that follow another step of their trajectory."""
        return self.following.total()

    @property
    def num_breaks(self) -> int:
        """Number of steps that do not continue the previous step."""
        return int(self._groups["num_breaks"].sum())

    def by(self, *names: str) -> list[dict[str, Any]]:
        """Sum num_breaks, num_continuing_lineage and num_lost_tokens by the given columns.

        Args:
            *names: Any of cause, agent and step_index.

        Returns:
            One dict per group, with the most lost tokens first, then the most breaks; sorted by
            turn if `names` includes step_index.
        """
        sums = self._groups.group_by(names).agg(pl.col(_SUMS).sum())
        by_turn = "step_index" in names
        order = names if by_turn else ("num_lost_tokens", "num_breaks", *names)
        flags = [name in _SUMS for name in order]
        return sums.sort(order, descending=flags).to_dicts()

    def to_dict(self) -> dict[str, Any]:
        """Return the complete report as JSON-compatible values."""
        causes = [row | {"hint": HINTS[row["cause"]]} for row in self.by("cause")]
        totals = {name: int(self._groups[name].sum()) for name in _SUMS}
        return {
            "num_steps": self.num_steps,
            "num_following": self.num_following,
            "num_continuing": self.num_following - self.num_breaks,
            **totals,
            "causes": causes,
            "agents": self.by("agent", "cause"),
            "turns": self.by("step_index", "cause"),
            "breaks": self.shown,
        }


def _grouped(breaks: pl.DataFrame) -> pl.DataFrame:
    return breaks.group_by(_KEYS).agg(
        pl.len().cast(pl.Int64).alias("num_breaks"),
        pl.col("continues_lineage").sum().cast(pl.Int64).alias("num_continuing_lineage"),
        pl.col("num_lost_tokens").sum(),
    )


def render(report: Report) -> Iterator[str]:
    """Render the report as lines of text: causes with hints, agents, turns, breaks."""
    numbers = report.to_dict()
    yield (
        f"steps that follow another step of their trajectory: {numbers['num_following']:,} "
        f"({numbers['num_continuing']:,} continue it, {numbers['num_breaks']:,} break its prefix)"
    )
    yield (
        f"breaks that continue an earlier step: {numbers['num_continuing_lineage']:,} (no loss with a "
        f"lineage merge); {count(numbers['num_lost_tokens'], 'token')} lost"
    )
    if not report.num_breaks:
        return
    yield from _table("cause", [(row["cause"], row, "") for row in numbers["causes"]])
    yield from _table("agent", _folded(numbers["agents"], "agent"))
    yield from _table("turn", _folded(numbers["turns"], "step_index"))
    yield ""
    yield from (f"Hint: {row['cause']}: {row['hint']}" for row in numbers["causes"])
    for one in report.shown:
        yield ""
        yield from render_break(one)


def render_break(one: dict[str, Any]) -> Iterator[str]:
    """Render one break: where it is, the evidence, and the tokens on both sides."""
    agent = f" ({one['agent']})" if one["agent"] is not None else ""
    place = f"{one['trajectory_id']} step {one['step_index']}{agent}"
    if one["continues_lineage"]:
        yield f"{place}: {one['cause']}, continues step {one['from_step_index']}: no loss"
        return
    num_lost = one["num_lost_tokens"]
    lost = f", {num_lost} token{'s' * (num_lost > 1)} lost" if num_lost else ""
    at = f"at token {one['token_index']} of step {one['from_step_index']}"
    yield f"{place}: {one['cause']}, {at}{lost}"
    yield f"  {one['evidence']}"
    if one["kept_text"] is not None:
        before, gone, now = (_printable(one[name]) for name in _TEXT_SIDES)
        yield f"  ...{before} | {gone} -> {now}"
    if one["kept_text"] is None or one["cause"] == "retokenized":
        before, gone, now = (_ids(one[name]) for name in _ID_SIDES)
        yield f"  ...{before} | {gone} -> {now}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _ids(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def _folded(rows: list[dict[str, Any]], key: str) -> list[_Line]:
    """Group rows by `key`, one line per value, with the causes listed."""
    lines: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(row[key], []).append(row)
    return [
        (
            "-" if name is None else str(name),
            {total: sum(row[total] for row in group) for total in _SUMS},
            ", ".join(f"{row['cause']} {row['num_breaks']}" for row in group),
        )
        for name, group in lines.items()
    ]


def _table(title: str, lines: list[_Line]) -> Iterator[str]:
    width = max([len(title), *(len(name) for name, _, _ in lines)])
    yield ""
    yield f"{title:<{width}}  steps  tokens lost"
    for name, sums, causes in lines:
        counts = f"{sums['num_breaks']:>5,}  {sums['num_lost_tokens']:>11,}"
        yield f"{name:<{width}}  {counts}  {causes}".rstrip()
