"""The `rollouts diff` command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli import outcome_option
from rollout_io.cli.options import HintedUsageError, Number
from rollout_io.cli.output import emit, emit_json, example, next_command, note
from rollout_io.terminal import columns, four_digits, printable
from schemas.errors import InputError, count

if TYPE_CHECKING:
    import polars as pl

    from pipelines.rewards import Outcome
    from pipelines.statistics.differences import Differences

_SHOWN = 5


@click.command(
    short_help="Compare two datasets task by task.",
    epilog=example(
        "rollouts diff runs/before runs/after", "rollouts diff shop/ shop/ --reward-b strict"
    ),
)
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--reward-a", metavar="NAME", help="Reward version of A (`rollouts rescore`).")
@click.option("--reward-b", metavar="NAME", help="Reward version of B.")
@outcome_option
@click.option(
    "--rate",
    type=Number(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    metavar="X",
    help="Expected share of tasks, among those called certain, that differ only by chance.",
)
@click.option(
    "--higher", multiple=True, metavar="NAME", help="Number that should rise; may be repeated."
)
@click.option(
    "--lower", multiple=True, metavar="NAME", help="Number that should fall; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print every number and task as JSON.")
def diff(
    a: str,
    b: str,
    reward_a: str | None,
    reward_b: str | None,
    outcome: Any,
    rate: float,
    higher: tuple[str, ...],
    lower: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    """Compare two datasets task by task: two policies, harnesses or reward functions.

    Only tasks in both are compared. Each number is the mean over a task's attempts,
    then over tasks, with the tasks and attempts that it rests on. A number that moved against its
    direction while the return rose is called suspicious; --higher and --lower give the directions
    of your own. docs/guides/diff.md explains every line and how often it is wrong.
    """
    import polars as pl

    from pipelines.rescoring.finders import FINDERS
    from pipelines.statistics.attempts import greedy_partings, with_findings
    from pipelines.statistics.differences import DIRECTIONS, PASSED, differences

    _refuse_runs(a, b)
    (first, lines_a), (second, lines_b) = (
        _attempts(path, reward, outcome) for path, reward in ((a, reward_a), (b, reward_b))
    )
    lines_a, lines_b, others = with_findings(a, b, lines_a, lines_b)
    for name in others:
        note(f"findings {name} are not compared: different functions made them")
    directions = DIRECTIONS | {f"findings {finder.__name__}": -1 for finder in FINDERS}
    better = dict.fromkeys(higher, 1) | dict.fromkeys(lower, -1)
    compared = differences(lines_a, lines_b, rate=rate, directions=directions | better)
    if compared.tasks.is_empty():
        hint = (
            "compare datasets of the same tasks, whose ids are in task_instance_id or instance_id"
        )
        names = [lines["instance_id"].head(1).to_list() for lines in (lines_a, lines_b)]
        finding = f"no task is in both datasets; the first of A is {names[0]}, of B {names[1]}"
        raise InputError("same_tasks", f"{a} and {b}", finding, hint=hint)
    names_of_numbers = compared.numbers["name"].to_list()
    for name in better.keys() - set(names_of_numbers):
        hint = f"use one of {', '.join(names_of_numbers)}"
        raise HintedUsageError(f"--higher, --lower: there is no number {name!r}", hint)
    partings = greedy_partings(first, second)
    if as_json:
        emit_json(compared.as_json() | {"a": a, "b": b, "greedy": partings.to_dicts()})
        return
    returns = pl.concat([lines_a["return"], lines_b["return"]]).drop_nulls()
    passed = PASSED if returns.is_in([0.0, 1.0]).all() else "share with return > 0"
    emit("\n".join(_screen(a, b, compared, partings, passed)))
    next_command("rollouts", "view", *dict.fromkeys((a, b)))


def _refuse_runs(*paths: str) -> None:
    """Refuse two runs of training, and name the verbs that compare them."""
    from pipelines.view.run_files import is_run

    if all("://" not in path and is_run(Path(path)) for path in paths):
        named = shlex.join(paths)
        hint = (
            f"compare their metrics with `rollouts plot {named}`, and their samples with `rollouts "
        )
        hint += (
            f"view {named}`; `rollouts diff` takes the datasets of runs, such as RUN/rollouts/*/"
        )
        finding = "these are training runs, not datasets"
        raise InputError("dataset_exists", " and ".join(paths), finding, "", hint)


def _attempts(
    path: str, reward: str | None, outcome: Outcome | None
) -> tuple[pl.LazyFrame, pl.DataFrame]:
    """Return the rows of a dataset, and one line per trajectory."""
    import polars as pl

    from pipelines.rewards import UNSCORED, with_version
    from pipelines.statistics.attempts import attempts, broken_prefixes
    from rollout_io.cli.options import open_valid
    from rollout_io.dataset.trajectory_facts import dataset_outcome

    frame = open_valid(path)
    if reward is not None:
        frame = with_version(frame, path, reward)
    lines = attempts(frame, dataset_outcome(path, outcome))
    if reward is not None:  # a judge that failed says nothing about the attempt
        is_unscored = pl.col("error").str.starts_with(UNSCORED.format(reward))
        lines = lines.with_columns(error=pl.when(~is_unscored).then("error"))
    return frame, lines.join(
        broken_prefixes(path), on="trajectory_id", how="left", maintain_order="left"
    )


def _screen(
    a: str, b: str, compared: Differences, partings: pl.DataFrame, passed: str
) -> list[str]:
    """Format the comparison; `passed` is the label of the share of attempts with a return > 0."""
    from pipelines.statistics.differences import PASSED

    tasks = compared.tasks
    only = [
        f"{num:,} only in {x}"
        for x, num in (("A", compared.num_only_a), ("B", compared.num_only_b))
        if num
    ]
    lines = [f"A  {printable(a)}", f"B  {printable(b)}"]
    lines.append(", ".join([f"{count(len(tasks), 'task')} in both", *only]))
    for x, num in (("A", compared.num_copies_a), ("B", compared.num_copies_b)):
        if num:
            lines.append(f"{x}: {count(num, 'copy')} of greedy attempts left out")
    sizes = ["tasks", "attempts", "unknown"]
    table = [["", "A", "B", "change", "95 % interval", "", *sizes]]
    for one in compared.numbers.iter_rows(named=True):
        name = one["name"]
        table.append(
            [
                name.replace(PASSED, passed) if name.startswith(PASSED) else printable(name),
                *(_text(name, one[x]) for x in ("a", "b")),
                _text(name, one["change"], "+"),
                "-" if one["low"] is None else _interval(one),
                "*" if one["is_certain"] else "",
                f"{one['num_tasks']:,}",
                f"{one['num_attempts_a']:,} {one['num_attempts_b']:,}",
                f"{one['num_unknown_a']:,} {one['num_unknown_b']:,}",
            ]
        )
    lines += ["", *columns(table), "", _chance(len(compared.numbers.drop_nulls("low")))]
    verdicts = dict(tasks["verdict"].value_counts().rows())
    counted = [f"{verdicts.get(x, 0):,} {x}" for x in ("win", "tie", "loss", "unknown")]
    lines.append(f"tasks, for B: {', '.join(counted)}")
    if (least := compared.least_changed) != 1:
        unless = "" if least is None else f" unless at least {least:,} change completely"
        lines.append(f"with these numbers of attempts, no task can be certain{unless}")
    for verdict, title in (("loss", "worse"), ("win", "better")):
        certain = tasks.filter(verdict=verdict, is_certain=True).sort("p", maintain_order=True)
        lines.append(f"{title} for certain: {len(certain):,} of {verdicts.get(verdict, 0):,}")
        for line in certain.head(_SHOWN).iter_rows(named=True):
            unknown = line["num_unknown_a"] + line["num_unknown_b"]
            lines.append(
                "  {instance_id}: {return_a:.3g} -> {return_b:.3g} in {num_a} and {num_b} attempts".format(
                    **line | {"instance_id": printable(line["instance_id"])}
                )
                + (f", {unknown:,} unknown" if unknown else "")
            )
    lines += suspected(compared.suspicions)
    if len(partings):
        parted = partings.filter(partings["row"].is_not_null())
        lines.append(f"greedy attempts: {len(parted):,} of {count(len(partings), 'task')} differ")
        for line in parted.head(_SHOWN).iter_rows(named=True):
            lines.append("  {trajectory_b}: first at row {row}, token {token}".format(**line))
    return lines


def _chance(num: int) -> str:
    """Say how many of the intervals leave out 0 by chance."""
    if not num:
        return "no interval: no number changed, or fewer than two tasks have it"
    text = f"{count(num, 'interval')}: by chance alone, about {0.05 * num:.2g} would not contain 0"
    return f"{text} (*: does not, even if all of them are to hold together)"


def suspected(suspicions: list[dict[str, Any]]) -> list[str]:
    """Say which numbers speak against a higher return."""
    lines = []
    for one in suspicions:
        name = one["name"]
        most = f"; most in {printable(', '.join(one['tasks']))}" if one["tasks"] else ""
        lines.append(
            f"suspicious: the return rose, but {printable(name)} changed by "
            f"{_text(name, one['change'], '+')} ({_interval(one)}) over "
            f"{count(one['num_tasks'], 'task')}{most}"
        )
    return lines


def _interval(line: dict[str, Any]) -> str:
    return " .. ".join(_text(line["name"], line[end], "+") for end in ("low", "high"))


def _text(name: str, value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    from pipelines.statistics.differences import SHARES

    if name.startswith(SHARES):
        text = f"{100 * value:{sign}.1f}"
        if value and not float(text):  # a bound that is not 0 must not look like 0
            text = f"{100 * value:{sign}.1g}"
        return f"{text} %"
    return four_digits(value, sign)
