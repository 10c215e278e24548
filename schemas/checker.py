"""Validation against the named invariants: `check` returns all breaches, `validate` raises them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from schemas.columns import REQUIRED_COLUMNS
from schemas.errors import InvariantError, count
from schemas.row_checks import ROW_CHECKS
from schemas.rules import RULES
from schemas.structure_checks import (
    STRUCTURE_COLUMNS,
    Runs,
    check_outcome,
    check_prefix,
    check_structure,
    check_whole,
)
from schemas.type_checks import check_names, check_types
from schemas.types import PREFIX_TYPES, as_table
from schemas.view import BREACH_SCHEMA, Breach, View, breach

DECODE_COLUMNS = (*PREFIX_TYPES, "response_ids", "trajectory_id", "step_index")
"""Columns needed to decode the prompts of the `prefix` layout."""


class ValidationError(InvariantError):
    """A table breaks one or more named invariants.

    Attributes:
        breaches: All breaches (see `BREACH_SCHEMA`).
        source: Path of the dataset, or "table".
    """

    breaches: pl.DataFrame
    source: str

    @classmethod
    def of(cls, breaches: pl.DataFrame, source: str = "table") -> ValidationError:
        """Build the error from one or more breaches; its message describes the first one."""
        first, more = breaches.row(0, named=True), len(breaches) - 1
        where = f"{source}, {row_place(first)}" if first["row"] is not None else source
        others = f" (and {count(more, 'more error')})" if more else ""
        error = cls(
            first["rule"],
            where,
            first["got"],
            first["expected"],
            RULES[first["rule"]].hint,
            message=f"{where}: {first['message']}{others}",
        )
        error.breaches, error.source = breaches, source
        return error


def row_place(breach: Mapping[str, Any]) -> str:
    """Format the row of a breach for a message: `row 3 (trajectory shop-1_0, step 2)`."""
    named = {"trajectory": breach["trajectory_id"], "step": breach["step_index"]}
    parts = [f"{name} {value}" for name, value in named.items() if value is not None]
    return f"row {breach['row']}" + (f" ({', '.join(parts)})" if parts else "")


class Checker:
    """Check a dataset table by table, in order; each table must contain complete trajectories.

    Attributes:
        num_rows: Number of rows checked so far.
        trajectory_ids: Ids of the trajectories checked so far.
        open_end: Id of the last trajectory if its final row is not marked last; otherwise None.

    Example:
        >>> checker = Checker()
        >>> for table in tables:
        ...     breaches = checker.check(table)
        >>> breaches = checker.finish()
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        self.trajectory_ids: set[str] = set()
        self.num_rows = 0
        self.open_end: str | None = None
        self._open_step = 0
        self._trains = False
        self._has_healthy_rows = False

    @classmethod
    def after(cls, parts: Sequence[Checker]) -> Checker:
        """Combine checkers of consecutive parts into one, as if it had checked all their tables."""
        whole = cls()
        for part in parts:
            whole.follow(part)
        return whole

    def follow(self, part: Checker) -> None:
        """Count the tables of the next part, which another checker has checked."""
        self.num_rows += part.num_rows
        self.trajectory_ids |= part.trajectory_ids
        self.open_end, self._open_step = part.open_end, part._open_step
        self._trains |= part._trains
        self._has_healthy_rows |= part._has_healthy_rows

    def check(self, data: Any) -> pl.DataFrame:
        """Return the breaches of the next table; rows are numbered from the start of the dataset.

        Args:
            data: Any Arrow-compatible table, with `prompt_token_ids` or the prefix columns.
        """
        view = View(as_table(data), self.num_rows, self._vocab_size)
        checks = (check_names, check_types, *ROW_CHECKS, self._check_structure, self._note_training)
        breaches = view.run(*checks)
        self.num_rows += view.table.num_rows
        return breaches

    def finish(self) -> pl.DataFrame:
        """Return the breaches that can only be found at the end of the dataset."""
        breaches: list[Breach] = []
        if self.open_end is not None:
            breaches.append(self._unfinished("final_row_is_last"))
        if self._has_healthy_rows and not self._trains:
            breaches.append(breach("mask_trains_something", "loss_mask"))
        return pl.DataFrame(breaches, BREACH_SCHEMA)

    def _check_structure(self, view: View) -> None:
        if not view.has(*STRUCTURE_COLUMNS) or not view.table.num_rows:
            return
        if self.open_end is not None:
            view.breaches.append(self._unfinished("boundary_alignment"))
        runs = Runs.of(view)
        check_structure(view, runs, self.trajectory_ids)
        is_closed = view.array("is_last_step")[-1]
        self.open_end = None if is_closed else view.column("trajectory_id")[-1].as_py()
        self._open_step = int(view.array("step_index")[-1])
        check_outcome(view, runs)

    def _unfinished(self, rule: str) -> Breach:
        place = self.num_rows - 1, self.open_end, self._open_step
        return breach(rule, "is_last_step", *place)

    def _note_training(self, view: View) -> None:
        self._trains = self._trains or bool(view.ragged("loss_mask").values.any())
        self._has_healthy_rows = self._has_healthy_rows or bool(view.is_null("error").any())


def check(data: Any, *, vocab_size: int | None = None) -> pl.DataFrame:
    """Return every breach of the named invariants in a table.

    Args:
        data: Any Arrow-compatible table.
        vocab_size: Exclusive upper bound of token ids; None if unknown.

    Returns:
        One row per breach, with the columns of `schemas.view.BREACH_SCHEMA`.

    Example:
        >>> check(table)["rule"].to_list()  # loss_mask is one element short in row 3
        ['lengths_align']
    """
    checker = Checker(vocab_size)
    return checker.check(data).vstack(checker.finish())


def validate(data: Any, *, vocab_size: int | None = None) -> None:
    """Raise an error if `check` finds errors; warnings are ignored.

    Raises:
        ValidationError: The table has breaches of severity `error`; its `breaches` lists them all.
    """
    raise_errors(check(data, vocab_size=vocab_size))


def raise_errors(breaches: pl.DataFrame, where: str = "table") -> None:
    """Raise a `ValidationError` if any breach is of severity `error`."""
    if breaches.is_empty():  # a filter costs far more, and most tables are valid
        return
    errors = breaches.filter(pl.col("severity") == "error")
    if len(errors):
        raise ValidationError.of(errors, where)


def check_references(view: View) -> None:
    """Check what decoding the prompts of a `prefix` row group relies on."""
    view.table = view.table.select([n for n in view.schema.names if n in DECODE_COLUMNS])
    check_types(view, set(DECODE_COLUMNS).intersection(REQUIRED_COLUMNS))
    if view.has(*DECODE_COLUMNS):
        check_whole(view)
        check_prefix(view)
