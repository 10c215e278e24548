"""`rollouts validate`: list every breach of the named invariants, by rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import can_audit, dataset_argument, workers_of, workers_options
from rollout_io.cli.output import emit, emit_json, example, next_command, note
from schemas.errors import count

if TYPE_CHECKING:
    import polars as pl

    from rollout_io.dataset.parallel import Engine

FIRST_ROWS = 5  # breaches shown per rule


@click.command(
    short_help="Check every row and file of a dataset.", epilog=example("rollouts validate shop/")
)
@dataset_argument()
@workers_options
@click.option("--json", "as_json", is_flag=True, help="Print every breach as JSON.")
@click.pass_context
def validate(
    ctx: click.Context, dataset: str, workers: int | None, engine: Engine, *, as_json: bool
) -> None:
    """Check page checksums, types and all named invariants of a dataset.

    Exit code 1 if a rule of severity `error` is broken; 0 if there are only warnings.
    """
    import polars as pl

    from rollout_io.dataset.checking import check, mixed_text
    from rollout_io.dataset.reader import shard_sizes

    chosen = workers_of(workers, engine, dataset)
    breaches = check(dataset, chosen)
    has_errors = bool((breaches["severity"] == "error").any())
    rules = by_rule(breaches)
    if as_json:
        report = {"ok": not has_errors, "rules": rules, "breaches": breaches.to_dicts()}
        emit_json(report)
    else:
        sizes = shard_sizes(dataset)
        for rule in rules:
            of_rule = breaches.filter(pl.col("rule") == rule["rule"])
            emit(_text(rule, of_rule, dataset, sizes))
        note(_verdict(dataset, breaches))
        if breaches.is_empty() and (mixed := mixed_text(dataset)):
            note(mixed)
        if not has_errors and can_audit(dataset):
            next_command("rollouts", "audit", dataset, "--weights", "MODEL")
    ctx.exit(1 if has_errors else 0)


def by_rule(breaches: pl.DataFrame) -> list[dict[str, Any]]:
    """Return one record per broken rule: severity, count, meaning, hint; errors first."""
    from schemas.rules import RULES

    counts = breaches.group_by("rule", maintain_order=True).len().iter_rows()
    records = [
        {
            "rule": name,
            "severity": RULES[name].severity,
            "num_breaches": num_breaches,
            "meaning": RULES[name].meaning,
            "hint": RULES[name].hint,
        }
        for name, num_breaches in counts
    ]
    return sorted(records, key=lambda record: record["severity"])


def _text(
    rule: dict[str, Any], breaches: pl.DataFrame, dataset: str, sizes: Mapping[str, int]
) -> str:
    label = rule["severity"].capitalize()
    lines = [
        f"{label}: {_place(breach, dataset, sizes)}: {breach['message']}. [{rule['rule']}]"
        for breach in breaches.head(FIRST_ROWS).to_dicts()
    ]
    if len(breaches) > FIRST_ROWS:
        lines.append(
            f"... and {len(breaches) - FIRST_ROWS} more [{rule['rule']}]; --json lists all"
        )
    return "\n".join([*lines, f"Hint: {rule['hint']}", ""])


def _place(breach: dict[str, Any], dataset: str, sizes: Mapping[str, int]) -> str:
    """Return the shard and row (from 0) of a breach, or only the dataset."""
    from schemas.checker import row_place

    if breach["row"] is None:
        return dataset
    row = breach["row"]
    for shard, num_rows in sizes.items():
        if row < num_rows:
            return f"{shard}, {row_place({**breach, 'row': row})}"
        row -= num_rows
    return f"{dataset}, {row_place(breach)}"


def _verdict(dataset: str, breaches: pl.DataFrame) -> str:
    errors = int((breaches["severity"] == "error").sum())
    warnings = len(breaches) - errors
    if not errors and not warnings:
        return f"{dataset}: valid"
    return f"{dataset}: {count(errors, 'error')}, {count(warnings, 'warning')}"
