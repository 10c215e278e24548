"""Logs: the inputs of a conversion, sorted by format."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from rollout_io.conversion.inputs import copies_in, open_inputs
from rollout_io.conversion.rejections import pointed
from rollout_io.conversion.remote import named_found, shown
from rollout_io.formats import mapped
from rollout_io.formats.base import Adapter, Found, Input, Place, Progress, Rejected
from rollout_io.formats.detect import (
    HINT,
    RULE,
    Tell,
    explanation,
    find_adapter,
    load_formats,
    pickle_error,
    recognize,
    sort_by_format,
    unknown_format,
)
from rollout_io.formats.parsing.lines import close_files
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError, count

AUTO, MAPPED = "auto", "calls"


class Log(NamedTuple):
    """All inputs in one format."""

    format: str
    adapter: Adapter
    inputs: list[Input]

    def find(self, progress: Progress, spool: Path) -> Iterator[Found]:
        """Yield the adapter's findings, with paths of copies in `spool` replaced by their URLs."""
        close_files()
        for item in named_found(self.adapter.find(self.inputs, progress), spool):
            if isinstance(item, Rejected):
                yield item._replace(error=pointed(item.error, self.format))
            else:
                yield item


class Opened(NamedTuple):
    """The inputs of a conversion: a log per format, in the order of their first files.

    Attributes:
        left: Names of skipped entries of directories, such as files that match no format.
        unused: Rejected inputs: copies, and files that match no format unless they are `left`.
    """

    logs: list[Log]
    left: Sequence[str] = ()
    unused: Sequence[Rejected] = ()

    @property
    def noun(self) -> str:
        """Noun for a run, such as "session"; "run" if the formats use different nouns."""
        nouns = {log.adapter.noun for log in self.logs}
        return nouns.pop() if len(nouns) == 1 else "run"

    @property
    def inputs(self) -> list[Input]:
        """The inputs of all logs, in order."""
        return [given for log in self.logs for given in log.inputs]


def open_log(
    paths: Sequence[str],
    format_name: str,
    spool: Path,
    ignored: Collection[str] = (),
    *,
    skips: bool = False,
    strict: bool = False,
    tell: Tell | None = None,
    paths_of_fields: Mapping[str, str] | None = None,
) -> Opened:
    """Open the inputs, and sort them by format if `format_name` is `auto`.

    Files inside directories that match no format are skipped; with `strict` or a chosen format, they are
    errors, as copies are. With `skips`, these are rejected instead. `tell` is called with each input
    once its format is known, and with errors of single files inside directories. With `Options.map`,
    each file is a log of `calls` with these paths.
    """
    if paths_of_fields is not None:
        format_name = MAPPED
    is_auto, given_paths, paths = format_name == AUTO, paths, [shown(path) for path in paths]
    known = load_formats().adapters if is_auto else {format_name: find_adapter(format_name)}
    if paths_of_fields is not None:
        finding = partial(mapped.find, paths=paths_of_fields)
        known = {
            MAPPED: replace(known[MAPPED], find=finding, recognizes=lambda start: start.is_file)
        }
    inputs, unread = open_inputs(
        given_paths, spool, cache(lambda path: _formats_of(path, known)), ignored, tell
    )
    if unread and strict and not skips:
        got = (
            "the entry is a pipe, a device, or a symlink whose target is missing, hidden, ignored"
            " or outside the directory"
        )
        raise InputError("input_file", unread[0], got, "", "pass its target too, or remove it")
    by_name = {given.name: given for given in inputs}
    names, left = {format_name: list(by_name)}, list[str]()
    if is_auto:
        named = [name for name in by_name if name in paths]
        refuse_unknown_only(paths, by_name, known)
        names, left = sort_by_format({n: g.path for n, g in by_name.items()}, known, named, tell)
    elif skips:
        own = [n for n, given in by_name.items() if n in paths or _is_log(given.path, known)]
        left = [name for name in by_name if own and name not in own]
        names = {format_name: own or list(by_name)}
    else:
        _refuse_pickles([given for n, given in by_name.items() if n in paths], known[format_name])
    exports = [] if strict else _exports_beside_logs(names, by_name, known, paths)
    names = {f: [name for name in own if name not in exports] for f, own in names.items()}
    if left and strict and is_auto and not skips:
        raise unknown_format(left[0], known)
    unused = [_foreign(by_name[name]) for name in left] if strict or not is_auto else []
    logs = [Log(n, known[n], [by_name[name] for name in found]) for n, found in names.items()]
    for copy, error in copies_in([given for log in logs for given in log.inputs]):
        if not skips:
            raise error
        unused.append(Rejected(_whole(copy), error))
        for log in logs:
            log.inputs[:] = [given for given in log.inputs if given is not copy]
    logs = [log for log in logs if log.inputs]
    return Opened(logs, [*([] if strict or not is_auto else left), *exports, *unread], unused)


def _exports_beside_logs(
    names: Mapping[str, Sequence[str]],
    inputs: Mapping[str, Input],
    known: Mapping[str, Adapter],
    named: Collection[str],
) -> list[str]:
    """Return the exports (`Adapter.is_export`) inside directories that also contain logs."""
    found = [
        name
        for format_name, own in names.items()
        if (is_export := known[format_name].is_export) is not None
        for name in own
        if name not in named and inputs[name].path.is_file() and is_export(inputs[name].path)
    ]
    return found if sum(map(len, names.values())) > len(found) else []


def _refuse_pickles(named: Sequence[Input], adapter: Adapter) -> None:
    """Reject pickles that the chosen format cannot read, with a clear error."""
    for given in named:
        error = given.path.is_file() and pickle_error(given.name, given.path)
        if error and not adapter.recognizes(Start(given.path)):
            raise error


def refuse_unknown_only(
    paths: Sequence[str], inputs: Mapping[str, Input], known: Mapping[str, Adapter]
) -> None:
    """Check that directories, if they are the only inputs, contain at least one log."""
    if any(name in paths or _is_log(given.path, known) for name, given in inputs.items()):
        return
    where, got = ", ".join(paths), "no file is in a format that rollouts can read"
    first = next(iter(inputs))
    message = f"{where}: {got} (found {count(len(inputs), 'file')}, the first is {first})"
    clue = explanation(first, inputs[first].path, known)
    hint = f"{clue.sentence.removesuffix('.')}; {clue.hint}" if clue else HINT
    raise InputError(RULE, where, got, "", hint, message=message)


def _formats_of(path: Path, known: Mapping[str, Adapter]) -> list[str]:
    try:
        return recognize(path, known)
    except RolloutError:
        return []  # reported when the file is opened


def _is_log(path: Path, known: Mapping[str, Adapter]) -> bool:
    try:
        return bool(recognize(path, known))
    except RolloutError:
        return True  # a damaged log: keep it, so that its own error is reported


def _foreign(given: Input) -> Rejected:
    got = "the content matches no known format"
    message = f"{given.name} is in no format that rollouts can read"
    error = InputError(RULE, given.name, got, "", HINT, message=message)
    return Rejected(_whole(given), error)


def _whole(given: Input) -> Place:
    return Place(given.path, given.name, 0, given.path.stat().st_size)
