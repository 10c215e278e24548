"""The `rollouts stats` command."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli import outcome_option
from rollout_io.cli.options import Number, dataset_argument, workers_of, workers_options
from rollout_io.cli.output import emit, emit_json, emit_styled, example, note
from rollout_io.terminal import columns, readable
from schemas.errors import count

if TYPE_CHECKING:
    from pipelines.rewards import Outcome
    from pipelines.statistics.flops import ModelShape
    from pipelines.statistics.savings import Cost
    from rollout_io.dataset.parallel import Workers

_SHOWN_LINES = 60
_SECTIONS = {
    "trajectories": (
        *("num_trajectories", "num_groups", "num_failed"),
        "num_groups_with_failed",
    ),
    "rewards": (
        *("num_unknown_reward", "num_groups_with_variance"),
        *("reward_mean", "reward_min", "reward_max"),
    ),
}


@click.command(
    short_help="Summarise a dataset: counts, lengths, rewards, tokens.",
    epilog=example(
        "rollouts stats shop/ --model Qwen3-8B/\n  rollouts stats shop/ --by instance_id"
    ),
)
@dataset_argument()
@outcome_option
@click.option(
    "--model",
    type=click.Path(),
    metavar="DIR",
    help="Estimate training FLOPs for the model described by DIR/config.json.",
)
@click.option(
    "--params",
    type=Number(min=0, min_open=True),
    metavar="N",
    help="Number of parameters, such as 1.5e9; without --model, attention is not counted.",
)
@click.option("--by", metavar="COLUMN", help="Print a line per value: instance_id, stop_reason.")
@click.option(
    "--by-quantile",
    metavar="COLUMN",
    help="Print a line per quarter of the trajectories by a number: response_tokens.",
)
@workers_options
@click.option("--all", "shows_all", is_flag=True, help="Print every number and metric by name.")
@click.option("--json", "as_json", is_flag=True, help="Print every number and metric as JSON.")
def stats(
    dataset: str,
    outcome: Any,
    model: str | None,
    params: float | None,
    by: str | None,
    by_quantile: str | None,
    workers: int | None,
    engine: Any,
    *,
    shows_all: bool,
    as_json: bool,
) -> None:
    """Summarise a dataset: counts, lengths, rewards, and tokens to train on.

    Rewards are returns of trajectories. Layouts are the values of `sequence_layout` in `rollouts
    train`; their token counts exclude failed trajectories. --all and --json add metrics per step,
    trajectory and group (docs/metrics.md); --by and --by-quantile compare parts of the dataset. If
    it has several policy versions, numbers that speak against a rising return are named.
    """
    if by is not None or by_quantile is not None:
        _print_grouped(dataset, by, by_quantile, outcome, as_json=as_json)
        return
    shape = _model_shape(model, params)
    chosen = workers_of(workers, engine, dataset)
    if as_json or shows_all:
        numbers = _dataset_numbers(dataset, outcome, shape, chosen)
        if as_json:
            emit_json(numbers)
        else:
            emit(_all_numbers(numbers))
        return
    from pipelines.cli.diff import suspected
    from pipelines.cli.stats_screen import screen
    from pipelines.statistics.attempts import finding_numbers
    from pipelines.statistics.grouped import tools
    from pipelines.statistics.savings import dataset_savings
    from pipelines.statistics.summary import conversion_notes, dataset_summary
    from rollout_io.cli.options import open_valid
    from rollout_io.dataset.checking import mixed_text

    frame = open_valid(dataset, chosen)
    summary = dataset_summary(dataset, outcome, chosen)
    savings = _savings(dataset_savings(dataset, workers=chosen), shape)
    emit_styled(screen(dataset, summary, savings, tools(frame).to_dicts()))
    for line in suspected(_suspicions(dataset, outcome)):
        emit(line)
    for line in _findings(finding_numbers(dataset)):
        emit(line)
    for text, number in conversion_notes(dataset).items():
        emit(f"noted by the conversion: {text}: {number:,}")
    if mixed := mixed_text(dataset):
        note(mixed)
    note("pass --all or --json for every number and metric")


def _print_grouped(
    dataset: str,
    by: str | None,
    by_quantile: str | None,
    outcome: Outcome | None,
    *,
    as_json: bool,
) -> None:
    from pipelines.statistics.grouped import grouped
    from rollout_io.cli.options import open_valid
    from rollout_io.dataset.trajectory_facts import dataset_outcome

    if by is not None and by_quantile is not None:
        raise click.UsageError("--by and --by-quantile exclude each other.")
    frame, returns = open_valid(dataset), dataset_outcome(dataset, outcome)
    lines = grouped(frame, by or by_quantile or "", returns, quantiles=by is None)
    if as_json:
        emit_json(lines.to_dicts())
        return
    names = [name.removeprefix("num_").replace("_", " ") for name in lines.columns]
    table = [[readable(value) for value in line] for line in lines.head(_SHOWN_LINES).rows()]
    emit("\n".join(columns([names, *table])))
    if len(lines) > _SHOWN_LINES:
        note(f"and {len(lines) - _SHOWN_LINES:,} more: pass --json for all")


def _suspicions(dataset: str, outcome: Outcome | None) -> list[dict[str, Any]]:
    """Compare the attempts of the later policy versions of a dataset with those of the earlier."""
    import polars as pl

    from pipelines.statistics.attempts import attempts
    from pipelines.statistics.differences import differences
    from rollout_io.dataset.reader import scan
    from rollout_io.dataset.trajectory_facts import dataset_outcome

    frame = scan(dataset)
    if "policy_version" not in frame.collect_schema():
        return []
    versions = frame.select(pl.col("policy_version").unique().sort()).collect().to_series()
    versions = versions.drop_nulls()
    if len(versions) < 2:
        return []
    lines, middle = attempts(frame, dataset_outcome(dataset, outcome)), versions[len(versions) // 2]
    earlier, later = (
        lines.filter(side) for side in (pl.col("version") < middle, pl.col("version") >= middle)
    )
    return differences(earlier, later).suspicions


def _findings(numbers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for line in numbers:
        num, where = line["num_findings"], count(line["num_trajectories"] or 0, "trajectory")
        counted = f"{num:,} {line['label']} in {where}" if num else "none"
        yield f"findings {line['name']}: {line['problem'] or counted}"


def _dataset_numbers(
    dataset: str, outcome: Outcome | None, shape: ModelShape | None, workers: Workers | None = None
) -> dict[str, Any]:
    """Collect a dataset's statistics: `metrics` by unit and name, and `savings` by layout."""
    from pipelines.statistics.attempts import finding_numbers
    from pipelines.statistics.grouped import tools
    from pipelines.statistics.metrics import read_metrics
    from pipelines.statistics.savings import dataset_savings
    from pipelines.statistics.summary import conversion_notes, dataset_statistics
    from rollout_io.cli.options import open_valid

    frame = open_valid(dataset, workers)
    numbers = dataset_statistics(dataset, outcome, workers)
    metrics: dict[str, dict[str, Any]] = {}
    for line in read_metrics(dataset, outcome, workers).to_dicts():
        metrics.setdefault(line.pop("per"), {})[line.pop("metric")] = line
    savings = dataset_savings(dataset, workers=workers)
    return numbers | {
        "metrics": metrics,
        "tools": tools(frame).to_dicts(),
        "findings": finding_numbers(dataset),
        "conversion_notes": conversion_notes(dataset),
        "savings": _savings(savings, shape),
    }


def _model_shape(model: str | None, params: float | None) -> ModelShape | None:
    from pipelines.statistics.flops import ModelShape, read_model_shape

    if model is not None:
        return read_model_shape(model, params)
    return None if params is None else ModelShape(num_params=params)


def _savings(costs: Mapping[str, Cost], shape: ModelShape | None) -> dict[str, dict[str, Any]]:
    whole = costs["step"].num_tokens
    table = {}
    for layout, cost in costs.items():
        table[layout] = dataclasses.asdict(cost)
        table[layout]["relative_tokens"] = cost.num_tokens / whole if whole else None
        if shape is not None:
            table[layout]["training_flops"] = shape.training_flops(cost)
    return table


def _all_numbers(numbers: Mapping[str, Any]) -> str:
    """Format every number and metric by name, in sections."""
    sections = ("\n  ".join([title, *lines]) for title, lines in _sections(numbers))
    return "\n\n".join(sections) + "\n"


def _sections(numbers: Mapping[str, Any]) -> Iterable[tuple[str, Sequence[str]]]:
    apart = {"tools", "findings", *(name for names in _SECTIONS.values() for name in names)}
    rows = [n for n, value in numbers.items() if n not in apart and not isinstance(value, dict)]
    for title, names in {"rows": rows, **_SECTIONS}.items():
        yield title, columns([[name, readable(numbers[name])] for name in names])
    reasons = numbers["stop_reasons"]
    if reasons:
        yield "stop reasons of rows", columns([[repr(r), readable(n)] for r, n in reasons.items()])
    if numbers["tools"]:
        lines = [[readable(value) for value in line.values()] for line in numbers["tools"]]
        yield "tools", columns([["tool", "calls", "failed", "trajectories"], *lines])
    if numbers["findings"]:
        yield "findings", [*_findings(numbers["findings"])]
    if notes := numbers["conversion_notes"]:
        yield "noted by the conversion", [f"{text}: {num:,}" for text, num in notes.items()]
    for per, metrics in numbers["metrics"].items():
        table = [["metric", "value", "over", "left out"]]
        for name, line in metrics.items():
            table.append([name, *(readable(line[n]) for n in ("value", "num", "num_left_out"))])
        yield f"per {per}", columns(table)
    savings = columns(_savings_table(numbers["savings"]))
    yield "savings: tokens that each layout forwards", savings


def _savings_table(savings: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    has_flops = "training_flops" in savings["step"]
    table = [["layout", "sequences", "tokens", "of step", *(["training FLOPs"] * has_flops)]]
    for layout, cost in savings.items():
        relative = cost["relative_tokens"]
        line = [layout, readable(cost["num_sequences"]), readable(cost["num_tokens"])]
        line.append("-" if relative is None else f"{relative:.1%}")
        if has_flops:
            line.append(f"{cost['training_flops']:.3g}")
        table.append(line)
    return table
