"""The `rollouts replay` command."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.output import emit, emit_json, example, note, shown_log
from rollout_io.terminal import columns
from schemas.errors import count
from trainer.cli.options import update_option

if TYPE_CHECKING:
    from trainer.forensics.replay import Replay

EXAMPLES = example(
    "rollouts replay run/ --update 12"
    "\n  rollouts replay run/ --update 12 --without shop-1_0 --set optimizer.learning_rate=1e-6"
)
MOST_SHOWN = 10


@click.command(short_help="Replay an optimizer step of a training run.", epilog=EXAMPLES)
@click.argument("run", metavar="RUN", type=click.Path())
@update_option
@click.option(
    "--without",
    "rows",
    multiple=True,
    metavar="ID[:STEP]",
    help="Leave a trajectory, or its row with this step_index, out of the loss; may be repeated.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the loss, the advantages or the optimizer, or give the new path of a "
    "dataset or model that has moved; may be repeated.",
)
@click.option("--out", metavar="DIR", help="New directory for the resulting model.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def replay(
    *,
    run: str,
    update: int,
    rows: tuple[str, ...],
    settings: tuple[str, ...],
    out: str | None,
    as_json: bool,
) -> int:
    """Replay an optimizer step of a training run, unchanged or with changes.

    Starts from the newest checkpoint before the update, or from the start model, and replays
    the updates in between. Compares the metrics, the recorded tokens, and the weights of a
    checkpoint saved after the update bit for bit; exits with code 1 if anything differs. With changes,
    prints the metrics of the unchanged and the changed update side by side. A row that is left out
    is removed from the loss and its denominators; the advantages of other rows do not change
    (docs/audit.md). RUN is only read, and may still be training.
    """
    from schemas.imports import requires_extra

    sys.path.append(str(Path.cwd()))  # for user functions; last, so that it shadows no module
    with requires_extra("train", "rollouts replay"):
        from trainer.forensics.replay import replay as make_again
    with shown_log():
        result = make_again(run, update, settings=settings, without=rows, out=out)
    emit_json(as_json_value(result)) if as_json else emit(screen(result))
    for text in result.notes if result.differences else ():
        note(f"note: {text}")
    return int(result.changed is None and not result.is_identical)


def as_json_value(result: Replay) -> dict[str, Any]:
    """Convert the result to JSON types, with the recorded and replayed values of each metric."""
    columns_ = {"recorded": result.recorded, "replayed": result.replayed}
    if result.changed is not None:
        columns_["changed"] = result.changed
    names = dict.fromkeys(name for column in columns_.values() for name in column)
    values = dataclasses.asdict(result)
    for name in ("recorded", "replayed", "changed"):
        del values[name]
    return values | {
        "identical": result.is_identical,
        "differences": [
            dataclasses.asdict(one) | {"sentence": one.sentence} for one in result.differences
        ],
        "metrics": {
            name: {kind: column.get(name) for kind, column in columns_.items()} for name in names
        },
    }


def screen(result: Replay) -> str:
    """Format the result as text for the terminal."""
    where = "" if result.iteration is None else f" (iteration {result.iteration})"
    start = result.checkpoint or "the start model"
    if result.num_forwarded:
        start += f", {count(result.num_forwarded, 'mini-batch', 'es')} replayed before the update"
    lines = [
        f"update     {result.update} of {result.run}{where}",
        f"from       {start}",
        f"compared   {', '.join(result.compared)}",
        f"result     {_verdict(result)}",
    ]
    lines += [f"           {one.sentence}" for one in result.differences[1:MOST_SHOWN]]
    if len(result.differences) > MOST_SHOWN:
        more = count(len(result.differences) - MOST_SHOWN, "more difference")
        lines.append(f"           {more} (--json lists all)")
    if result.changed is not None:
        lines += [f"changed    {', '.join(result.changes)}", "", *columns(_table(result))]
    if result.out:
        lines.append(f"model      {result.out}")
    return "\n".join(lines)


def _verdict(result: Replay) -> str:
    if result.is_identical:
        return "bit for bit the same"
    return f"differs: {result.differences[0].sentence}"


def _table(result: Replay) -> list[list[str]]:
    """Build a table with the recorded, replayed and changed value of each numeric metric."""
    changed = result.changed or {}
    names = dict.fromkeys((*result.recorded, *result.replayed, *changed))
    table = [["metric", "recorded", "replayed", "changed", "difference"]]
    for name in names:
        if name in result.not_compared:
            continue
        values = [column.get(name) for column in (result.recorded, result.replayed, changed)]
        if any(isinstance(value, int | float) for value in values):
            table.append([name, *map(_shown, values), _gap(values[1], values[2])])
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _gap(before: Any, after: Any) -> str:
    are_numbers = isinstance(before, int | float) and isinstance(after, int | float)
    if not are_numbers:
        return "-"
    return "0" if after == before else f"{after - before:+.3g}"
