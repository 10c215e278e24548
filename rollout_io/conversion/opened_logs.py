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
from rollout_io.formats.engines.files import Start
from rollout_io.formats.parsing.records import close_files
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
        return [one for log in self.logs for one in log.inputs]


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
    is_auto, named = format_name == AUTO, [shown(path) for path in paths]
    adapters = load_formats().adapters if is_auto else {format_name: find_adapter(format_name)}
    if paths_of_fields is not None:
        find = partial(mapped.find, paths=paths_of_fields)
        adapter = replace(adapters[MAPPED], find=find, recognizes=lambda start: start.is_file)
        adapters = {MAPPED: adapter}
    formats_of = cache(partial(_formats_of, adapters=adapters))
    inputs, unread = open_inputs(paths, spool, formats_of, ignored, tell)
    if unread and strict and not skips:
        finding = (
            "the entry is a pipe, a device, or a symlink whose target is missing, hidden, ignored"
            " or outside the directory"
        )
        hint = "pass its target too, or remove it"
        raise InputError("input_file", unread[0], finding, "", hint)
    by_name = {one.name: one for one in inputs}
    if is_auto:
        refuse_unknown_only(named, by_name, adapters)
        files = {name: log.path for name, log in by_name.items()}
        in_named = [name for name in by_name if name in named]
        names, foreign = sort_by_format(files, adapters, in_named, tell)
    else:
        names, foreign = _of_one_format(format_name, by_name, adapters, named, skips=skips)
    exports = [] if strict else _exports_beside_logs(names, by_name, adapters, named)
    if foreign and strict and is_auto and not skips:
        raise unknown_format(foreign[0], adapters)
    unused = [_foreign(by_name[name]) for name in foreign] if strict or not is_auto else []
    logs = [
        Log(f, adapters[f], [by_name[name] for name in of_format if name not in exports])
        for f, of_format in names.items()
    ]
    unused += _without_copies(logs, skips=skips)
    logs = [log for log in logs if log.inputs]
    return Opened(logs, [*([] if strict or not is_auto else foreign), *exports, *unread], unused)


def _of_one_format(
    format_name: str,
    inputs: Mapping[str, Input],
    adapters: Mapping[str, Adapter],
    named: Collection[str],
    *,
    skips: bool,
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of a chosen format by its name; with `skips`, files that are no logs apart."""
    if not skips:
        for log in (log for name, log in inputs.items() if name in named):
            error = log.path.is_file() and pickle_error(log.name, log.path)
            if error and not adapters[format_name].recognizes(Start(log.path)):
                raise error
        return {format_name: list(inputs)}, []
    logs = [n for n, log in inputs.items() if n in named or _is_log(log.path, adapters)]
    foreign = [name for name in inputs if logs and name not in logs]
    return {format_name: logs or list(inputs)}, foreign


def _without_copies(logs: Sequence[Log], *, skips: bool) -> list[Rejected]:
    """Remove inputs that are copies of others, and return them; without `skips`, refuse them."""
    unused = []
    for copy, error in copies_in([one for log in logs for one in log.inputs]):
        if not skips:
            raise error
        unused.append(Rejected(_whole(copy), error))
        for log in logs:
            log.inputs[:] = [one for one in log.inputs if one is not copy]
    return unused


def _exports_beside_logs(
    names: Mapping[str, Sequence[str]],
    inputs: Mapping[str, Input],
    adapters: Mapping[str, Adapter],
    named: Collection[str],
) -> list[str]:
    """Return the exports (`Adapter.is_export`) inside directories that also contain logs."""
    exports = [
        name
        for format_name, format_names in names.items()
        if (is_export := adapters[format_name].is_export) is not None
        for name in format_names
        if name not in named and inputs[name].path.is_file() and is_export(inputs[name].path)
    ]
    return exports if sum(map(len, names.values())) > len(exports) else []


def refuse_unknown_only(
    paths: Sequence[str], inputs: Mapping[str, Input], adapters: Mapping[str, Adapter]
) -> None:
    """Check that directories, if they are the only inputs, contain at least one log."""
    if any(name in paths or _is_log(log.path, adapters) for name, log in inputs.items()):
        return
    where, finding = ", ".join(paths), "no file is in a format that rollouts can read"
    first = next(iter(inputs))
    message = f"{where}: {finding} (found {count(len(inputs), 'file')}, the first is {first})"
    clue = explanation(first, inputs[first].path, adapters)
    hint = f"{clue.sentence.removesuffix('.')}; {clue.hint}" if clue else HINT
    raise InputError(RULE, where, finding, "", hint, message=message)


def _formats_of(path: Path, adapters: Mapping[str, Adapter]) -> list[str]:
    try:
        return recognize(path, adapters)
    except RolloutError:
        return []  # reported when the file is opened


def _is_log(path: Path, adapters: Mapping[str, Adapter]) -> bool:
    try:
        return bool(recognize(path, adapters))
    except RolloutError:
        return True  # a damaged log: keep it, so that its own error is reported


def _foreign(log: Input) -> Rejected:
    finding = "the content matches no known format"
    message = f"{log.name} is in no format that rollouts can read"
    error = InputError(RULE, log.name, finding, "", HINT, message=message)
    return Rejected(_whole(log), error)


def _whole(log: Input) -> Place:
    return Place(log.path, log.name, 0, log.path.stat().st_size)
