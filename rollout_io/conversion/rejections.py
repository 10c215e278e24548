"""Rejected records as lines of `DS.rejected.jsonl`, each with location, error and content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rollout_io.conversion.inputs import DUPLICATE_INPUT
from rollout_io.conversion.text import NO_TOKENS, TextAlone
from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import Rejected, Run
from rollout_io.formats.detect import adapters
from rollout_io.formats.parsing.jsonl import WrongType
from rollout_io.formats.parsing.records import DUPLICATE, INCOMPLETE, natural_key
from schemas import errors
from schemas.errors import InputError, RolloutError

Reason = dict[str, Any]
"""A broken rule: `rule`, `num_records`, `first` (its first error), `hint`."""

DUPLICATES = frozenset({DUPLICATE, DUPLICATE_INPUT})
_BRIEF = 72  # maximum length of a reason in a list of reasons
_MOST_RULES = 4
_TOLD_BYTES = 64 << 20  # longer records are not copied


def encoded(value: Any) -> Any:
    """Return a path or an error as JSON, for msgspec."""
    return errors.encode(value) if isinstance(value, RolloutError) else str(value)


def decoded(kind: type, value: Any) -> Any:
    """Return the path or error that `encoded` wrote, for msgspec."""
    return errors.decode(value) if issubclass(kind, RolloutError) else Path(value)


def of_run(run: Run, error: RolloutError) -> Iterator[Rejected]:
    """Reject all records of a run: the faulty record with `error`, the others as incomplete."""
    where = f"{error.where},"
    guilty = {place for place in run.places if where.startswith(f"{place.where},")}
    for place in run.places:
        if guilty and place not in guilty:
            finding = f"a different record of this run was rejected ({error.rule}: {error.where})"
            yield Rejected(place, InputError(INCOMPLETE, place.where, finding, "", error.hint))
        else:
            yield Rejected(place, error, "text" if isinstance(error, TextAlone) else "record")


def lines(rejections: Iterable[Rejected]) -> Iterator[bytes]:
    r"""Yield the lines of `DS.rejected.jsonl`.

    `source` is the location of the record, `where` is the location of the error, and `record` is
    the text of the record, with bytes that are not UTF-8 written as `\xNN`. `record` is null if the
    record is not a range of bytes (a directory, or part of a document) or is longer than 64 MiB.
    """
    for place, error, _ in rejections:
        text = None
        if place.offset is not None and place.num_bytes <= _TOLD_BYTES:
            with open_input(place.path) as file:
                file.seek(place.offset)
                text = file.read(place.num_bytes).decode(errors="backslashreplace")
        yield msgspec.json.encode({"source": place.where, **error.fields(), "record": text}) + b"\n"


def fail(
    rejected: Sequence[Rejected], num_runs: int, noun: str, *, num_usable: int = 0
) -> NoReturn:
    """Raise the error that rejects the most records; one error for all runs without token ids."""
    weights = Counter(one.error.hint for one in rejected)
    causes = [one for one in rejected if one.error.rule != INCOMPLETE] or rejected
    main = max(causes, key=lambda one: weights[one.error.hint])
    rejected = [main, *(one for one in rejected if one is not main)]
    skip = "or pass --on-error skip to leave such records out and convert "
    skip = f"{skip}{errors.count(num_usable, 'trajectory')}" if num_usable else ""
    alone = list({one.error.where: one for one in rejected if one.kind == "text"}.values())
    if len(alone) < 2:
        raise_first([one.error for one in rejected], _counted(rejected), skip)
    others = [e for e in rejected if e.kind != "text" and e.error.rule != INCOMPLETE]
    first = alone[0].error
    message = f"{len(alone)} of {errors.count(num_runs, noun)} have text but no token ids"
    if others:
        reasons = reasons_of([one.error for one in others])
        message += f" (and {_counted([alone[0], *others])} rejected: {reasons})"
    hint = "; ".join(filter(None, (first.hint, skip)))
    raise InputError(NO_TOKENS, first.where, first.got, "", hint, message=message)


def raise_first(
    faults: Sequence[RolloutError], more: str | None = None, hint: str = ""
) -> NoReturn:
    """Raise the first error, and count the other rejected records by rule in its message.

    Args:
        faults: One error per rejected record; at least one.
        more: The number of other rejected records as text; None: it is that of the errors.
        hint: Text to append to the hint of the first error.
    """
    first = faults[0].changed(hint="; ".join(filter(None, (faults[0].hint, hint))) or None)
    if faults[1:]:
        more = errors.count(len(faults) - 1, "more record") if more is None else more
        first.message = f"{first.sentence[:-1]} (and {more} rejected: {reasons_of(faults[1:])})."
    raise first


def reasons_of(faults: Sequence[RolloutError]) -> str:
    """Summarise errors: the count of each rule, with a short reason from its first error.

    Example:
        >>> reasons_of([InputError("json_line", "a:3", "an open bracket")] * 2)
        '2 [json_line] an open bracket'
    """
    by_rule: dict[str, list[RolloutError]] = {}
    for error in faults:
        by_rule.setdefault(error.rule, []).append(error)
    ordered = sorted(by_rule.items(), key=lambda item: -len(item[1]))
    texts = [f"{len(same):,} [{rule}] {_brief(same[0])}" for rule, same in ordered[:_MOST_RULES]]
    if len(ordered) > _MOST_RULES:
        texts.append(f"{sum(len(same) for _, same in ordered[_MOST_RULES:]):,} for other reasons")
    return "; ".join(texts)


def _brief(error: RolloutError) -> str:
    """Return the reason of an error, shortened and without its location."""
    return errors.shortened(" ".join(errors.cleaned(error.got).split()) or error.sentence, _BRIEF)


def _counted(rejected: Sequence[Rejected]) -> str:
    """Count the rejected records after the first, as text: "2 more records and 48 rewards"."""
    first, *others = [one.kind == "reward" for one in rejected]
    words = []
    for is_reward, noun in ((False, "record"), (True, "reward")):
        if number := others.count(is_reward):
            words.append(errors.count(number, f"more {noun}" if is_reward == first else noun))
    return " and ".join(words)


def pointed(error: RolloutError, format_name: str) -> RolloutError:
    """If the hint refers to docs/formats.md, make it refer to the page of a format of ours."""
    if not isinstance(error, WrongType):
        return error
    entry = adapters().get(format_name)
    return error.of(format_name) if entry and entry.value.startswith("rollout_io.") else error


def reasons(rejected: Iterable[Rejected]) -> list[Reason]:
    """Return each broken rule with its hint, its number of records and its first error.

    Those that reject the most records, with the rest of the runs, come first, and errors caused by
    other errors last. `first` is the error at the first file and line.
    """
    errors = (one.error for one in rejected)
    return merged(
        [{"rule": e.rule, "num_records": 1, "first": e.sentence, "hint": e.hint} for e in errors]
    )


def merged(reasons: Iterable[Reason]) -> list[Reason]:
    """Combine the reasons from several parts of the logs, the most frequent first."""
    combined, weights = dict[tuple[str, str | None], Reason](), Counter[str | None]()
    for reason in reasons:
        key = reason["rule"], reason["hint"]
        total = combined.setdefault(key, {**reason, "num_records": 0})
        total["num_records"] += reason["num_records"]
        total["first"] = min(total["first"], reason["first"], key=natural_key)
        weights[reason["hint"]] += reason["num_records"]
    ordered = combined.values()
    return sorted(ordered, key=lambda r: (r["rule"] == INCOMPLETE, -weights[r["hint"]]))
