"""Registered formats, and detection of a log's format from its content.

Formats are entry points of the group `rollout_io.formats`, each an `Adapter`. If one fails to load,
the others are still available, and the error is reported. Formats that are detected only so that
the error can suggest an alternative are in `rollout_io.formats.unrecognized`. Inputs that match no format
are explained: empty files, pickles, and parts of a Harbor job.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_io.dataset.opening import open_input, refuse_irregular
from rollout_io.formats.base import Adapter
from rollout_io.formats.engines.files import Start
from rollout_io.formats.grammar import Coverage
from rollout_io.formats.parsing.jsonl import read_document, refuse_lfs_pointer
from rollout_io.formats.unrecognized import REFUSED, damage_in, look
from rollout_io.plugins import Plugin, plugins
from schemas.errors import ConfigError, InputError, RolloutError

GROUP = "rollout_io.formats"
RULE = "known_format"
HINT = "list the formats with `rollouts formats`; pass --format NAME to see why it does not match"

_LFS_BYTES = 1024  # maximum size of a Git LFS pointer, according to the specification


class Formats(NamedTuple):
    """The installed formats."""

    adapters: dict[str, Adapter]
    failures: dict[str, str]


def adapters() -> dict[str, Plugin]:
    """Return the registered formats by name, in alphabetical order, without importing them."""
    entries = sorted(plugins(GROUP), key=lambda entry: entry.name)
    return {entry.name: entry for entry in entries if entry.name not in REFUSED}


def load_formats(entries: Mapping[str, Plugin] | None = None) -> Formats:
    """Import all formats."""
    formats = Formats({} if entries is not None else dict(REFUSED), {})
    for name, entry in (adapters() if entries is None else entries).items():
        try:
            formats.adapters[name] = load_adapter(entry)
        except RolloutError as error:
            formats.failures[name] = error.got
    return formats._replace(adapters=dict(sorted(formats.adapters.items())))


def load_adapter(entry: Plugin) -> Adapter:
    """Import one format."""
    where, hint = f"format {entry.name} ({entry.value})", "reinstall its package, or remove it"
    try:
        adapter = entry.load()
    except Exception as error:
        finding = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{where} cannot be imported: {finding}"
        raise InputError("format_loads", where, finding, hint=hint, message=message) from error
    if not isinstance(adapter, Adapter):
        finding = f"an object of type {type(adapter).__name__}"
        raise InputError("format_loads", where, finding, "an Adapter", hint)
    return adapter


def find_adapter(name: str) -> Adapter:
    """Return the adapter that is registered under a name."""
    entries = adapters()
    if name in REFUSED:
        return REFUSED[name]
    if name not in entries:
        names = sorted({*entries, *REFUSED})
        expected = "one of " + ", ".join(names)
        near = difflib.get_close_matches(name, names, 1)
        hint = f"use --format {near[0]}" if near else "list the formats with `rollouts formats`"
        message = f"--format {name}: the format is unknown; choose {expected}"
        raise ConfigError(RULE, "--format", repr(name), expected, hint, message=message)
    return load_adapter(entries[name])


def recognize(path: str | Path, formats: Mapping[str, Adapter]) -> list[str]:
    """Return the names of all formats that a file or directory matches."""
    path = Path(path)
    if not path.is_dir():
        refuse_irregular(path)
        with open_input(path) as file:
            refuse_lfs_pointer(file.read(_LFS_BYTES), str(path))
    return [match.format for match in matches(path, formats) if match.is_best]


class Match(NamedTuple):
    """A format that recognizes a file.

    Attributes:
        coverage: How many keys of the file's first records it knows; None if the format does not
            declare its keys.
        is_best: False if another format knows more of them.
    """

    format: str
    coverage: Coverage | None
    is_best: bool


def matches(path: Path, formats: Mapping[str, Adapter]) -> list[Match]:
    """Return the formats that recognize an existing file or directory, and what they know of it."""
    start = Start(path)
    recognizing = {name: adapter for name, adapter in formats.items() if adapter.recognizes(start)}
    special = {name: adapter for name, adapter in recognizing.items() if not adapter.is_general}
    recognizing = special or recognizing
    declared = [a.contents for a in recognizing.values() if a.contents is not None]
    records = [*start.records] if declared else []
    coverages = {
        n: None if a.contents is None else a.contents.coverage(records)
        for n, a in recognizing.items()
    }
    best = max((one.share for one in coverages.values() if one is not None), default=0.0)
    return [Match(name, c, c is None or c.share >= best) for name, c in coverages.items()]


Tell = Callable[[str, RolloutError | None], object]
"""Called with the name of each input once its format is known, or with the error that leaves it out."""


def sort_by_format(
    paths: Mapping[str, Path],
    formats: Mapping[str, Adapter],
    named: Collection[str],
    tell: Tell | None = None,
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the inputs of each format, in order, and the inputs that match no format.

    An input that matches several formats is assigned to the format that all inputs match, or else
    to a format that another input matches exclusively. Inputs that are `named` must match one. `tell`
    is called with each input, and with the errors of single inputs that are not named.
    """
    matches: dict[str, list[str]] = {}
    for name, path in paths.items():
        with told(name, None if name in named else tell):
            matches[name] = recognize(path, formats)
            if tell is not None:
                tell(name, None)
    unmatched = [name for name, names in matches.items() if not names]
    unreadable = unmatched if len(unmatched) == len(paths) else [n for n in unmatched if n in named]
    for unknown in unreadable[:1]:
        raise explanation(unknown, paths[unknown], formats) or unknown_format(unknown, formats)
    matched = {name: names for name, names in matches.items() if names}
    common = [name for name in formats if all(name in names for names in matched.values())]
    alone = [names[0] for names in matched.values() if len(names) == 1]
    sure = common if len(common) == 1 else alone
    inputs: dict[str, list[str]] = {}
    for name, names in matched.items():
        chosen = [one for one in names if one in sure] if len(names) > 1 else names
        with told(name, None if name in named else tell):
            if len(chosen) != 1:
                finding = f"the content matches {len(names)} formats: " + ", ".join(names)
                hint = f"choose one, such as --format {names[0]}; `rollouts formats` describes them"
                raise InputError(RULE, name, finding, hint=hint)
            inputs.setdefault(chosen[0], []).append(name)
    return inputs, unmatched


@contextmanager
def told(name: str, tell: Tell | None) -> Iterator[None]:
    """Pass an error of an input to `tell`, if there is one, instead of raising it."""
    try:
        yield
    except RolloutError as error:
        if tell is None:
            raise
        tell(name, error)


def unknown_format(name: str, formats: Mapping[str, Adapter]) -> InputError:
    """Return the error for an input that matches no format."""
    finding, expected = "the format is not recognized", "one of " + ", ".join(formats)
    message = f"{name}: {finding}; rollouts reads {', '.join(formats)}"
    return InputError(RULE, name, finding, expected, HINT, message=message)


def explanation(name: str, path: Path, formats: Mapping[str, Adapter]) -> InputError | None:
    """Return an error that explains why an input matches no format; None if the cause is unknown."""
    readable = {name: adapter for name, adapter in formats.items() if name not in REFUSED}

    def formats_of(copy: Path) -> list[str]:
        return [match.format for match in matches(copy, readable) if match.is_best]

    try:
        damage = damage_in(name, path, formats_of) if path.is_file() else None
    except (OSError, RolloutError):
        damage = None
    return explained(name, path) or _mappable(name, path) or _nearest(name, path, formats) or damage


def _mappable(name: str, path: Path) -> InputError | None:
    """Return the error for a file with bodies of model calls, which `--map` can read."""
    seen = look(Start(path))
    if seen is None:
        return None
    finding = f"the format is not recognized; it looks like {seen[0]}"
    hint = f"pass --map {seen[1]}" if seen[1] else "log the requests too"
    return InputError(RULE, name, finding, hint=hint)


def _nearest(name: str, path: Path, formats: Mapping[str, Adapter]) -> InputError | None:
    """Return the error for a file whose first line lacks one of the keys that identify a format."""
    keys: dict[str, Any] = next(Start(path).records, {})
    candidates: list[tuple[int, str, str]] = []
    for format_name, adapter in formats.items():
        fields = msgspec.structs.fields(adapter.line) if adapter.line else ()
        required = {field.encode_name for field in fields if field.required}
        missing = required - keys.keys()
        if len(missing) == 1 and len(required) > 2:
            candidates.append((-len(required), format_name, missing.pop()))
    if not candidates:
        return None
    _, nearest, missing_key = min(candidates)
    finding = f"the format is not recognized; the first line has all keys of the format {nearest}"
    finding += f" but {missing_key!r}"
    near = difflib.get_close_matches(missing_key, keys, 1)
    hint = f"did you mean {missing_key!r}, not {near[0]!r}?" if near else f"add {missing_key!r}"
    hint += f" See docs/formats/{nearest}.md" if near else f": see docs/formats/{nearest}.md"
    return InputError(RULE, name, finding, "", hint)


PICKLE_HINT = """\
if it contains SkyRL's GeneratorOutput, write a dataset in the program that has this object:
  import rollout_io
  table = rollout_io.from_generator_output(output)
  with rollout_io.RolloutWriter("rollouts/") as writer:
      writer.write(table)
otherwise, write your data as JSON Lines in one of the formats of `rollouts formats`"""
_PROTOCOLS = tuple(bytes([0x80, number]) for number in range(2, 6))


class _HarborConfig(msgspec.Struct, gc=False):
    trial_name: str | None = None
    trials_dir: str | None = None
    job_name: str | None = None
    jobs_dir: str | None = None


_HARBOR = msgspec.json.Decoder(_HarborConfig)


def explained(name: str, path: Path) -> InputError | None:
    """Return the error for an input of a known kind that is not a log; None for unknown content."""
    start = Start(path)
    if not start.is_file:
        return None
    if path.stat().st_size == 0:
        return empty_file(name)
    return pickle_error(name, path) or _harbor_config(name, path)


def empty_file(name: str) -> InputError:
    """Return the error for an empty file."""
    hint = "check that the program that writes the file has finished"
    return InputError("input_file", name, "the file is empty", "", hint)


def pickle_error(name: str, path: Path) -> InputError | None:
    """Return the error for a pickle or a file of torch.save, recognised by its first bytes."""
    start = Start(path)
    if start.head.startswith(_PROTOCOLS):
        finding = "the file is a pickle, which could run code, so it is never loaded"
    elif start.torch_pickle:
        finding = "the file was written by torch.save: it is a pickle, which could run code, so it is never loaded"
    else:
        return None
    return InputError("pickle", name, finding, hint=PICKLE_HINT)


def _harbor_config(name: str, path: Path) -> InputError | None:
    """Return the error for the `config.json` of a Harbor trial or job."""
    try:
        config = read_document(_HARBOR, path)[0]
    except RolloutError:
        return None
    above = f"{name.rpartition('/')[0] or '.'}/"
    if config.trial_name and config.trials_dir:
        finding = "the file is the configuration of a Harbor trial, not its result"
        hint = f"pass the trial directory ({above}), or its result.json"
    elif config.job_name and config.jobs_dir:
        finding = "the file is the configuration of a Harbor job, not its result"
        hint = f"pass the job directory ({above})"
    else:
        return None
    return InputError("harbor_input", name, finding, hint=hint)
