"""The formats that datasets can be exported to."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from rollout_io.formats.exporting import Exported, Failed, PathLike

FORMATS = {
    "skyrl": ("skyrl", "a GeneratorOutput as JSON"),
    "trl": ("trl", "samples of a GRPO rollout function, Parquet"),
    "verl": ("verl", "agent-loop outputs, Parquet"),
    "slime": ("slime_export", "a .pt for --load-debug-rollout-data"),
    "hf": ("hf", "a Hugging Face dataset folder"),
    "session_traces": ("session_traces", "sessions for the Hub's viewer of traces, JSONL"),
    "parquet": ("parquet", "a directory of Parquet files with full prompts"),
}
"""Module of the writer, and a description of the output, by name."""


def export(dataset: PathLike, out: PathLike, format: str, failed: Failed = "group") -> Exported:
    """Write a dataset in another project's format.

    Args:
        dataset: The dataset.
        out: Path to write; nothing is overwritten.
        format: Name of the format: `skyrl`, `trl`, `verl`, `slime`, `hf`, `session_traces` or
            `parquet`.
        failed: If a trajectory failed: mask its entire `group`, or only the `trajectory`; `hf`,
            `session_traces` and `parquet` keep all rows.

    Returns:
        The numbers of rows read, written and left out, with the reasons.

    Raises:
        ConfigError: `choices`: the format is unknown.
        RolloutError: The dataset is invalid, or the output cannot be written.

    Example:
        >>> export("shop/", "shop.json", "skyrl").num_rows_written
        205
    """
    if format not in FORMATS:
        raise ConfigError("choices", "format", repr(format), f"one of {', '.join(FORMATS)}")
    done: Exported = import_module(f"rollout_io.formats.{FORMATS[format][0]}").write(
        dataset, out, failed
    )
    return done
