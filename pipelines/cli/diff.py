"""The `rollouts diff` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.output import emit, emit_json, example, next_command
from rollout_io.terminal import columns, printable
from schemas.errors import InputError, count

if TYPE_CHECKING:
    import polars as pl

    from pipelines.rewards import Outcome
    from pipelines.statistics.differences import Differences

_SHOWN = 5
_PASSED = "pass rate"
_PERCENT = (_PASSED, "failed", "repeated 4-grams", "tool errors", "stopped: ")


@click.command(
    short_help="Compare two datasets task by task.",
    epilog=example(
        "rollouts diff runs/before runs/after\n  rollouts diff shop/ shop/ --reward-b strict"
    ),
)
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--reward-a", metavar="NAME", help="Reward version of A (`rollouts rescore`).")
@click.option("--reward-b", metavar="NAME", help="Reward version of B.")
@click.option(
    "--outcome",
    type=click.Choice(["last", "sum"]),
    help="Return of a trajectory: its last step's reward, or the sum over its steps.  [default: "
    "from each dataset, else last]",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    metavar="X",
    help="Expected share of tasks, among those called certain, that differ only by chance.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every number and task as JSON.")
def diff(
    a: str,
    b: str,
    reward_a: str | None,
    reward_b: str | None,
    outcome: Any,
    rate: float,
    *,
    as_json: bool,
) -> None:
    """Compare two datasets task by task: two policies, harnesses or reward functions.

    Only tasks (instance ids) in both are compared. Each number is the mean over a task's attempts,
    then over tasks; the interval of its change contains the true change in 95 % of such
    comparisons. docs/guides/diff.md explains every line.
    """
    import polars as pl

    from pipelines.statistics.differences import differences
    from pipelines.statistics.parting import greedy_partings

    (first, lines_a), (second, lines_b) = (
        _attempts(path, reward, outcome) for path, reward in ((a, reward_a), (b, reward_b))
    )
    found = differences(lines_a, lines_b, rate=rate)
    if found.tasks.is_empty():
        hint = "compare datasets of the same tasks; see their ids: rollouts inspect DS"
        raise InputError("same_tasks", f"{a} and {b}", "no task is in both datasets", hint=hint)
    partings = greedy_partings(first, second)
    if as_json:
        emit_json(found.as_json() | {"a": a, "b": b, "greedy": partings.to_dicts()})
        return
    returns = pl.concat([lines_a["return"], lines_b["return"]]).drop_nulls()
    passed = _PASSED if returns.is_in([0.0, 1.0]).all() else "share with return > 0"
    emit("\n".join(_screen(a, b, found, partings, passed)))
    next_command("rollouts", "view", *dict.fromkeys((a, b)))


def _attempts(
    path: str, reward: str | None, outcome: Outcome | None
) -> tuple[pl.LazyFrame, pl.DataFrame]:
    """Return the rows of a dataset, and one line per trajectory."""
    from pipelines.rescoring.versions import with_version
    from pipelines.statistics.attempts import attempts
    from pipelines.statistics.parting import broken_prefixes
    from rollout_io.cli.datasets import open_valid
    from rollout_io.dataset.returns import dataset_outcome

    frame = open_valid(path)
    if reward is not None:
        frame = with_version(frame, path, reward)
    lines = attempts(frame, dataset_outcome(path, outcome))
    return frame, lines.join(
        broken_prefixes(path), on="trajectory_id", how="left", maintain_order="left"
    )


def _screen(a: str, b: str, found: Differences, partings: pl.DataFrame, passed: str) -> list[str]:
    """Format the comparison; `passed` is the label of the share of attempts with a return > 0."""
    tasks = found.tasks
    only = [
        f"{num:,} only in {x}"
        for x, num in (("A", found.num_only_a), ("B", found.num_only_b))
        if num
    ]
    lines = [f"A  {printable(a)}", f"B  {printable(b)}"]
    lines.append(", ".join([f"{count(len(tasks), 'task')} in both", *only]))
    table = [["", "A", "B", "change", "95 % interval"]]
    for name, before, after, change, low, high, _ in found.numbers.rows():
        table.append(
            [
                passed if name == _PASSED else printable(name),
                _text(name, before),
                _text(name, after),
                _text(name, change, "+"),
                "-" if low is None else f"{_text(name, low, '+')} .. {_text(name, high, '+')}",
            ]
        )
    lines += ["", *columns(table), ""]
    verdicts = dict(tasks["verdict"].value_counts().rows())
    counted = [f"{verdicts.get(name, 0):,} {name}" for name in ("win", "tie", "loss")]
    lines.append(f"tasks, for B: {', '.join(counted)}")
    for verdict, title in (("loss", "worse"), ("win", "better")):
        certain = tasks.filter(verdict=verdict, is_certain=True).sort("p", maintain_order=True)
        lines.append(f"{title} for certain: {len(certain):,} of {verdicts.get(verdict, 0):,}")
        for line in certain.head(_SHOWN).iter_rows(named=True):
            lines.append(
                "  {instance_id}: {return_a:.3g} -> {return_b:.3g} in {num_a} and {num_b} attempts".format(
                    **line | {"instance_id": printable(line["instance_id"])}
                )
            )
    lines += suspected(found.suspicions)
    if len(partings):
        parted = partings.filter(partings["row"].is_not_null())
        lines.append(f"greedy attempts: {len(parted):,} of {count(len(partings), 'task')} differ")
        for line in parted.head(_SHOWN).iter_rows(named=True):
            lines.append("  {trajectory_b}: first at row {row}, token {token}".format(**line))
    return lines


def suspected(suspicions: list[dict[str, Any]]) -> list[str]:
    """Say which numbers speak against a higher return."""
    lines = []
    for one in suspicions:
        name = one["witness"]
        lines.append(
            f"suspicious: where the return rose ({count(one['num_tasks'], 'task')}), "
            f"{printable(name)} changed by {_text(name, one['change'], '+')} "
            f"({_text(name, one['low'], '+')} .. {_text(name, one['high'], '+')}); "
            f"most in {printable(', '.join(one['tasks']))}"
        )
    return lines


def _text(name: str, value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    if name.startswith(_PERCENT):
        text = f"{100 * value:{sign}.1f}"
        if value and not float(text):  # a bound that is not 0 must not look like 0
            text = f"{100 * value:{sign}.1g}"
        return f"{text} %"
    return f"{value:{sign},.4g}"
