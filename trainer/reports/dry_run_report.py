"""Format the report of `rollouts train --dry-run`, as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rollout_io.terminal import columns
from schemas.errors import count

if TYPE_CHECKING:
    from trainer.reports.dry_run import DryRun, Layout

GIB = 1 << 30
RECORDED = {
    "none": "no tokens",
    "sampled": "tokens of 4 groups per update",
    "all": "all tokens",
}


def plan_numbers(plan: DryRun) -> dict[str, Any]:
    """Convert the complete report to JSON types; memory is in bytes."""
    numbers = dataclasses.asdict(plan)
    memory = {f"{name}_bytes": size for name, size in numbers["memory"].items()}
    functions = {
        key: {"name": function.name, "place": function.location or None, "keys": function.settings}
        for key, function in plan.functions.items()
    }
    memory |= {"total_bytes": plan.memory.total}
    return numbers | {"memory": memory, "functions": functions}


def plan_text(plan: DryRun) -> str:
    """Format the report as text: the plan, a table of layouts, memory, and functions."""
    functions = [f"{key:<22} {function}" for key, function in plan.functions.items()]
    parts = _run_lines(plan), _layout_lines(plan), _memory_lines(plan), functions
    return "\n\n".join("\n".join(lines) for lines in parts)


def _run_lines(plan: DryRun) -> list[str]:
    counts = [f"{plan.num_groups:,}"]
    if plan.num_groups_without_variance:
        counts.append(f"{plan.num_groups_without_variance:,} without variance")
    if plan.num_partial_groups:
        counts.append(f"{plan.num_partial_groups:,} partial")
    masked = f"{plan.num_failed:,} failed, {plan.num_masked:,} masked"
    updates_made = f", {plan.num_updates_made:,} already made" if plan.num_updates_made else ""
    return [
        f"groups        {', '.join(counts)}",
        f"trajectories  {plan.num_trajectories:,}, {masked}",
        f"batches       {plan.num_batches:,}, {count(plan.num_mini_batches, 'mini-batch', 'es')},"
        f" {count(plan.num_epochs, 'epoch')}",
        f"updates       at most {plan.num_updates:,}{updates_made}",
        f"trained       {plan.num_trained_tokens:,} tokens per epoch",
        f"recorded      {RECORDED[plan.record_tokens]}",
    ]


def _layout_lines(plan: DryRun) -> list[str]:
    counted = ["sequences", "tokens", "of step", "repeated", "longest"]
    lines = [["forwards", *counted, "micro-batches per update"]]
    whole = plan.layouts["step"].num_tokens
    for name, layout in plan.layouts.items():
        marked = f"{name} *" if name == plan.trained_layout else name
        share = f"{layout.num_tokens / whole:.1%}" if whole else "-"
        repeated = "-" if layout.repeated_share is None else f"{layout.repeated_share:.1%}"
        counts = [f"{layout.num_sequences:,}", f"{layout.num_tokens:,}", share, repeated]
        lines.append([marked, *counts, f"{layout.longest_tokens:,}", _micro_batches(layout)])
    return [
        *columns(lines),
        f"* the layout of this run; rows have at most {plan.max_row_tokens:,} tokens.",
    ]


def _micro_batches(layout: Layout) -> str:
    least, most = min(layout.micro_batches), max(layout.micro_batches)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _memory_lines(plan: DryRun) -> list[str]:
    sizes = dataclasses.asdict(plan.memory) | {"total": plan.memory.total}
    shown = {name: size for name, size in sizes.items() if size}
    lines = [[name, f"{size / GIB:,.2f}"] for name, size in shown.items()]
    table, free = columns([["memory", "GiB"], *lines]), plan.available_bytes
    if free is None or plan.memory.still_needed <= free:
        return table
    return [
        *table,
        f"{plan.memory.still_needed / GIB:,.2f} GiB are still to be allocated, but only"
        f" {free / GIB:,.2f} GiB are free: set a smaller tokens_per_micro_batch, or truncate rows with"
        " max_row_tokens",
    ]
