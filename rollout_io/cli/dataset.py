"""Functions that open a dataset for a verb, with a clear error if it is not a dataset."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from schemas.errors import InvariantError

if TYPE_CHECKING:
    import polars as pl

    from rollout_io.dataset.parallel import Workers

_LOG = logging.getLogger(__name__)


def open_dataset(path: str) -> pl.LazyFrame:
    """Scan a dataset, after checking that the required columns exist with their declared types.

    Raises:
        InputError: `dataset_exists`: the path is not a dataset.
        InvariantError: `columns_and_types`: a column is missing or has the wrong type.
    """
    import polars as pl

    from rollout_io.dataset.reader import scan
    from schemas.checker import check_types

    frame = scan(path)
    empty = pl.DataFrame(schema=frame.collect_schema()).to_arrow()
    breaches, _ = check_types(empty)
    if len(breaches):
        first = breaches.row(0, named=True)
        hint = f"run `rollouts validate {path}` to list every error"
        raise InvariantError("columns_and_types", path, first["message"], "", hint)
    return frame


def open_valid(path: str, workers: Workers | None = None) -> pl.LazyFrame:
    """Scan a dataset, after checking every row against the named invariants.

    Raises:
        InputError: `dataset_exists`: the path is not a dataset.
        InvariantError: The dataset breaks an invariant, whose name is the rule id.
    """
    from rollout_io.cli.workers import workers_of
    from rollout_io.dataset.checking import validate

    frame, start_s = open_dataset(path), time.monotonic()
    validate(path, workers or workers_of(None, "local", path))
    _LOG.debug("%s: checked in %.2f s", path, time.monotonic() - start_s)
    return frame
