"""The summary of an audit, as JSON or as text for the terminal."""

from __future__ import annotations

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
    return {
        "num_rows": result.num_rows,
        "num_spans": len(result.verdicts),
        "num_faulty_spans": len(result.faults),
        "num_faulty_rows": _num_rows(result.faults),
        "verdicts": {
            kind: {"spans": spans, "rows": rows, "tokens": tokens}
            for kind, spans, rows, tokens in _counts(result.verdicts).iter_rows()
        },
        "causes": likely_causes(result.verdicts, result.candidates),
        "candidates": [
            {"version": one.version, "weights": str(one.path)} for one in result.candidates
        ],
        "differences": [
            {"first": result.candidates[a].name, "second": result.candidates[b].name, "mean": value}
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
        "worst": worst(result, limit).to_dicts(),
    }


def worst(result: AuditResult, limit: int) -> pl.DataFrame:
    """Return the `limit` spans whose fault is most certain."""
    return result.faults.sort("log_likelihood_ratio", descending=True).head(limit)


def _num_rows(verdicts: pl.DataFrame) -> int:
    return verdicts.select("trajectory_id", "step_index").n_unique()


def _counts(verdicts: pl.DataFrame) -> pl.DataFrame:
    """Count spans, rows and tokens by kind, in the order of `MEANINGS`."""
    counts = verdicts.group_by("kind").agg(
        spans=pl.len(),
        rows=pl.struct("trajectory_id", "step_index").n_unique(),
        tokens=pl.col("num_tokens").sum(),
    )
    order = {kind: number for number, kind in enumerate(MEANINGS)}
    return counts.sort(pl.col("kind").replace_strict(order, return_dtype=pl.Int32))


def screen(path: str, result: AuditResult, limit: int) -> str:
    """Format the summary of an audit for the terminal."""
    causes = likely_causes(result.verdicts, result.candidates)
    parts: list[RenderableType] = [
        Text(f"{path}: {count(result.num_rows, 'row')} audited"),
        *(Text(line) for line in _facts(result)),
        *section("Verdicts", _verdict_table(result)),
    ]
    if causes:
        lines = [Text(printable(text)) for text in causes]
        parts += section("Likely causes", Group(*lines))
    if limit and len(result.faults):
        parts += section("Most certain faults", _worst_table(worst(result, limit)))
    return drawn(parts)


def _facts(result: AuditResult) -> list[str]:
    noise = result.noise
    inferred = ""
    if result.mode_is_inferred:
        tokens = count(result.num_mode_tokens, "token")
        inferred = f" (inferred from {tokens})" if result.num_mode_tokens else ASSUMED_RAW
    if noise.num_tokens:
        text = f"{noise.mean_difference:.2g} nats on average, from {noise.num_tokens:,} tokens"
    else:
        text = "assumed to be typical of bfloat16, because no candidate fits the rows"
    lines = [f"log-probabilities   {result.mode}{inferred}", f"engine's noise      {text}"]
    if result.apart:
        least, most = min(result.apart.values()), max(result.apart.values())
        between = f"{least:.2g}" if len(result.apart) == 1 else f"{least:.2g} to {most:.2g}"
        lines.append(f"candidates          {len(result.candidates)}, {between} nats apart")
    for (a, b), distance in result.apart.items():
        if distance < TOO_CLOSE * noise.mean_difference:
            names = f"{result.candidates[a].name} and {result.candidates[b].name}"
            lines.append(f"indistinguishable   {names}: a row that fits one also fits the other")
    lines.append(
        f"forwarded           {result.num_tokens:,} tokens in {duration(result.seconds)} ({result.share:.0%} of"
        " candidates x distinct tokens)"
    )
    return lines


def _table(*names: str) -> Table:
    table = bare_table()
    for name in names:
        right = name not in ("", "verdict", "row", "fault", "found")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "found")
    return table


def _verdict_table(result: AuditResult) -> Table:
    table = _table("verdict", "spans", "rows", "tokens", "")
    for kind, spans, rows, tokens in _counts(result.verdicts).iter_rows():
        style = "" if kind in NO_FAULT else "red"
        numbers = [f"{value:,}" for value in (spans, rows, tokens)]
        table.add_row(kind, *numbers, MEANINGS[kind], style=style)
    return table


def _worst_table(faults: pl.DataFrame) -> Table:
    table = _table("row", "tokens", "fault", "nats", "found")
    for one in faults.iter_rows(named=True):
        where = f"{one['trajectory_id']} step {one['step_index']}"
        ratio = f"{one['log_likelihood_ratio']:,.0f}"
        fault = printable(one["reason"])
        table.add_row(printable(where), f"{one['num_tokens']:,}", one["kind"], ratio, fault)
    return table
