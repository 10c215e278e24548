"""`rollouts inspect`: print trajectories."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from rollout_io.cli.options import dataset_argument, open_dataset
from rollout_io.cli.output import (
    emit,
    emit_json,
    emit_styled,
    example,
    note,
    note_styled,
    say,
    wants_color,
    warn,
)
from schemas.errors import ConfigError, InputError, RolloutError, count
from schemas.imports import requires_extra

if TYPE_CHECKING:
    import polars as pl

    from rollout_io.cli.trajectory_text import TrajectoryView
    from schemas.checker import ValidationError

_WITHOUT_TOKENIZER = """\
only logged text is shown: the last message of each prompt, and each response (as token ids if the \
log lacks its text); pass --tokenizer DIR to see every token
"""
EXAMPLE = example(
    'rollouts inspect shop/ --where "return > 0" --limit 2\n'
    '  rollouts inspect shop/ --find "Traceback" --limit 20'
)


@click.command(epilog=EXAMPLE)
@dataset_argument()
@click.option("--where", metavar="SQL", help='SQL condition, such as "return > 0".')
@click.option("--find", "text", metavar="TEXT", help="List where this text occurs.")
@click.option(
    "--find-ids", "ids", metavar="IDS", help="List where these token ids occur, such as 12,13."
)
@click.option("--trajectory", metavar="ID", help="Show this trajectory, such as shop-2_1.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Maximum number of trajectories, or of matches, to show.",
)
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="DIR|NAME",
    help="Decode ids with this tokenizer.  [default: the dataset's, if it is on this machine]",
)
@click.option(
    "--ids-only", is_flag=True, help="Print only the ids of all matching trajectories, one a line."
)
@click.option("--json", "as_json", is_flag=True, help="Print the same view as JSON.")
@click.pass_context
def inspect(
    ctx: click.Context,
    dataset: str,
    where: str | None,
    text: str | None,
    ids: str | None,
    trajectory: str | None,
    limit: int,
    tokenizer: str | None,
    *,
    ids_only: bool,
    as_json: bool,
) -> None:
    """Show prompts, responses and trained tokens of trajectories.

    Conditions see the trajectory: "return > 0 AND num_tool_calls < 9", and its rows in
    any(CONDITION), all(CONDITION) and last(COLUMN). Exit code 1 if a displayed row breaks a named
    invariant.

    --find searches the decoded tokens of every row (without a tokenizer: the logged messages and
    responses). A match in tokens that a row repeats from an earlier row is listed once.
    """
    from rollout_io.cli.trajectory_text import legend, render
    from rollout_io.dataset.checking import validate

    if "" in (text, ids):
        raise click.UsageError("--find and --find-ids need something to look for.")
    if text or ids:
        from rollout_io.cli.trajectory_text import ids_of, print_matches

        if text and ids:
            raise click.UsageError("--find and --find-ids exclude each other.")
        chosen = where is not None or trajectory is not None
        trajectory_ids = (
            candidates(dataset, open_dataset(dataset), where, trajectory) if chosen else None
        )
        if trajectory is not None and trajectory_ids is not None:
            trajectory_ids = [known(trajectory, trajectory_ids)]
        sought = text if text else ids_of(ids or "")
        print_matches(dataset, sought, tokenizer, trajectory_ids, limit, as_json=as_json)
        return
    frame = open_dataset(dataset)
    if ids_only:
        matching_ids = candidates(dataset, frame, where, trajectory)
        if as_json:
            emit_json(matching_ids)
        for one in () if as_json else matching_ids:
            emit(one.replace("\n", "\\n"))  # a line an id
        return
    decode = own_decoder(dataset) if tokenizer is None else load_decoder(tokenizer)
    if tokenizer is not None:
        warn_of_other_tokenizer(dataset, tokenizer)
    matching_ids = candidates(dataset, frame, where, trajectory)
    if trajectory is not None:
        matching_ids = [known(trajectory, matching_ids)]
    try:
        shown = rows_of(frame, matching_ids[:limit])
    except RolloutError:
        validate(dataset)  # report the invalid rows instead of the prompt that fails to decode
        raise
    problem = problem_of(shown, dataset)
    views = view_all(shown if problem is None else sound_rows(shown, problem), decode)
    if problem is not None:
        say(f"Error: {problem}")
        note("Trajectories with errors are not shown.")
        say(f"Hint: run `rollouts validate {dataset}` to list every error")
    if as_json:
        emit_json([dataclasses.asdict(view) for view in views])
        ctx.exit(int(problem is not None))
    color = wants_color(sys.stdout)
    if views:
        note_styled(legend(color=color) + "\n")
        if decode is None:
            note(_WITHOUT_TOKENIZER)
    for view in views:
        emit_styled(render(view, color=color) + "\n")
    shown_text = f"{len(views)} of {count(len(matching_ids), 'trajectory')} shown"
    note(
        shown_text
        if matching_ids
        else f"no trajectory matches: {where}"
        if where
        else "the dataset is empty"
    )
    ctx.exit(int(problem is not None))


def candidates(
    dataset: str, frame: pl.LazyFrame, where: str | None, trajectory: str | None
) -> list[str]:
    """Return, in order, the ids that match `where`, or all ids if `where` is None.

    If only `trajectory` is given, and exists, return only this id. Looking up one trajectory reads
    few row groups; listing all ids reads every row group.

    Raises:
        ConfigError: `condition`, `known_column`: the condition is not SQL, has a type error, refers
            to an unknown column, or matches only some rows of a trajectory.
    """
    from rollout_io.dataset.trajectory_conditions import TrajectoryCondition, decided, evaluate
    from rollout_io.dataset.trajectory_facts import dataset_outcome

    if where is None:
        if trajectory and len(rows_of(frame.select("trajectory_id"), [trajectory])):
            return [trajectory]
        ids = frame.select("trajectory_id").unique(maintain_order=True).collect()
    else:
        condition, place = TrajectoryCondition.parse(where, dataset), f"--where {where!r}"
        values = evaluate(frame, condition, dataset_outcome(dataset), place)
        ids = values.filter(decided(values, condition, place))
    return list(ids["trajectory_id"])


def known(trajectory_id: str, ids: Sequence[str]) -> str:
    """Return the id if it is in `ids`; otherwise raise an error that suggests the closest id."""
    if trajectory_id not in ids:
        import difflib

        near = difflib.get_close_matches(trajectory_id, ids, 1)
        hint = f"did you mean {near[0]}?" if near else None
        finding = f"no trajectory has the id {trajectory_id!r}"
        raise ConfigError("known_trajectory", "--trajectory", finding, hint=hint)
    return trajectory_id


def rows_of(frame: pl.LazyFrame, ids: Sequence[str]) -> pl.DataFrame:
    """Return all rows of the given trajectories, in order."""
    import polars as pl

    return frame.filter(pl.col("trajectory_id").is_in(ids, nulls_equal=True)).collect()


def problem_of(rows: pl.DataFrame, where: str) -> ValidationError | None:
    """Return an error that describes the broken invariants, or None if all rows are valid."""
    from schemas.checker import ValidationError, validate

    try:
        validate(rows)
    except ValidationError as error:
        return ValidationError.of(error.breaches, f"{where}, among the rows shown")
    return None


def sound_rows(rows: pl.DataFrame, problem: ValidationError) -> pl.DataFrame:
    """Return only the rows of valid trajectories; no rows if an error affects the entire table."""
    import polars as pl

    broken = problem.breaches["trajectory_id"]
    if broken.null_count():
        return rows.clear()
    return rows.filter(~pl.col("trajectory_id").is_in(broken.implode()))


def view_all(
    rows: pl.DataFrame, decode: Callable[[Sequence[int]], str] | None
) -> list[TrajectoryView]:
    """Build the views of all trajectories in the rows, in order."""
    from rollout_io.cli.trajectory_text import COLUMNS, view_trajectory

    names = [name for name in rows.columns if name in COLUMNS]
    parts = rows.select(names).partition_by("trajectory_id", maintain_order=True)
    return [view_trajectory(part.to_dicts(), decode) for part in parts]


def own_decoder(dataset: str) -> Callable[[Sequence[int]], str] | None:
    """Load the decoder of the dataset's tokenizer, or return None if it is missing or changed."""
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.retokenize.local import remembered_tokenizer

    directory = remembered_tokenizer(read_metadata(dataset))
    return None if directory is None else load_decoder(directory)


def warn_of_other_tokenizer(dataset: str, tokenizer: str) -> None:
    """Warn if a tokenizer differs from the dataset's, because the decoded text would be wrong."""
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.retokenize.local import about_other_tokenizer, is_other_tokenizer

    metadata = read_metadata(dataset)
    if is_other_tokenizer(tokenizer, metadata):
        warn(about_other_tokenizer(tokenizer, metadata))


def load_decoder(path: str) -> Callable[[Sequence[int]], str]:
    """Load a decoder from a local `tokenizer.json`, or from its directory."""
    from rollout_io.retokenize.local import tokenizer_file

    file = tokenizer_file(path)
    with requires_extra("text", "--tokenizer"):
        from tokenizers import Tokenizer
    if not file.is_file():
        finding, hint = "the file does not exist", "pass the directory of a downloaded model"
        raise InputError("input_file", str(file), finding, "", hint)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        finding = f"the file is not a valid tokenizer.json: {' '.join(str(error).split())}"
        raise InputError("input_file", str(file), finding) from None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
