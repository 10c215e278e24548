"""Explain the faults that an audit found, with one sentence per likely cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import count
from trainer.forensics.audit.candidates import Candidate
from trainer.forensics.audit.verdicts import DECIDED

MOST = 0.95
"""If at least this fraction of rows has a fault, the fault is reported as affecting all rows."""
SEVERAL = 3
"""Minimum number of faulty rows to suggest that one of several servers is at fault."""


def likely_causes(verdicts: pl.DataFrame, candidates: Sequence[Candidate]) -> list[str]:
    """Return a sentence for each likely cause of faults; causes that affect most rows come first.

    Args:
        verdicts: The verdicts of an audit.
        candidates: The candidates of the audit.
    """
    checked = verdicts.filter(pl.col("kind") != "not_checked")
    found: list[tuple[int, str]] = []
    for kind, explain in _EXPLAINED.items():
        own = checked.filter(pl.col("kind") == kind)
        if len(own):
            found += [(number, text) for number, text in explain(own, checked, candidates)]
    return [text for _, text in sorted(found, key=lambda item: -item[0])]


Found = Iterator[tuple[int, str]]
Explain = Callable[[pl.DataFrame, pl.DataFrame, Sequence[Candidate]], Found]


def _versions(own: pl.DataFrame, checked: pl.DataFrame, candidates: Sequence[Candidate]) -> Found:
    """Explain rows that were not sampled by the weights in their label."""
    pairs = own.group_by("labelled_version", "best_version", "best_weights").len()
    pairs = pairs.sort("labelled_version", "best_version", nulls_last=True)
    totals = dict(checked.group_by("labelled_version").len().iter_rows())
    behind: dict[int, list[tuple[int, int, int]]] = {}
    adapters = {str(one.path): one for one in candidates}
    for labelled, best, path, number in pairs.iter_rows():
        total = totals[labelled]
        if best is None:
            named = adapters[path].name
            yield number, f"{_rows(number, total)} labelled {labelled} were sampled by {named}."
        elif labelled is not None:
            behind.setdefault(best, []).append((labelled, number, total))
    shifts = {labelled - best for best, each in behind.items() for labelled, _, _ in each}
    whole = all(number >= MOST * total for each in behind.values() for _, number, total in each)
    num_labels = sum(len(each) for each in behind.values())
    if len(shifts) == 1 and whole and num_labels > 1:
        shift, number = next(iter(shifts)), sum(n for each in behind.values() for _, n, _ in each)
        side = "above" if shift > 0 else "below"
        yield (
            number,
            (
                f"Labels are {abs(shift)} {side} the version that sampled the row, in all"
                f" {count(number, 'row')} of {count(num_labels, 'label')}: labels are read at"
                " the wrong time, or start at a different number."
            ),
        )
        return
    for best, each in behind.items():
        yield from _stuck_at(best, each, candidates)


def _stuck_at(
    best: int, each: Sequence[tuple[int, int, int]], candidates: Sequence[Candidate]
) -> Found:
    """Explain rows that a single version sampled although they have different labels."""
    number, total = sum(n for _, n, _ in each), sum(t for _, _, t in each)
    labels = sorted(label for label, _, _ in each)
    named = str(labels[0]) if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
    text = f"{_rows(number, total)} labelled {named} were sampled by version {best}: "
    is_adapter = any(one.version in labels and one.base is not None for one in candidates)
    later = [label for label in labels if label > best]
    if number >= MOST * total and later:
        cause = "new weights were not loaded into the engine"
        cause = "the engine kept an old adapter, or none" if is_adapter else cause
        yield number, f"{text}{cause}."
    elif later:
        one = "one of several servers" if number >= SEVERAL else "a server"
        kept = "has a stuck adapter" if is_adapter else "is stale"
        yield number, f"{text}{one} {kept}, or these calls began before the weights were loaded."
    else:
        yield number, f"{text}new weights were loaded before the label changed."


def _rows(number: int, total: int) -> str:
    return f"All {count(number, 'span')}" if number >= total else f"{number:,} of {total:,} spans"


def _median(values: pl.Series) -> float:
    return float(np.median(values.to_numpy()))


def _swaps(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    pairs = own.group_by("best_version", "second_version").len().sort("len", descending=True)
    for first, second, number in pairs.iter_rows():
        yield (
            number,
            (
                f"In {count(number, 'span')}, weights changed from version {first} to {second} during"
                " the response: the engine loaded weights without waiting for running calls"
                ' (weight_sync = "wait" avoids this).'
            ),
        )


def _temperatures(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    for (labelled,), part in own.group_by("labelled_temperature", maintain_order=True):
        middle = _median(part["best_temperature"])
        if labelled is None:
            yield len(part), _unrecorded(part, f"temperature {middle:.2g}")
            continue
        yield (
            len(part),
            (
                f"{count(len(part), 'span')} labelled with temperature {labelled:.3g} fit temperature"
                f" {middle:.2f} (the median): the engine used a default, or another request's setting."
            ),
        )


def _unrecorded(part: pl.DataFrame, setting: str) -> str:
    return (
        f"{count(len(part), 'span')} do not record how they were sampled, and fit the model's"
        f" generation_config.json ({setting}): write its temperature, top_p and top_k to the rows."
    )


def _truncations(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    settings = own.select(
        pl.when(pl.col("best_top_p") < 1)
        .then(pl.format("top_p {}", pl.col("best_top_p").round(2)))
        .when(pl.col("best_top_k") > 0)
        .then(pl.format("top_k {}", "best_top_k"))
        .when(pl.col("best_min_p") > 0)
        .then(pl.format("min_p {}", pl.col("best_min_p").round(2)))
        .otherwise(pl.lit("no truncation"))
        .alias("setting")
    )
    common = settings["setting"].value_counts(sort=True).row(0)
    text = (
        f"{count(len(own), 'span')} fit a different truncation than labelled, most often"
        f" {common[0]}: the engine added a default, such as one from the model's"
        " generation_config.json."
    )
    yield len(own), text


def _offsets(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    for (offset,), part in own.group_by("offset", maintain_order=True):
        side, by = ("next" if offset > 0 else "previous"), abs(offset)
        tokens = (
            f"the {side} token"
            if by == 1
            else f"the token {by} positions {'later' if offset > 0 else 'earlier'}"
        )
        yield (
            len(part),
            (
                f"In {count(len(part), 'span')}, each log-probability belongs to {tokens}: the list is"
                " shifted against response_ids, by a token that was dropped or added."
            ),
        )


def _modes(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    is_raw = own["kind"][0] == "raw_logprobs"
    found, expected = ("raw", "processed") if is_raw else ("processed", "raw")
    text = (
        f"{count(len(own), 'span')} have {found} log-probabilities instead of {expected} ones: a"
        f" server runs with --logprobs-mode {found}_logprobs."
    )
    yield len(own), text


def _noise(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    factor = _median(own["noise_scale"])
    text = (
        f"{count(len(own), 'span')} fit their weights with {factor:.1f} times the noise of the other"
        " spans (the median): a server runs in a lower precision, such as 8 bits or fewer."
    )
    yield len(own), text


def _prompts(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    common = own["reason"].value_counts(sort=True).row(0)[0]
    text = (
        f"{count(len(own), 'span')} fit a prompt that was rendered differently ({common}): the"
        " engine did not receive the stored prompt."
    )
    yield len(own), text


def _unknown(own: pl.DataFrame, _: pl.DataFrame, __: Sequence[Candidate]) -> Found:
    text = (
        f"{count(len(own), 'span')} fit none of the candidates: they were sampled by another model or"
        " in another precision, or the engine received a different prompt."
    )
    yield len(own), text


_EXPLAINED: dict[str, Explain] = {
    "version": _versions,
    "swap": _swaps,
    "temperature": _temperatures,
    "truncation": _truncations,
    "raw_logprobs": _modes,
    "processed_logprobs": _modes,
    "offset": _offsets,
    "noise": _noise,
    "prompt": _prompts,
    "unknown_model": _unknown,
}


def describe(one: dict[str, Any]) -> str:
    """Describe the fault of a span in a few words.

    Example:
        >>> describe({"kind": "version", "best_version": 3, "labelled_version": 5})
        'sampled by version 3, labelled 5'
    """
    kind, labelled = one["kind"], one["labelled_version"]
    if kind == "version":
        best = one["best_version"]
        named = one["best_weights"] if best is None else f"version {best}"
        if one.get("next_version") not in {None, labelled} and one["margin"] < DECIDED:
            named = f"{named} or {one['next_version']}, which fit equally well"
        return f"sampled by {named}, labelled {labelled}"
    if kind == "swap":
        return (
            f"version {one['best_version']}, from token {one['swap_position']} version"
            f" {one['second_version']}, labelled {labelled}"
        )
    if kind == "temperature":
        labelled = one["labelled_temperature"]
        label = "not recorded" if labelled is None else f"labelled {labelled:.2f}"
        return f"temperature {one['best_temperature']:.2f}, {label}"
    if kind == "offset":
        return f"shifted by {one['offset']:+d}"
    if kind == "truncation":
        on = {
            "top_p": one["best_top_p"] < 1 and round(one["best_top_p"], 2),
            "top_k": one["best_top_k"] > 0 and one["best_top_k"],
            "min_p": one["best_min_p"] > 0 and round(one["best_min_p"], 2),
        }
        return ", ".join(f"{name} {value}" for name, value in on.items() if value) or "none"
    if kind == "prompt":
        return str(one["reason"])
    difference = f"{one['mean_difference']:.2g} nats from version {one['best_version']}"
    if kind == "unknown_model":
        return difference
    if one.get("reason"):
        difference = f"{difference} with {one['reason']}"
    return f"{difference}, {one['noise_scale']:.1f} x the noise"
