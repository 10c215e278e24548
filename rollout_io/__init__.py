"""Read and write rollout datasets, and convert them from and to the formats of other projects."""

from typing import TYPE_CHECKING

from rollout_io.startup import require_ours

require_ours("schemas")

from schemas.imports import exports  # noqa: E402

if TYPE_CHECKING:
    from rollout_io.conversion.driver import convert, read_log
    from rollout_io.dataset.checking import check, validate
    from rollout_io.dataset.reader import from_hf, iter_tables, read, read_metadata, scan, to_hf
    from rollout_io.dataset.writer import RolloutWriter
    from rollout_io.formats.exports import export
    from rollout_io.formats.skyrl_fields import GeneratorOutput, TrajectoryID
    from rollout_io.formats.skyrl_generator_output import (
        from_generator_output,
        read_generator_output,
        to_generator_output,
        write_generator_output,
    )
    from schemas.errors import (
        ConfigError,
        EngineError,
        InputError,
        InvariantError,
        MissingExtra,
        RolloutError,
    )

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "EngineError",
    "GeneratorOutput",
    "InputError",
    "InvariantError",
    "MissingExtra",
    "RolloutError",
    "RolloutWriter",
    "TrajectoryID",
    "check",
    "convert",
    "export",
    "from_generator_output",
    "from_hf",
    "iter_tables",
    "read",
    "read_generator_output",
    "read_log",
    "read_metadata",
    "scan",
    "to_generator_output",
    "to_hf",
    "validate",
    "write_generator_output",
]

__getattr__, __dir__ = exports(__name__, __file__, __all__)
