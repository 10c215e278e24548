"""Groups whose attempts begin with different prompts: probably attempts at different tasks."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from rollout_io.dataset.reader import iter_tables
from rollout_io.dataset.storage import PathLike
from schemas.errors import count
from schemas.ragged import Ragged

_NAMES = ("instance_id", "step_index", "prompt_token_ids")


def mixed_groups(dataset: PathLike) -> list[str]:
    """List the groups of a dataset whose attempts have different first prompts, in order.

    Attempts without a prompt are ignored. Memory use grows with the number of groups.
    """
    first: dict[str, bytes] = {}
    mixed: dict[str, None] = {}
    for table in iter_tables(dataset, _NAMES, decode=False):
        rows = np.flatnonzero(np.asarray(table.column("step_index")) == 0)
        # The first row of a trajectory has no prefix in another row.
        stored = "prompt_suffix_ids" if "prompt_suffix_ids" in table.column_names else _NAMES[-1]
        prompts = Ragged.from_arrow(table.column(stored))
        names = table.column("instance_id").take(rows).to_pylist()
        for name, row in zip(names, rows.tolist(), strict=True):
            tokens = prompts.row(row)
            digest = blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest()
            if len(tokens) and first.setdefault(name, digest) != digest:
                mixed[name] = None
    return list(mixed)


def mixed_text(dataset: PathLike, num_groups: int) -> str | None:
    """Return a warning about `mixed_groups`; None if there are none.

    Args:
        dataset: The dataset.
        num_groups: Number of its groups.
    """
    mixed = mixed_groups(dataset)
    if not mixed:
        return None
    return (
        f"{len(mixed):,} of {count(num_groups, 'group')} {'has' if len(mixed) == 1 else 'have'} "
        f"attempts with different first prompts, such as {mixed[0]!r:.80}. Training compares the "
        "attempts of a group, so give each task its own name, or pass --group-by LABEL"
    )
