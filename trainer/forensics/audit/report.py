"""The summary of an audit, as JSON or as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_io.terminal import duration, printable
from schemas.errors import count
from schemas.forensics import MEANINGS, NO_FAULT
from trainer.forensics.audit.audit import AuditResult
from trainer.forensics.audit.causes import likely_causes
from trainer.forensics.screens import bare_table, drawn, section

ASSUMED_RAW = " (assumed: no row reveals the kind)"
TOO_CLOSE = 0.25
"""Candidates are reported as indistinguishable if their distance is less than this multiple of the
engine's noise."""


def summary(result: AuditResult, limit: int) -> dict[str, Any]:
    """Return the summary of an audit for JSON, with the `limit` worst spans."""
    candidates, counts = result.candidates, _counts(result.verdicts)
    return {
        "num_rows": result.num_rows,
        "num_spans": len(result.verdicts),
        "num_faulty_spans": len(result.faults),
        "num_faulty_rows": result.faults.select("trajectory_id", "step_index").n_unique(),
        "verdicts": {row.pop("kind"): row for row in counts.iter_rows(named=True)},
        "causes": likely_causes(result.verdicts, candidates),
        "candidates": [{"version": one.version, "weights": str(one.path)} for one in candidates],
        "differences": [
            {"first": candidates[a].name, "second": candidates[b].name, "mean": value}
            for (a, b), value in sorted(result.apart.items())
        ],
        "logprobs_mode": result.mode,
        "logprobs_mode_is_inferred": result.mode_is_inferred,
        "num_logprobs_mode_tokens": result.num_mode_tokens,
        "noise": {
            "mean_difference": result.noise.mean_difference,
            "kappa": result.noise.kappa,
            "num_tokens": result.noise.num_tokens,
        },
        "cost": {
            "num_distinct_tokens": result.num_distinct,
            "num_forwarded_tokens": result.num_tokens,
            "share": result.share,
            "seconds": result.seconds,
            "num_suspicious_rows": result.num_suspicious,
        },
        "worst": _worst(result, limit).to_dicts(),
    }


def _worst(result: AuditResult, limit: int) -> pl.DataFrame:
    """Return the `limit` spans whose fault is most certain."""
    return result.faults.sort("log_likelihood_ratio", descending=True).head(limit)


def _counts(verdicts: pl.DataFrame) -> pl.DataFrame:
    """Count spans, rows and tokens by kind, in the order of `MEANINGS`."""
    counts = verdicts.group_by("kind").agg(
        spans=pl.len(),
        rows=pl.struct("trajectory_id", "step_index").n_unique(),
        tokens=pl.col("num_tokens").sum(),
    )
    return pl.DataFrame({"kind": list(MEANINGS)}).join(counts, on="kind", maintain_order="left")


def screen(path: str, result: AuditResult, limit: int) -> str:
    """Format the summary of an audit for the terminal."""
    verdicts = _table("verdict", "spans", "rows", "tokens", "")
    for kind, *numbers in _counts(result.verdicts).iter_rows():
        style = "" if kind in NO_FAULT else "red"
        verdicts.add_row(kind, *map("{:,}".format, numbers), MEANINGS[kind], style=style)
    parts: list[RenderableType] = [
        Text(f"{path}: {count(result.num_rows, 'row')} audited"),
        *(Text(f"{name:<20}{text}") for name, text in _facts(result)),
        *section("Verdicts", verdicts),
    ]
    if causes := likely_causes(result.verdicts, result.candidates):
        parts += section("Likely causes", Group(*(Text(printable(text)) for text in causes)))
    if limit and len(result.faults):
        faults = _table("row", "tokens", "fault", "nats", "found")
        for one in _worst(result, limit).iter_rows(named=True):
            where = printable(f"{one['trajectory_id']} step {one['step_index']}")
            numbers = [f"{one['num_tokens']:,}", f"{one['log_likelihood_ratio']:,.0f}"]
            reason = printable(one["reason"])
            faults.add_row(where, numbers[0], one["kind"], numbers[1], reason)
        parts += section("Most certain faults", faults)
    return drawn(parts)


def _facts(result: AuditResult) -> Iterator[tuple[str, str]]:
    noise, candidates, apart = result.noise, result.candidates, result.apart
    inferred = ""
    if result.mode_is_inferred:
        tokens = count(result.num_mode_tokens, "token")
        inferred = f" (inferred from {tokens})" if result.num_mode_tokens else ASSUMED_RAW
    yield "log-probabilities", f"{result.mode}{inferred}"
    text = f"{noise.mean_difference:.2g} nats on average, from {noise.num_tokens:,} tokens"
    assumed = "assumed to be typical of bfloat16, because no candidate fits the rows"
    yield "engine's noise", text if noise.num_tokens else assumed
    if apart:
        least, most = min(apart.values()), max(apart.values())
        between = f"{least:.2g}" if len(apart) == 1 else f"{least:.2g} to {most:.2g}"
        yield "candidates", f"{len(candidates)}, {between} nats apart"
    for (a, b), distance in apart.items():
        if distance < TOO_CLOSE * noise.mean_difference:
            names = f"{candidates[a].name} and {candidates[b].name}"
            yield "indistinguishable", f"{names}: a row that fits one also fits the other"
    tokens = f"{result.num_tokens:,} tokens in {duration(result.seconds)}"
    yield "forwarded", f"{tokens} ({result.share:.0%} of candidates x distinct tokens)"


def _table(*names: str) -> Table:
    table = bare_table()
    for name in names:
        right = name not in ("", "verdict", "row", "fault", "found")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "found")
    return table
