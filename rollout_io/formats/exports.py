"""The formats that datasets can be exported to; other packages add theirs as entry points.

Plain Parquet is a dataset in the `full` layout, with the same columns in all files. Every Parquet reader
sees complete prompts. `rollouts` reads the directory like any dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rollout_io.plugins import plugins
from schemas.errors import ConfigError, InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from rollout_io.dataset.storage import PathLike
    from rollout_io.formats.exporting import Exported, Failed

AT_LEAST = ">=X"
"""The choice of the samples whose return is at least X."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format that datasets can be exported to.

    Attributes:
        summary: The output in a few words.
        write: Writes a dataset. Takes the dataset, the output path and `failed`; and the chosen
            `select` if there are `selections`.
        selections: Values that `select` may have, the default first; `>=X` takes a number.
        failed: What a failed trajectory masks by default.
    """

    summary: str
    write: Callable[..., Exported]
    selections: tuple[str, ...] = ()
    failed: Failed = "group"

    def choice(self, select: str | None) -> str:
        """Return the chosen selection, or the default.

        Raises:
            ConfigError: `choices`: this format has no such selection.
        """
        select = self.selections[0] if select is None else select
        if select in set(self.selections) - {AT_LEAST}:
            return select
        if AT_LEAST in self.selections and bar_of(select) is not None:
            return select
        raise ConfigError("choices", "select", repr(select), f"one of {', '.join(self.selections)}")


def bar_of(select: str) -> float | None:
    """Return X of `>=X`; None for any other selection.

    Example:
        >>> bar_of(">=0.5"), bar_of("best")
        (0.5, None)
    """
    try:
        bar = float(select.removeprefix(">="))
    except ValueError:
        return None
    return bar if select.startswith(">=") and abs(bar) < float("inf") else None


def _written(name: str, dataset: PathLike, out: PathLike, failed: Failed) -> Exported:
    module, _, function = name.partition(":")
    write = getattr(import_module(f"rollout_io.formats.{module}"), function or "write")
    done: Exported = write(dataset, out, failed)
    return done


def _write_parquet(dataset: PathLike, out: PathLike, _: Failed) -> Exported:
    """Write a copy of the dataset with full prompts, one row group at a time.

    All rows and columns are exported, including failed trajectories. A repeated call resumes an
    interrupted export.
    """
    from rollout_io.dataset.reader import iter_tables, read_metadata, shard_sizes
    from rollout_io.dataset.rewriting import rewrite
    from rollout_io.dataset.sources import Sources
    from rollout_io.formats.exporting import Exported, refuse_taken

    if Path(out).is_file():
        refuse_taken(out, dataset)
    sources = Sources(dataset)
    schema = next(iter(iter_tables(dataset))).schema
    if not any(shard_sizes(dataset).values()):
        Exported().close(dataset)
    source, target = os.fspath(dataset), os.fspath(out)
    complete, metadata = partial(_with_all_columns, schema), read_metadata(dataset)
    counts = rewrite(source, target, complete, metadata, layout="full", sources=sources)
    return Exported(num_rows_read=counts.num_rows_before, num_rows_written=counts.num_rows_after)


def _with_all_columns(schema: pa.Schema, table: pa.Table) -> pa.Table:
    """Add columns that exist only in other shards, filled with nulls."""
    import pyarrow as pa

    tables = [schema.empty_table(), table]
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


FORMATS = {
    "skyrl": Format("a GeneratorOutput as JSON", partial(_written, "skyrl")),
    "trl": Format(
        "samples of a GRPO rollout function, Parquet", partial(_written, "trainers:write_trl")
    ),
    "verl": Format("agent-loop outputs, Parquet", partial(_written, "trainers:write_verl")),
    "slime": Format("a .pt for --load-debug-rollout-data", partial(_written, "slime_export")),
    "hf": Format("a Hugging Face dataset folder", partial(_written, "hugging_face:write_folder")),
    "session_traces": Format(
        "sessions for the Hub's viewer of traces, JSONL",
        partial(_written, "hugging_face:write_traces"),
    ),
    "parquet": Format("a directory of Parquet files with full prompts", _write_parquet),
}
"""The formats of this package, by name."""


def formats() -> dict[str, Format]:
    """Return all formats by name: those of this package, then the entry points `rollout_io.exports`.

    An entry point is a dictionary of formats by name. One that cannot be imported is a format with the
    entry point's name, whose `write` raises the reason.
    """
    registered = dict(FORMATS)
    for plugin in plugins("rollout_io.exports"):
        try:
            registered |= plugin.load()
        except Exception as error:
            finding = " ".join(f"cannot be imported: {type(error).__name__}: {error}".split())
            where = f"exports {plugin.name} ({plugin.value})"
            raised = InputError(
                "format_loads", where, finding, hint="reinstall its package, or remove it"
            )
            registered.setdefault(plugin.name, Format(finding, partial(_refuse, raised)))
    return registered


def _refuse(error: InputError, *_: object) -> NoReturn:
    raise error


def export(
    dataset: PathLike,
    out: PathLike,
    format: str,
    failed: Failed | None = None,
    select: str | None = None,
) -> Exported:
    """Write a dataset in another project's format.

    Args:
        dataset: The dataset.
        out: Path to write; nothing is overwritten.
        format: Name of the format, as `rollouts export --help` lists them.
        failed: If a trajectory failed: mask its entire `group`, or only the `trajectory`; `hf`,
            `session_traces` and `parquet` keep all rows. None: the default of the format.
        select: Which samples to write, for formats with `selections`. None: the first of them.

    Returns:
        The numbers of rows read, written and left out, with the reasons.

    Raises:
        ConfigError: `choices`: the format is unknown, or it has no such selection.
        RolloutError: The dataset is invalid, or the output cannot be written.

    Example:
        >>> export("shop/", "shop.json", "skyrl").num_rows_written
        205
    """
    registered = formats()
    if format not in registered:
        raise ConfigError("choices", "format", repr(format), f"one of {', '.join(registered)}")
    target = registered[format]
    if target.selections:
        return target.write(dataset, out, failed or target.failed, target.choice(select))
    if select is not None:
        finding = f"{select!r}, but {format} always takes the whole dataset"
        raise ConfigError("choices", "select", finding, hint="run `rollouts filter` first")
    return target.write(dataset, out, failed or target.failed)
