"""Summarise the breaks of a dataset: counts and lost tokens per cause, agent and turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import polars as pl

from pipelines.drift_diagnosis.causes import HINTS
from pipelines.drift_diagnosis.table import SCHEMA, Diagnosis
from schemas.errors import count

_Line: TypeAlias = tuple[str, dict[str, Any], str]

_KEYS = ("cause", "agent", "step_index")
_TEXT_SIDES = ("kept_text", "lost_text", "now_text")
_ID_SIDES = ("kept_ids", "lost_ids", "now_ids")
_SUMS = ("num_breaks", "num_continuing_lineage", "num_lost_tokens")


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
