"""`rollouts inspect`: trajectories for people to read."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollout_io.cli.dataset import open_dataset
from rollout_io.cli.output import emit, emit_json, example, note, wants_color
from schemas.errors import RolloutError

if TYPE_CHECKING:
    import polars as pl

    from rollout_io.trajectory_view import TrajectoryView

EXAMPLE = example('rollouts inspect shop/ --where "reward > 0" --limit 2')


@click.command(epilog=EXAMPLE)
@click.argument("dataset", metavar="DS")
@click.option("--where", metavar="SQL", help='SQL condition on any column, such as "reward > 0".')
@click.option("--trajectory", metavar="ID", help="Show this trajectory, such as shop-2_1.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Trajectories to show.",
)
@click.option(
    "--tokenizer", type=click.Path(), metavar="DIR", help="Decode ids with DIR/tokenizer.json."
)
@click.option("--json", "as_json", is_flag=True, help="The same view as JSON on stdout.")
def inspect(
    dataset: str,
    where: str | None,
    trajectory: str | None,
    limit: int,
    tokenizer: str | None,
    *,
    as_json: bool,
) -> None:
    """Show trajectories: prompts, responses and what trains.

    Trajectories with a row for which the condition holds are shown whole.
    """
    from rollout_io.trajectory_view import legend, render

    decode = None if tokenizer is None else load_decoder(tokenizer)
    frame = open_dataset(dataset)
    ids = matching(frame, where)
    if trajectory is not None:
        ids = [known(trajectory, ids)]
    views = view_all(frame, ids[:limit], decode)
    if as_json:
        emit_json([dataclasses.asdict(view) for view in views])
        return
    color = wants_color(sys.stdout)
    if views:
        note(legend(color=color) + "\n")
    for view in views:
        emit(render(view, color=color) + "\n")
    found = f"{len(views)} of {len(ids)} trajectories shown"
    note(found if ids else f"no trajectory matches: {where}" if where else "an empty dataset")


def matching(frame: pl.LazyFrame, where: str | None) -> list[str]:
    """Ids of the trajectories with a row for which the condition holds, in order.

    Raises:
        RolloutError: The condition is not SQL, names no column of the table, or does not apply.
    """
    import polars as pl

    from schemas.types import with_absent

    if where is not None:
        with _sql_errors(where):
            condition = pl.sql_expr(where)
            frame = with_absent(frame, condition.meta.root_names())
            _check_columns(condition.meta.root_names(), frame.collect_schema().names(), where)
            frame = frame.filter(condition)
    with _sql_errors(where):
        ids = frame.select("trajectory_id").unique(maintain_order=True).collect()
    found: list[str] = ids["trajectory_id"].to_list()
    return found


def known(trajectory_id: str, ids: Sequence[str]) -> str:
    """The id, if it is among those that match."""
    if trajectory_id not in ids:
        near = difflib.get_close_matches(trajectory_id, ids, 1)
        hint = f"did you mean {near[0]}?" if near else None
        expected = f"one of {len(ids)} trajectories"
        raise RolloutError("known_trajectory", "--trajectory", repr(trajectory_id), expected, hint)
    return trajectory_id


def view_all(
    frame: pl.LazyFrame, ids: Sequence[str], decode: Callable[[Sequence[int]], str] | None
) -> list[TrajectoryView]:
    """Views of these trajectories, in order."""
    import polars as pl

    from rollout_io.trajectory_view import COLUMNS, view_trajectory

    names = [name for name in frame.collect_schema().names() if name in COLUMNS]
    rows = frame.select(names).filter(pl.col("trajectory_id").is_in(ids)).collect()
    parts = rows.partition_by("trajectory_id", maintain_order=True)
    return [view_trajectory(part.to_dicts(), decode) for part in parts]


def load_decoder(path: str) -> Callable[[Sequence[int]], str]:
    """A decoder from a local `tokenizer.json` (or the directory that holds it)."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        hint = 'pip install "rollout-io[text]"'
        got = "no `tokenizers` package"
        raise RolloutError("extra_installed", "--tokenizer", got, "", hint) from None
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        hint = "give the directory of a downloaded model"
        raise RolloutError("input_file", str(file), "no such file", "a tokenizer.json", hint)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        got = " ".join(str(error).split())
        raise RolloutError("input_file", str(file), got, "a tokenizer.json") from None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def _check_columns(used: Sequence[str], names: Sequence[str], where: str) -> None:
    for name in used:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else "columns: " + ", ".join(names)
            hint += f" (a text is written in quotes: '{name}')"
            got, place = f"column {name!r}", f"--where {where!r}"
            raise RolloutError("known_column", place, got, "a column of the dataset", hint)


@contextmanager
def _sql_errors(where: str | None) -> Iterator[None]:
    import polars as pl

    try:
        yield
    except pl.exceptions.PolarsError as error:
        if where is None:
            raise
        got = str(error).strip().split("\n")[0]
        hint = "a condition as after WHERE: reward > 0 AND agent = 'main'"
        raise RolloutError("sql", f"--where {where!r}", got, "a condition", hint) from None
