"""Explain the faults that an audit found, with one sentence per likely cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from schemas.errors import count
from schemas.forensics import NO_FAULT
from trainer.forensics.audit.candidates import Candidate
from trainer.forensics.audit.judge import DECIDED

MOST = 0.95
"""If at least this fraction of rows has a fault, the fault is reported as affecting all rows."""
SEVERAL = 3
"""Minimum number of faulty rows to suggest that one of several servers is at fault."""
SENTENCES = {
    "swap": "In {spans}, weights changed from version {best_version} to {second_version} during the"
    " response: the engine loaded weights without waiting for running calls (weight_sync ="
    ' "wait" avoids this).',
    "temperature": "{spans} labelled with temperature {labelled_temperature:.3g} fit temperature"
    " {best_temperature:.2f} (the median): the engine used a default, or another request's setting.",
    "unrecorded": "{spans} do not record how they were sampled, and fit the model's"
    " generation_config.json (temperature {best_temperature:.2g}): write its temperature, top_p and"
    " top_k to the rows.",
    "truncation": "{spans} fit a different truncation than labelled, most often {setting}: the"
    " engine added a default, such as one from the model's generation_config.json.",
    "raw_logprobs": "{spans} have raw log-probabilities instead of processed ones: a server runs"
    " with --logprobs-mode raw_logprobs.",
    "processed_logprobs": "{spans} have processed log-probabilities instead of raw ones: a server"
    " runs with --logprobs-mode processed_logprobs.",
    "offset": "In {spans}, each log-probability belongs to {token}: the list is shifted against"
    " response_ids, by a token that was dropped or added.",
    "noise": "{spans} fit their weights with {noise_scale:.1f} times the noise of the other spans"
    " (the median): a server runs in a lower precision, such as 8 bits or fewer.",
    "prompt": "{spans} fit a prompt that was rendered differently ({reason}): the engine did not"
    " receive the stored prompt.",
    "unknown_model": "{spans} fit none of the candidates: they were sampled by another model or in"
    " another precision, or the engine received a different prompt.",
}
"""Sentences about the faults of a kind; fields are the median, or else the most frequent value."""
SPLIT_BY = {
    "swap": ("best_version", "second_version"),
    "temperature": ("labelled_temperature",),
    "offset": ("offset",),
}
"""Columns whose values get a sentence each."""


def likely_causes(verdicts: pl.DataFrame, candidates: Sequence[Candidate]) -> list[str]:
    """Return a sentence for each likely cause of faults; causes that affect most rows come first.

    Args:
        verdicts: The verdicts of an audit.
        candidates: The candidates of the audit.
    """
    checked = verdicts.filter(pl.col("kind") != "not_checked")
    causes = list(_versions(checked, candidates))
    for kind in SENTENCES:
        faults = checked.filter(kind=kind)
        parts = faults.partition_by(SPLIT_BY.get(kind, "kind"), maintain_order=True)
        causes += [(len(part), _sentence(kind, part)) for part in parts]
    return [text for _, text in sorted(causes, key=lambda cause: -cause[0])]


def _sentence(kind: str, part: pl.DataFrame) -> str:
    first = part.row(0, named=True)
    values = first | part.select(pl.col("best_temperature", "noise_scale").median()).row(
        0, named=True
    )
    values["spans"] = count(len(part), "span")
    values["reason"] = part["reason"].value_counts(sort=True).row(0)[0]
    settings = pl.Series(map(truncation_text, part.iter_rows(named=True)))
    values["setting"] = settings.value_counts(sort=True).row(0)[0]
    side, by = ("next" if first["offset"] > 0 else "previous"), abs(first["offset"])
    place = f"{by} positions {'later' if first['offset'] > 0 else 'earlier'}"
    values["token"] = f"the {side} token" if by == 1 else f"the token {place}"
    if kind == "temperature" and first["labelled_temperature"] is None:
        kind = "unrecorded"
    return SENTENCES[kind].format_map(values)


def truncation_text(settings: Mapping[str, Any]) -> str:
    """Describe the truncation that fits best."""
    on = {
        "top_p": settings["best_top_p"] < 1 and round(settings["best_top_p"], 2),
        "top_k": settings["best_top_k"] > 0 and settings["best_top_k"],
        "min_p": settings["best_min_p"] > 0 and round(settings["best_min_p"], 2),
    }
    return ", ".join(f"{name} {value}" for name, value in on.items() if value) or "no truncation"


def _versions(checked: pl.DataFrame, candidates: Sequence[Candidate]) -> Iterator[tuple[int, str]]:
    """Explain rows that were not sampled by the weights in their label."""
    totals = dict(checked.group_by("labelled_version").len().iter_rows())
    pairs = checked.filter(kind="version").group_by(
        "labelled_version", "best_version", "best_weights"
    )
    names = {str(one.path): one.name for one in candidates}
    by_version: dict[int, dict[int, int]] = {}
    for labelled, best, path, number in pairs.len().sort(pl.all(), nulls_last=True).iter_rows():
        if best is None:
            rows = _spans(number, totals[labelled])
            yield number, f"{rows} labelled {labelled} were sampled by {names[path]}."
        elif labelled is not None:
            by_version.setdefault(best, {})[labelled] = number
    shifts = {label - best for best, numbers in by_version.items() for label in numbers}
    numbers = {label: n for part in by_version.values() for label, n in part.items()}
    is_whole = all(number >= MOST * totals[label] for label, number in numbers.items())
    if len(shifts) == 1 and is_whole and len(numbers) > 1:
        (shift,), number = shifts, sum(numbers.values())
        side = "above" if shift > 0 else "below"
        text = f"Labels are {abs(shift)} {side} the version that sampled the row, in all"
        text += f" {count(number, 'row')} of {count(len(numbers), 'label')}: labels are read at"
        yield number, f"{text} the wrong time, or start at a different number."
        return
    for best, labels in by_version.items():
        number, total = sum(labels.values()), sum(totals[label] for label in labels)
        first, last = min(labels), max(labels)
        named = str(first) if first == last else f"{first} to {last}"
        is_adapter = any(one.version in labels and one.base is not None for one in candidates)
        if last < best:
            cause = "new weights were loaded before the label changed"
        elif number >= MOST * total:
            cause = "new weights were not loaded into the engine"
            cause = "the engine kept an old adapter, or none" if is_adapter else cause
        else:
            cause = "one of several servers" if number >= SEVERAL else "a server"
            cause += " has a stuck adapter" if is_adapter else " is stale"
            cause += ", or these calls began before the weights were loaded"
        text = f"{_spans(number, total)} labelled {named} were sampled by version {best}: {cause}."
        yield number, text


def _spans(number: int, total: int) -> str:
    return f"All {count(number, 'span')}" if number >= total else f"{number:,} of {total:,} spans"


def describe(span: Mapping[str, Any]) -> str | None:
    """Describe the fault of a span in a few words; without a fault, return its `reason`.

    Example:
        >>> describe({"kind": "version", "best_version": 3, "labelled_version": 5})
        'sampled by version 3, labelled 5'
    """
    kind, labelled, best = span["kind"], span.get("labelled_version"), span.get("best_version")
    if kind in NO_FAULT:
        return span.get("reason")
    if kind == "version":
        name = span["best_weights"] if best is None else f"version {best}"
        if span.get("next_version") not in {None, labelled} and span["margin"] < DECIDED:
            name = f"{name} or {span['next_version']}, which fit equally well"
        return f"sampled by {name}, labelled {labelled}"
    if kind == "swap":
        after = f"from token {span['swap_position']} version {span['second_version']}"
        return f"version {best}, {after}, labelled {labelled}"
    if kind == "temperature":
        label = span["labelled_temperature"]
        text = "not recorded" if label is None else f"labelled {label:.2f}"
        return f"temperature {span['best_temperature']:.2f}, {text}"
    if kind == "offset":
        return f"shifted by {span['offset']:+d}"
    if kind == "truncation":
        return truncation_text(span)
    if kind == "prompt":
        return str(span["reason"])
    difference = f"{span['mean_difference']:.2g} nats from version {best}"
    if kind == "unknown_model":
        return difference
    with_cause = f" with {span['reason']}" if span.get("reason") else ""
    return f"{difference}{with_cause}, {span['noise_scale']:.1f} x the noise"
