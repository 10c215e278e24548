"""Bytes to rollout tables and back: writer, reader, harness adapters, exporters, the command."""

from typing import TYPE_CHECKING

from schemas.lazy import exports

if TYPE_CHECKING:
    from rollout_io.adapters import Options
    from rollout_io.checking import check_dataset
    from rollout_io.conversion.choices import Choices
    from rollout_io.conversion.driver import convert
    from rollout_io.conversion.reading import read_log
    from rollout_io.generator_output import (
        from_generator_output,
        read_generator_output,
        to_generator_output,
        write_generator_output,
    )
    from rollout_io.reader import iter_tables, read, read_metadata, scan, to_hf
    from rollout_io.writer import RolloutWriter

__all__ = [
    "Choices",
    "Options",
    "RolloutWriter",
    "check_dataset",
    "convert",
    "from_generator_output",
    "iter_tables",
    "read",
    "read_generator_output",
    "read_log",
    "read_metadata",
    "scan",
    "to_generator_output",
    "to_hf",
    "write_generator_output",
]

_MODULES = {
    "rollout_io.adapters": ("Options",),
    "rollout_io.conversion.choices": ("Choices",),
    "rollout_io.conversion.driver": ("convert",),
    "rollout_io.conversion.reading": ("read_log",),
    "rollout_io.generator_output": (
        "from_generator_output",
        "read_generator_output",
        "to_generator_output",
        "write_generator_output",
    ),
    "rollout_io.checking": ("check_dataset",),
    "rollout_io.reader": ("iter_tables", "read", "read_metadata", "scan", "to_hf"),
    "rollout_io.writer": ("RolloutWriter",),
}
__getattr__ = exports(__name__, _MODULES)


def __dir__() -> list[str]:
    return __all__
