"""The `rollouts train` and `rollouts plot` commands."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import HintedUsageError, can_audit, dataset_argument, workers_of
from rollout_io.cli.output import (
    announced_stop,
    emit,
    emit_json,
    example,
    going_on,
    next_command,
    note,
    shown_log,
)
from rollout_io.terminal import columns
from schemas.errors import count
from trainer.cli import (
    algorithm_option,
    config_from_main,
    errors_printed_once,
    in_processes,
    num_processes_option,
    require,
    resume_command,
    resume_option,
    suggest_next_steps,
)

if TYPE_CHECKING:
    from trainer.config.train_config import Sections, TrainConfig
    from trainer.reports.dry_run import DryRun, Layout
    from trainer.training import TrainResult


EXAMPLE = (
    "rollouts train shop/ --model smollm2/ --out run/ --lr 1e-5 --set batch.groups_per_batch=16"
)
PLOT_EXAMPLE = """\
rollouts plot runs/a runs/b --metric return_mean --out curves.png
  rollouts plot shop/ --out shop.png"""

_NOWHERE = f"{os.devnull}/run"
"""Directory of a run that writes nothing: no run can be there."""


@click.command(epilog=example(EXAMPLE))
@dataset_argument(required=False)
@click.option("--model", metavar="DIR", help="Hugging Face model directory.")
@click.option(
    "--out",
    metavar="RUN",
    help="Directory for the run; must not contain a run. Not needed with --dry-run.",
)
@click.option("--config", metavar="F.toml", type=click.Path(), help="Configuration file.")
@click.option("--lr", type=float, metavar="X", help="Peak learning rate (optimizer.learning_rate).")
@click.option(
    "--max-updates",
    type=int,
    metavar="N",
    help="Maximum number of optimizer steps (batch.max_updates).",
)
@algorithm_option
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one key of the configuration (docs/training.md); may be repeated.",
)
@num_processes_option
@resume_option
@click.option(
    "--show-config",
    is_flag=True,
    help="Print the resolved configuration as TOML, with the meaning of each key, and exit.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Run all checks and print the plan, without training or writing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@errors_printed_once
def train(
    *,
    dataset: str | None,
    model: str | None,
    out: str | None,
    config: str | None,
    lr: float | None,
    max_updates: int | None,
    algorithm: str | None,
    overrides: tuple[str, ...],
    num_processes: int,
    resume: str | None,
    show_config: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train a policy on a rollout dataset.

    Writes RUN/config.json, RUN/metrics.jsonl, RUN/tokens/ (the values of each token in an update)
    and RUN/checkpoints/global_step_N/, a model directory that Transformers can load. Ctrl-C saves a
    checkpoint after the current update; `rollouts train --resume RUN` continues as if the run had
    never been interrupted. Options override the configuration file, and --set overrides options.
    """
    from rollout_io.dataset.storage import find_shards
    from schemas.imports import requires_extra
    from trainer.config.train_config import check_model_directory, load_config, load_sections
    from trainer.distributed.meeting import ARRIVAL, together
    from trainer.distributed.processes import is_main

    sys.path.append(str(Path.cwd()))  # for user functions; last, so that it shadows no module
    if resume is None and not show_config:
        if dry_run and out is None:
            out = _NOWHERE
        require(click.get_current_context(), dataset=dataset, model=model, out=out)
    elif resume is not None:
        values = {"DS": dataset, "--model": model, "--out": out, "--config": config}
        config, out = str(config_from_main(resume, values)), resume
    options = {
        "data.dataset": dataset,
        "model.path": model,
        "run.out": out,
        "optimizer.learning_rate": lr,
        "batch.max_updates": max_updates,
        "advantage.estimator": algorithm,
    }
    if show_config:
        return _show(load_sections(config, overrides, options), as_json=as_json)

    def load() -> TrainConfig:
        settings = load_config(config, overrides, options)
        find_shards(settings.data.dataset)  # before torch is imported, which takes seconds
        if resume is None:
            check_model_directory(settings.model.path)
        return settings

    command = {"command": "train", "--out": out, "--resume": resume, "--dry-run": dry_run}
    settings = together(load, lambda _: command, patience=ARRIVAL)
    again = f"continue with `{resume_command('train', settings.run.out, num_processes)}`"
    if dry_run:
        again = "run the same command again"
    if (status := in_processes(num_processes, again)) is not None:
        return status
    with requires_extra("train", "rollouts train"):
        from trainer import training
        from trainer.reports import dry_run as report
    if dry_run:
        with shown_log():
            planned = report.dry_run(settings, resume=resume is not None)
    else:
        stops = going_on(lambda: how_to_resume(settings.run.out, again), "the current update")
        with shown_log(), stops if is_main() else announced_stop(None):
            result = training.train(settings, resume=resume is not None)
    if not is_main():
        return 0
    if dry_run:
        emit_json(plan_numbers(planned)) if as_json else emit(plan_text(planned))
        return 0
    if as_json:
        emit_json(dataclasses.asdict(result))
    else:
        emit(_report(result, settings))
    suggest_next_steps(result.out, result.checkpoint)
    if "rollout_logprobs_abs_diff_mean" in result.metrics and can_audit(settings.data.dataset):
        weights = "--weights", settings.model.path
        next_command("rollouts", "audit", settings.data.dataset, *weights)
    return 0


@click.command(
    short_help="Plot training runs or datasets as an image.", epilog=example(PLOT_EXAMPLE)
)
@click.argument("paths", metavar="RUN|DS...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    metavar="FILE",
    help="Image file; the format follows from the extension (.png, .svg, .pdf, ...).  [default: "
    "RUN/curves.png, or DS.png beside the dataset; several need --out]",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="For runs: a key of metrics.jsonl; may be repeated. Default: the most useful keys.",
)
@click.option(
    "--max-row-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="For datasets: mark the length at which training with this max_row_tokens truncates rows.",
)
def plot(
    *, paths: tuple[str, ...], out: str | None, metrics: tuple[str, ...], max_row_tokens: int | None
) -> None:
    """Plot the metrics of training runs, or the contents of datasets, as an image.

    Several runs, or several datasets, are overlaid. The plot of a dataset shows lengths, reward by
    group, drift by turn, and the tokens that training forwards in each layout.
    """
    are_runs = {_is_run(path) for path in paths}
    if len(are_runs) > 1:
        raise click.UsageError("plot draws either runs or datasets; plot them separately.")
    if are_runs == {True}:
        if max_row_tokens is not None:
            raise click.UsageError("--max-row-tokens applies to datasets, not to runs.")
        from trainer.reports.run_plot import plot_runs

        image = out or _image_of(paths, is_run=True)
        drawn = ", ".join(plot_runs([Path(path) for path in paths], Path(image), metrics))
    else:
        if metrics:
            raise click.UsageError("--metric applies to runs, not to datasets.")
        from rollout_io.cli.options import open_valid
        from trainer.reports.dataset_plot import plot_datasets
        from trainer.reports.run_plot import check_image

        image = out or _image_of(paths, is_run=False)
        check_image(Path(image))
        workers = {path: workers_of(None, "local", path) for path in paths}
        for path, chosen in workers.items():
            open_valid(path, chosen)
        plot_datasets(workers, Path(image), max_row_tokens)
        drawn = "lengths, rewards, drift, layouts"
    note(f"{drawn} -> {image}")


def _image_of(paths: tuple[str, ...], *, is_run: bool) -> str:
    """Return the default image path: in the run, or beside the dataset, whose folder has shards only."""
    if len(paths) > 1 or "://" in paths[0]:
        what = "several runs or datasets" if len(paths) > 1 else "a remote dataset"
        raise HintedUsageError(f"the image of {what} needs --out.", "pass --out FILE.png")
    path = Path(paths[0])
    if is_run:
        return str((path.parent if path.suffix == ".jsonl" else path) / "curves.png")
    path = path.resolve() if path.name in {"", ".."} else path
    name = path.stem if path.suffix == ".parquet" else path.name
    return str(path.with_name(f"{name}.png"))


def _is_run(path: str) -> bool:
    """Return whether a path is to be plotted as a run.

    True for a run, and also for a local path that contains neither a run nor a dataset.
    """
    from rollout_io.dataset.storage import find_shards
    from schemas.errors import InputError

    if path.endswith(".jsonl") or (Path(path) / "metrics.jsonl").exists():
        return True
    try:
        find_shards(path)
    except InputError:
        return "://" not in path
    return False


def how_to_resume(out: str, again: str) -> str:
    """Return what a stopped run has saved, and how to continue it (`again`)."""
    if not (Path(out) / "config.json").exists():
        return "nothing was written: run the same command again"
    has_any = any(Path(out).glob("checkpoints/global_step_*"))
    saved = f"saved in {out}/checkpoints" if has_any else "no checkpoint yet"
    return f"{saved}; {again}"


def _show(settings: Sections, *, as_json: bool) -> int:
    from trainer.config.train_config import resolved, shown
    from trainer.distributed.processes import is_main

    config = resolved(settings)
    if is_main():
        emit_json(dataclasses.asdict(config)) if as_json else emit(shown(config))
    return 0


def _report(result: TrainResult, settings: TrainConfig) -> str:
    skipped = f", {result.num_skipped_updates} skipped" if result.num_skipped_updates else ""
    num_failed = result.num_failed
    failed = f", {num_failed} failed trajector{'y' if num_failed == 1 else 'ies'}"
    left_out, constant = settings.data.drop_zero_variance_groups, ""
    # Supervised training does not learn from rewards, but may leave out groups based on them.
    if result.num_groups_without_variance and (left_out or not settings.loss.is_supervised):
        constant = f", {result.num_groups_without_variance} without variance"
        constant += " left out" if left_out else ""
    greedy = result.num_greedy_rows
    trained = f"{result.num_trained_groups} of {result.num_groups} trained"
    lines = [
        f"updates      {result.num_updates}{skipped}",
        f"groups       {trained}{constant}{failed if num_failed else ''}",
        *([f"masked       {count(greedy, 'row')} sampled at temperature 0"] if greedy else []),
        f"metrics      {result.out}/metrics.jsonl",
        f"checkpoint   {result.checkpoint}",
    ]
    return "\n".join(lines)


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
