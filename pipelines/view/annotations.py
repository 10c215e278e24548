"""What others say about the rows of a dataset: tables of verdicts and row shares, and findings.

Tables are read and matched to the rows; findings are shown by trajectory, turn and token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from starlette.responses import Response

from pipelines.merging.merge import unmerge_table
from pipelines.view.responses import arrow_response
from pipelines.view.run_files import stored_digests
from rollout_io.dataset.opening import refuse_irregular
from rollout_io.dataset.versions import FINDINGS, read_current, version_names
from schemas.columns import JOINED, Column
from schemas.errors import InputError, count
from schemas.ragged import Ragged
from schemas.records import MEANINGS, NO_FAULT, UNDECIDED, UPDATE_SHARE_COLUMNS, VERDICT_COLUMNS

if TYPE_CHECKING:
    from pipelines.view.dataset import Dataset

Kind = Literal["verdicts", "shares"]
COLUMNS: dict[Kind, tuple[Column, ...]] = {
    "verdicts": VERDICT_COLUMNS,
    "shares": UPDATE_SHARE_COLUMNS,
}
NAMES: dict[Kind, str] = {"verdicts": "verdicts", "shares": "shares of an update"}
FAULTS, FAULT_NATS = "faults", "fault_nats"
"""Columns that verdicts add to the table of trajectories."""
NO_FAULTS = "none"
"""Value of `FAULTS` for audited trajectories without a fault."""
SHARE = "share_of_update_"
"""Prefix of the names of columns with shares of an update; the update's number follows."""
MAX_ROWS = 10_000
_ROW = ["trajectory_id", "step_index"]
_MAX_KIND = 40
_NOT_SHOWN = frozenset({"run", "global_step", "dataset", "row_digest", "token_shares", *_ROW})

FINDINGS_COLUMN = "findings"
"""Column that findings add to the table of trajectories."""
_READ = (
    *("trajectory_id", "step_index", "is_last_step", "prompt_token_ids", "response_ids"),
    *("loss_mask", "token_source", "response_text", "segments"),
)


def _needed(kind: Kind) -> list[Column]:
    return [c for c in COLUMNS[kind] if not c.nullable and c.name != "instance_id"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """A table of row shares: the contributions of rows to an update.

    Attributes:
        name: Name of the file.
        path: The file.
        run: Id of the run; None if it is not open.
        update: The update.
        column: Name of the column of these shares in the table of trajectories.
        rows: The rows of the table; `dataset` is the id of the dataset, null if it is not shown.
    """

    name: str
    path: str
    run: str | None
    update: int
    column: str
    rows: pl.DataFrame


def kind_of_table(path: str) -> Kind | None:
    """Recognise a table of verdicts or row shares by its columns.

    Returns:
        Its kind; None for datasets, and for files that are not Parquet.

    Raises:
        InputError: `view_table`: a Parquet file is neither a dataset nor such a table.
    """
    if not Path(path).is_file():
        return None
    try:
        names = set(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return None  # opened as a dataset, which reports the error
    if "response_ids" in names:
        return None
    lacking: dict[Kind, list[str]] = {
        kind: [c.name for c in _needed(kind) if c.name not in names] for kind in COLUMNS
    }
    for kind, missing in lacking.items():
        if not missing:
            return kind
    nearest = min(lacking, key=lambda kind: len(lacking[kind]))
    names_missing = ", ".join(lacking[nearest])
    finding = "its columns match neither a dataset nor a table of verdicts or row shares"
    if len(lacking[nearest]) < len(_needed(nearest)) / 2:
        finding = f"it looks like a table of {NAMES[nearest]}, but has no column {names_missing}"
    hint = "pass a dataset, a run, or a table written by `rollouts audit` or `rollouts blame`"
    raise InputError("view_table", path, finding, hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """Rows of a table of verdicts or row shares.

    Attributes:
        path: The file.
        kind: Kind of the table.
        rows: The rows, with the recorded path of the dataset in the column `dataset`.
        run: Directory of the run, as recorded in the table; None for verdicts.
        update: The update; None for verdicts.
    """

    path: str
    kind: Kind
    rows: pl.DataFrame
    run: str | None = None
    update: int | None = None

    @property
    def name(self) -> str:
        """Name of the file."""
        return Path(self.path).name

    def of_dataset(self, path: str) -> pl.DataFrame:
        """Return the rows recorded for one dataset."""
        return self.rows.filter(pl.col("dataset") == path)

    def difference(self, named: str, path: str) -> str:
        """Describe how the rows of the dataset at `path` differ from the rows that were recorded.

        A row differs if no row of the dataset has the same ids and the same digest, or if
        the table refers to positions outside the row.

        Args:
            named: Path of the dataset, as recorded in the table.
            path: Path of the dataset to compare with.

        Returns:
            A clause such as "2 of 9 rows differ, the first in trajectory a_0, step 1"; "" if no row
            differs.

        Raises:
            InputError: `readable_file`: the dataset is damaged.
        """
        rows = self.of_dataset(named).join(
            stored_digests(path, self.of_dataset(named)["trajectory_id"].unique()),
            on=[*_ROW, "row_digest"],
            how="left",
            maintain_order="left",
        )
        length, other = pl.col("num_tokens_of_row"), pl.lit(value=False)
        if self.kind == "verdicts":
            first, end, swap = (pl.col(name) for name in ("start", "end", "swap_position"))
            other = (pl.col("num_response_tokens") != length) | (first < 0) | (first > end)
            other |= (end > length) | (swap < first).fill_null(value=False)
            other |= (swap > end).fill_null(value=False)
        else:
            other = (pl.col("token_shares").list.len() != length).fill_null(value=False)
        changed = rows.filter(length.is_null() | other).select(_ROW).unique(maintain_order=True)
        if changed.is_empty():
            return ""
        total = rows.select(_ROW).n_unique()
        trajectory_id, step_index = changed.row(0)
        differ = f"{len(changed):,} of {count(total, 'row')} differ"
        return f"{differ}, the first in trajectory {trajectory_id}, step {step_index}"


def read_row_tables(path: str, kind: Kind) -> Iterator[RowTable]:
    """Read a table: yield all verdicts as one item, or the row shares of each update as one item.

    Raises:
        InputError: `readable_file`: the file is damaged; `view_table`: a column has the wrong type
            or contains nulls, or a row has several shares of one update.
    """
    refuse_irregular(Path(path))
    try:
        frame = pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        finding = f"the file is damaged: {' '.join(str(error).split())}"
        raise InputError("readable_file", path, finding) from None
    rows = _typed(frame, path, kind)
    if kind == "verdicts":
        yield RowTable(path=path, kind=kind, rows=rows)
        return
    repeated = rows.filter(rows.select("run", "global_step", "dataset", *_ROW).is_duplicated())
    if len(repeated):
        trajectory_id, step_index = repeated.select(_ROW).row(0)
        finding = f"trajectory {trajectory_id}, step {step_index}, has several shares of one update"
        raise InputError("view_table", path, finding)
    for (run, update), part in rows.group_by("run", "global_step", maintain_order=True):
        yield RowTable(path=path, kind=kind, rows=part, run=str(run), update=int(str(update)))


def _typed(frame: pl.DataFrame, path: str, kind: Kind) -> pl.DataFrame:
    """Cast the declared columns; in a table of row shares, keep other numeric columns."""
    columns = []
    for column in COLUMNS[kind]:
        assert column.type is not None
        wanted = pl.Series(pa.array([], column.type)).dtype
        if column.name not in frame.columns:
            columns.append(pl.Series(column.name, [None] * len(frame), wanted))
            continue
        values = frame[column.name]
        try:
            if not _is_like(values.dtype, wanted):
                raise pl.exceptions.InvalidOperationError
            cast = values.cast(wanted)
        except pl.exceptions.PolarsError:
            finding = f"the column {column.name} has the type {values.dtype}, not {wanted}"
            raise InputError("view_table", path, finding) from None
        if cast.null_count() and not column.nullable and column.name != "instance_id":
            raise InputError("view_table", path, f"the column {column.name} has nulls")
        columns.append(cast)
    declared = {column.name for column in COLUMNS[kind]}
    if kind == "shares":
        others = [name for name in frame.columns if name not in declared]
        # Polars panics when it exports a column with NUL in its name.
        columns += [frame[n] for n in others if frame[n].dtype.is_numeric() and "\0" not in n]
    return pl.DataFrame(columns)


def _is_like(kind: pl.DataType, wanted: pl.DataType) -> bool:
    """True if a column of type `kind` may be cast to `wanted`, such as integers to floats."""
    if kind == pl.Null or kind == wanted:
        return True
    if wanted.is_integer():
        return kind.is_integer()
    if wanted.is_float():
        return kind.is_numeric()
    return isinstance(wanted, pl.List) and isinstance(kind, pl.List)


def faults_of(verdicts: pl.DataFrame) -> pl.DataFrame:
    """Return the faults of each trajectory.

    Returns:
        `trajectory_id`; `faults`: the kinds of faults, `NO_FAULTS` if there are none, null if all
        verdicts are undecided; `fault_nats`: the largest log-likelihood ratio of a fault, in nats.
    """
    kind = pl.col("kind")
    is_fault = ~kind.is_in(NO_FAULT)
    kinds = kind.str.head(_MAX_KIND).filter(is_fault).unique(maintain_order=True)
    grouped = verdicts.group_by("trajectory_id", maintain_order=True).agg(
        kinds.alias("kinds"),
        is_decided=(~kind.is_in(UNDECIDED)).any(),
        fault_nats=pl.col("log_likelihood_ratio").filter(is_fault).fill_nan(None).max(),
    )
    named = pl.when(pl.col("kinds").list.len() > 0).then(pl.col("kinds").list.join(", "))
    none = pl.when("is_decided").then(pl.lit(NO_FAULTS))
    return grouped.select("trajectory_id", named.otherwise(none).alias(FAULTS), FAULT_NATS)


def shares_of(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return each trajectory's share of an update: the sum of the shares of its rows."""
    shares = pl.col("share").fill_nan(None)
    total = pl.when(shares.count() > 0).then(shares.sum())
    return rows.group_by("trajectory_id").agg(total.alias(column))


def spans(verdicts: pl.DataFrame, trajectory_id: str, step_index: int) -> list[dict[str, Any]]:
    """Return the verdicts about one row, in the order of their positions."""
    about_row = verdicts.filter(
        (pl.col("trajectory_id") == trajectory_id) & (pl.col("step_index") == step_index)
    )
    hidden = {*_ROW, "dataset", "instance_id", "row_digest", "num_response_tokens"}
    rows = (
        about_row.drop(*hidden, strict=False).sort("start", "end", maintain_order=True).to_dicts()
    )
    return [
        {
            **row,
            "is_fault": row["kind"] not in NO_FAULT,
            "meaning": MEANINGS.get(row["kind"]),
        }
        for row in rows
    ]


def top_shares(rows: pl.DataFrame, limit: int) -> Response:
    """Return the rows with the largest absolute shares of the update, and `total`: their number.

    `dataset` is the viewer's id of the dataset; null for rows of datasets that are not shown.
    """
    size = pl.col("share").fill_nan(None).abs()
    ranked = rows.sort(size, descending=True, nulls_last=True, maintain_order=True)
    others = [name for name in rows.columns if name not in _NOT_SHOWN]
    shown = ranked.head(min(limit, MAX_ROWS)).select("dataset", *_ROW, *others)
    return arrow_response(shown, total=len(rows))


class Findings:
    """The findings of all versions that are about the rows that a dataset has now.

    Args:
        dataset: Path of the dataset.

    Attributes:
        warnings: Why a version is not shown.
    """

    def __init__(self, dataset: str) -> None:
        self.warnings: list[str] = []
        parts = []
        for name in version_names(dataset, FINDINGS):
            try:
                values = read_current(dataset, name, FINDINGS)
            except InputError as error:
                self.warnings.append(f"{error.sentence} They are not shown.")
                continue
            parts.append(values.select("trajectory_id", FINDINGS_COLUMN, name=pl.lit(name)))
        schema: dict[str, Any] = {
            "trajectory_id": pl.String,
            FINDINGS_COLUMN: FINDINGS.type,
            "name": pl.String,
        }
        self._values = pl.concat(parts) if parts else pl.DataFrame(schema=schema)

    def __len__(self) -> int:
        """Return the number of findings."""
        return int(self._values[FINDINGS_COLUMN].list.len().sum() or 0)

    def __bool__(self) -> bool:
        """True if a version is shown, even one that found nothing."""
        return len(self._values) > 0

    @cached_property
    def by_trajectory(self) -> pl.DataFrame:
        """`trajectory_id` and the labels found in it: "none" if none, null if no finder succeeded."""
        labels = (
            pl.col(FINDINGS_COLUMN).explode(empty_as_null=False).struct.field("label").drop_nulls()
        )
        labelled = self._values.group_by("trajectory_id").agg(
            labels.unique().sort().str.join(", ").alias("labels"),
            is_known=pl.col(FINDINGS_COLUMN).is_not_null().any(),
        )
        none = pl.when("is_known").then(pl.lit(NO_FAULTS))
        named = pl.when(pl.col("labels") != "").then("labels").otherwise(none)
        return labelled.select("trajectory_id", named.alias(FINDINGS_COLUMN))

    def of(self, dataset: Dataset, trajectory_id: str) -> list[dict[str, Any]]:
        """Return the findings in a trajectory, with their places in its rows, merged or not.

        Returns:
            name, label, text; row; at (a token of the row's prompt + response in the turn that it is
            about); start and end (tokens of the row's response that it is about, equal if it is about
            none in particular).
        """
        values = self._values.filter(pl.col("trajectory_id") == trajectory_id).drop_nulls(
            FINDINGS_COLUMN
        )
        listed = [
            (name, one)
            for name, findings in values.select("name", FINDINGS_COLUMN).rows()
            for one in findings
        ]
        if not listed:
            return []
        table = dataset.trajectory(dataset.index.number(trajectory_id), dataset.present(*_READ))
        segments = (
            table.column("segments").to_pylist()
            if "segments" in table.column_names
            else [None] * table.num_rows
        )
        row_of = _rows_of_steps(segments)
        prompts = Ragged.from_arrow(table.column("prompt_token_ids")).lengths
        steps = unmerge_table(table)
        return [
            {"name": name, "label": one["label"], "text": one["text"]}
            | _place(dataset, steps, one, row_of, prompts)
            for name, one in listed
        ]


def _rows_of_steps(rows: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[int]:
    """Return the row that holds each step, in the order in which `unmerge` numbers them."""
    steps, are_merged = list[tuple[int, int]](), True
    for row, segments in enumerate(rows):
        is_merged = segments is not None and any(one.get(JOINED) for one in segments[:1])
        numbers = [one["step_index"] for one in segments or ()] if is_merged else [row]
        steps += [(step, row) for step in numbers]
        are_merged &= is_merged
    return [row for _, row in (sorted(steps) if are_merged else steps)]


def _place(
    dataset: Dataset,
    steps: Any,
    finding: Mapping[str, Any],
    row_of: Sequence[int],
    prompts: Any,
) -> dict[str, int | None]:
    """Place a finding in the row of its step: a merged row begins with all tokens of its steps."""
    step = finding["step"]
    if step is None:
        return {"row": None, "at": None, "start": 0, "end": 0}
    row = row_of[step]
    before, prompt = (int(n) for n in (prompts[row], len(steps.column("prompt_token_ids")[step])))
    start, length = finding["start"], finding["length"]
    if start is None and finding["text_start"] is not None:
        start, length = _tokens_of_text(dataset, steps, finding)
        start = None if start is None else prompt + start
    if start is None:
        return {"row": row, "at": prompt, "start": 0, "end": 0}
    return {"row": row, "at": start, "start": start - before, "end": start - before + length}


def _tokens_of_text(
    dataset: Dataset, steps: Any, finding: Mapping[str, Any]
) -> tuple[int, int] | tuple[None, None]:
    """Find the response tokens that spell a part of a step's response text."""
    step, first = finding["step"], finding["text_start"]
    ids = np.array(steps.column("response_ids")[step].as_py(), np.int32)
    vocabulary = dataset.token_bytes
    if vocabulary is None or not finding["text_length"]:
        return None, None
    ends = np.cumsum([len(spelled) for spelled in vocabulary.to_arrow(ids).to_pylist()])
    spelled = b"".join(vocabulary.to_arrow(ids).to_pylist())
    has_text = "response_text" in steps.column_names
    text = (steps.column("response_text")[step].as_py() if has_text else None) or vocabulary.text(
        ids
    )
    sought = text[first : first + finding["text_length"]].encode("utf-8", "replace")
    # A logged text may lack what the tokens spell before it, never the reverse.
    at = spelled.find(sought, len(text[:first].encode("utf-8", "replace")))
    at = spelled.find(sought) if at < 0 else at
    if at < 0:
        return None, None
    begin, last = np.searchsorted(ends, [at, at + len(sought) - 1], side="right")
    return int(begin), int(last - begin + 1)
