"""Records in the footers of a dataset that identify the conversion that wrote it.

The last shard of each chunk stores the digest of the conversion's identity and the counts of the
chunk. In the first chunk, it also stores the counts of the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from rollout_io.conversion.summary import Summary
from rollout_io.dataset.footer import Place
from rollout_io.dataset.reader import footers, scan
from rollout_io.dataset.storage import Location
from schemas.errors import RolloutError
from schemas.metadata import CONVERSION

Record = Mapping[str, Any]


def record_of(identity: Mapping[str, Any], planned: Summary | None) -> Record:
    """Return the record that identifies the conversion in the footer of a chunk.

    Args:
        identity: Identity of the conversion, as JSON.
        planned: Counts of the plan; None for all chunks but the first.
    """
    text = json.dumps(identity, sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return {"identity": digest, "planned": planned and _encoded(planned)}


def footer_of(record: Record, counts: Summary) -> dict[bytes, bytes]:
    """Return the key-value pair for a footer, with a chunk's record and counts."""
    return {CONVERSION: json.dumps({**record, "counts": _encoded(counts)}).encode()}


def finished(out: str | os.PathLike[str], identity: Mapping[str, Any]) -> Summary | None:
    """Return the counts of a dataset if a conversion with this identity completed it, else None.

    A dataset with a missing, additional or damaged shard does not count as finished.
    """
    wanted = record_of(identity, None)["identity"]
    location = Location.of(out)
    if not location.fs.isdir(location.path) or not location.shards():
        return None
    try:
        pairs = footers(out)
        places = [Place.decode(found) for found in pairs]
        records = [json.loads(found[CONVERSION]) for found in pairs if CONVERSION in found]
        writings = {place and (place.writing, place.num_parts) for place in places}
        if len(writings) > 1 or places[0] is None or len(records) != places[0].num_parts:
            return None
        if {record["identity"] for record in records} != {wanted}:
            return None
        summary = Summary()
        for record in records:
            for name in ("planned", "counts"):
                if record[name] is not None:
                    summary.merge(Summary.decode(record[name] | {"instances": []}))
        names = scan(out).select("instance_id").unique().collect()["instance_id"]
    except (RolloutError, ValueError, KeyError, TypeError):
        return None
    summary.instances = set(names)
    return summary


def _encoded(counts: Summary) -> dict[str, Any]:
    """Return counts as JSON, without the names of instances, which the dataset contains."""
    return {name: value for name, value in counts.encode().items() if name != "instances"}
