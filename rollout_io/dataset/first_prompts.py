"""Groups whose attempts begin with different prompts: probably attempts at different tasks."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_io.dataset.reader import iter_tables, scan
from rollout_io.dataset.storage import PathLike
from schemas.columns import PICTURES
from schemas.errors import count
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.pictures import identity_ids, pictures_of
from schemas.ragged import Ragged

_NAMES = ("instance_id", "step_index", "prompt_token_ids")


def digest_of(prompt: npt.NDArray[np.integer[Any]]) -> bytes | None:
    """Return a digest of the `identity_ids` of a prompt, [P]; None if it is empty."""
    tokens = np.ascontiguousarray(prompt, np.int64).tobytes()
    return blake2b(tokens, digest_size=16).digest() if tokens else None


def mixed_groups(dataset: PathLike) -> tuple[list[str], int]:
    """List the groups of a dataset whose attempts have different first prompts, in order.

    Attempts without a prompt are ignored. Memory use grows with the number of groups.

    Returns:
        These groups, and the number of groups with a prompt.
    """
    first: dict[str, bytes] = {}
    mixed: dict[str, None] = {}
    present = scan(dataset).collect_schema()
    names = [*_NAMES, *([PICTURES] if PICTURES in present else ())]
    for table in iter_tables(dataset, names, decode=False):
        rows = np.flatnonzero(to_numpy(table.column("step_index")) == 0)
        # The first row of a trajectory has no prefix in another row.
        stored = "prompt_suffix_ids" if "prompt_suffix_ids" in table.column_names else _NAMES[-1]
        begins = np.zeros(table.num_rows, np.int64)
        tokens = Ragged.from_arrow(table.column(stored))
        prompts = identity_ids(tokens, begins, pictures_of(table))
        groups = table.column("instance_id").take(to_arrow(rows)).to_pylist()
        for name, row in zip(groups, rows.tolist(), strict=True):
            digest = digest_of(prompts.row(row))
            if digest is not None and first.setdefault(name, digest) != digest:
                mixed[name] = None
    return list(mixed), len(first)


def mixed_text(dataset: PathLike) -> str | None:
    """Return a note about `mixed_groups`; None if there are none."""
    mixed, num_groups = mixed_groups(dataset)
    if not mixed:
        return None
    return (
        f"{len(mixed):,} of {count(num_groups, 'group')} {'has' if len(mixed) == 1 else 'have'} "
        f"attempts with different first prompts, such as {mixed[0]!r:.80}. Training compares the "
        "attempts of a group, so give each task its own name, or convert with --group-by LABEL"
    )
