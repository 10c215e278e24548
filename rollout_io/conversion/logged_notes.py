"""What a conversion noted about its logs, read from the dataset that it wrote.

Apart from `summary`, so that `rollouts stats` loads no reader of logs.
"""

from __future__ import annotations

import json
from contextlib import suppress

from rollout_io.dataset.reader import footers
from rollout_io.dataset.storage import Paths
from rollout_io.formats.base import UNREAD, added
from schemas.metadata import CONVERSION


def conversion_notes(path: Paths) -> dict[str, int]:
    """Return what a conversion noted about the logs of a dataset, with counts: what they lack.

    Empty if the dataset was not converted, or derived from another one.

    Raises:
        InvariantError: `shards_complete`: a shard is missing.
    """
    notes: dict[str, int] = {}
    for pairs in footers(path):
        # Another program may have written the record.
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            counts = json.loads(pairs[CONVERSION])["counts"]
            notes = added(notes, {str(text): int(num) for text, num in counts["notes"].items()})
    return {text: num for text, num in sorted(notes.items()) if not text.startswith(UNREAD)}
