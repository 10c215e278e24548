"""Runs whose records are scattered over lines and files, each of which names its run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

from rollout_io.formats.base import Found, Place, Rejected, Run
from rollout_io.formats.parsing.lines import incomplete
from schemas.errors import RolloutError


def gathered(
    items: Iterable[Found], key: Callable[[Place], Hashable] | None = None
) -> Iterator[Found]:
    """Yield one run per group of records, in the order of the first ones; other items come first.

    A group with a damaged record is rejected. The first value of each label counts.

    Args:
        items: What was found in the logs: a run for each record, or for each part of one.
        key: Returns what a record shares with the others of its run, even if it is damaged; None: runs
            have names of their own, and damaged records have none.
    """
    runs: dict[Hashable, tuple[Run, list[Place]]] = {}
    damage: dict[Hashable, RolloutError] = {}
    for item in items:
        if isinstance(item, Run):
            name = item.instance_id if key is None else key(item.places[0])
            run, places = runs.setdefault(name, (item, []))
            places += item.places
            run.labels = {**run.labels, **item.labels, **run.labels}  # the first values
            continue
        yield item
        if isinstance(item, Rejected) and key is not None:
            damage.setdefault(key(item.place), item.error)
    for name, (run, places) in runs.items():
        run.places = places
        yield from incomplete(places, damage[name]) if name in damage else [run]
