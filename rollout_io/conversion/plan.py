"""Plan of a conversion: its settings, and its runs, named, ordered and cut into chunks."""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from rollout_io import __version__
from rollout_io.conversion.chunk import Chunk, Settings, cut
from rollout_io.conversion.inputs import PathLike, digests_of
from rollout_io.conversion.joining import Recorded, states_of, with_recorded
from rollout_io.conversion.opened_logs import AUTO, MAPPED, Log, Opened
from rollout_io.conversion.remote import holds_copies, shown
from rollout_io.conversion.rewards import Key, Outcome, by_run
from rollout_io.conversion.staging import Staging
from rollout_io.conversion.text import Retokenizer, retokenizer_of
from rollout_io.dataset.footer import Part
from rollout_io.dataset.opening import digest_of
from rollout_io.formats.base import HAS_TEXT, About, Found, Input, Options, Rejected, Run
from rollout_io.formats.detect import empty_file
from rollout_io.formats.mapped import check_paths
from rollout_io.formats.parsing.records import MODELS
from rollout_io.retokenize.local import find_tokenizer, tokenizer_directory
from schemas.errors import ConfigError, InputError, InvariantError

# Size of the log records of one chunk. An interruption loses at most one chunk per worker.
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 32 << 20, 128 << 20
_NUM_CHUNKS = 16  # with fewer, workers are often idle while the last chunk is converted


@dataclass(slots=True)
class Plan:
    """Runs and rejected records found in the logs."""

    runs: list[Run] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def num_runs(self) -> int:
        """Number of runs in the log, not counting runs that only the rewards file mentions."""
        return sum(bool(run.places) for run in self.runs)

    @property
    def num_records(self) -> int:
        """Number of records found, used or not."""
        return len(self.rejected) + sum(len(run.places) for run in self.runs)


def plan_logs(
    logs: Iterable[Iterable[Found]], outcomes: Mapping[str, Outcome], group_by: Sequence[str] = ()
) -> tuple[list[Plan], dict[Key, Outcome]]:
    """Return a plan for each log of a dataset, and the outcomes by run.

    Runs without a repetition are numbered in order within their instance; with `group_by`, all runs
    are renumbered. A second run with the same name is rejected, as is an outcome without a run. The
    last plan includes the outcomes without a logged run.
    """
    plans, first = [], dict[str, Run]()
    for items in logs:
        planned, runs = Plan(), list[Run]()
        for item in items:
            if isinstance(item, Rejected):
                planned.rejected.append(item)
            elif isinstance(item, About):
                planned.about[item.name] = item.value
            else:
                runs.append(item)
        if group_by:
            runs = list(_regrouped(runs, group_by, planned.rejected))
            planned.about["groups"] = "chosen: --group-by " + ",".join(group_by)
        _number(runs)
        planned.runs = list(_unique(runs, first, planned.rejected))
        plans.append(planned)
    last, keys = plans[-1], {_key(run): run for planned in plans for run in planned.runs}
    resolved, unresolved = by_run(outcomes, keys)
    last.rejected += unresolved
    for key, outcome in resolved.items():
        if key in keys:
            keys[key].rewarded, keys[key].failed = True, outcome.error is not None
        else:
            last.runs.append(Run(instance_id=key[0], repetition_id=key[1], places=()))
    return plans, resolved


def refuse_nothing(plans: Sequence[Plan], inputs: Sequence[Input]) -> None:
    """Check that at least one log has a record."""
    if not any(planned.runs or planned.rejected for planned in plans):
        where = ", ".join(log.name for log in inputs)
        if all(log.path.is_file() and not log.path.stat().st_size for log in inputs):
            raise empty_file(where)
        hint = "check the format of the file: rollouts formats FILE"
        raise InputError("no_calls", where, "the log contains no calls", "", hint)


def chunk_size(num_bytes: int) -> int:
    """Return the number of bytes per chunk, which does not depend on the number of workers."""
    return min(max(num_bytes // _NUM_CHUNKS, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)


def _regrouped(
    runs: Iterable[Run], group_by: Sequence[str], rejected: list[Rejected]
) -> Iterator[Run]:
    for run in runs:
        missing = [name for name in group_by if name not in run.labels]
        if missing:
            where, finding = run.places[0].where, f"the run has no label {missing[0]!r}"
            near = difflib.get_close_matches(missing[0], run.labels, 1)
            hint = "omit --group-by"
            hint += f", or use one of {', '.join(run.labels)}" if run.labels else ""
            hint = f"did you mean {near[0]}? Otherwise {hint}" if near else hint
            error = ConfigError("group_by", where, finding, "", hint)
            rejected += [Rejected(place, error) for place in run.places]
            continue
        run.instance_id = "/".join(run.labels[name] for name in group_by)
        run.repetition_id = None
        yield run


def _number(runs: Sequence[Run]) -> None:
    """Assign free repetition numbers, in order, to the runs that have none."""
    taken = {(run.instance_id, run.repetition_id) for run in runs}
    following: defaultdict[str, Iterator[int]] = defaultdict(count)
    for run in runs:
        if run.repetition_id is None:
            numbers = following[run.instance_id]
            run.repetition_id = next(n for n in numbers if (run.instance_id, n) not in taken)


def _unique(runs: Iterable[Run], first: dict[str, Run], rejected: list[Rejected]) -> Iterator[Run]:
    """Yield the runs whose names are not in `first`, and add them; reject the others."""
    for run in runs:
        name = f"{run.instance_id}_{run.repetition_id}"
        other = first.setdefault(name, run)
        if other is run:
            yield run
            continue
        finding = f"instance {run.instance_id!r}, repetition {run.repetition_id}, also occurs in "
        finding += other.places[0].where
        hint = "convert the logs of each collection to a separate dataset"
        error = InvariantError("unique_trajectory", run.places[0].where, finding, "", hint)
        rejected += [Rejected(place, error) for place in run.places]


def _key(run: Run) -> Key:
    assert run.repetition_id is not None
    return run.instance_id, run.repetition_id


def chunks_of(
    plans: Sequence[Plan],
    outcomes: Mapping[Key, Outcome],
    chunk_bytes: int,
    identity: Mapping[str, Any],
    staging: Staging,
) -> tuple[Part, list[Chunk]]:
    """Cut the runs into chunks; also return the part of the dataset that all have in common."""
    parts = [
        (i, runs) for i, planned in enumerate(plans) for runs in cut(planned.runs, chunk_bytes)
    ]
    every = (run for _, runs in parts for run in runs)
    facts = [[run.instance_id, run.repetition_id, run.num_bytes] for run in every]
    whole = Part.of([identity, facts], num_parts=len(parts))
    return whole, [
        Chunk(
            part=replace(whole, index=i),
            runs=runs,
            outcomes={key: outcomes[key] for key in map(_key, runs) if key in outcomes},
            out=staging.chunk_path(i),
            log=log,
        )
        for i, (log, runs) in enumerate(parts)
    ]


_TOOL = f"rollout-io {__version__}"


class Keywords(TypedDict, total=False):
    """Keywords of `convert` and `read_log`; `Choices` has their meanings."""

    format: str
    rewards: PathLike | None
    reward: str | None
    group_by: str | Sequence[str]
    map: Mapping[str, str] | None
    tokenizer: PathLike | None
    chat_template: PathLike | None
    join: PathLike | None
    layout: Literal["prefix", "full"]
    logprobs_mode: Literal["raw", "processed"] | None
    on_error: Literal["fail", "skip"]
    strict: bool
    timeouts: Literal["fail", "keep"]
    overflows: Literal["zero", "fail", "keep"]
    other_fields: Literal["refuse", "keep", "drop"]
    group_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices(Options):
    """Options of a conversion, as chosen by the user: those below, and those for reading runs.

    Attributes:
        format: Format of the logs; `auto` detects it from their content.
        rewards: JSONL file of outcomes, which replace the outcomes in the logs.
        group_by: Labels that identify the instance (the group), replacing the format's rule.
        tokenizer: Tokenizer to re-tokenize text and to check exact tokens: a local directory, or
            the Hub id of a model in the local Hugging Face cache.
        chat_template: Name or file of the template for re-tokenization; None uses the tokenizer's.
        join: Dataset or log of the calls that were recorded of the runs, with exact tokens; None if
            there is none.
        layout: Store prompts as references to earlier steps (`prefix`), or in full (`full`).
        on_error: Whether invalid records stop the conversion (`fail`) or are rejected (`skip`).
        strict: If true, files inside directories that match no format are invalid records, and so
            are runs with content that is neither read nor left out on purpose; if false, the files
            are skipped, and the content is counted.
    """

    format: str = AUTO
    rewards: str | None = None
    group_by: tuple[str, ...] = ()
    tokenizer: str | None = None
    chat_template: str | None = None
    join: str | None = None
    layout: Literal["prefix", "full"] = "prefix"
    on_error: Literal["fail", "skip"] = "fail"
    strict: bool = False

    @classmethod
    def of(cls, keywords: Keywords) -> Self:
        """Return the choices in keywords, in which labels may be one text, and paths `os.PathLike`.

        Raises:
            ConfigError: `choices`: a value is out of bounds, or `map` and another format are named.
        """
        values: dict[str, Any] = {**keywords}
        for name, value in values.items():
            if isinstance(value, os.PathLike):
                values[name] = os.fspath(value)
        labels = values.get("group_by") or ()
        values["group_by"] = tuple(labels.split(",") if isinstance(labels, str) else labels)
        choices = cls(**values)
        if choices.map is not None:
            check_paths(choices.map)
            if choices.format not in {AUTO, MAPPED}:
                hint = "omit --format"
                raise ConfigError("choices", "--map", f"--format {choices.format}", "", hint)
        return choices


def settings_of(
    choices: Choices,
    logs: Sequence[Log],
    abouts: Sequence[Mapping[str, Any]],
    spool: Path,
    blobs: str | None = None,
    recorded: Recorded | None = None,
) -> list[Settings]:
    """Return the settings for reading and writing the runs of each log of a dataset.

    All settings share the metadata of the dataset. Its history names each format; the fingerprint
    of the chat template is None if it differs between formats.
    """
    pairs = [
        retokenizer_of(
            choices.tokenizer,
            choices.chat_template,
            is_needed=recorded is None and about.get(HAS_TEXT, log.adapter.is_text),
        )
        for log, about in zip(logs, abouts, strict=True)
    ]
    retokenizers, tokenizers = zip(*pairs, strict=True)
    models = {name for about in abouts for name in about.get(MODELS, ())}
    templates = {tokenizer.chat_template_fingerprint for tokenizer in tokenizers}
    metadata = tokenizers[0].replace(
        logprobs_mode=choices.logprobs_mode,
        models=tuple(sorted(models)),
        chat_template_fingerprint=templates.pop() if len(templates) == 1 else None,
    )
    if recorded is not None:
        metadata = with_recorded(metadata, recorded.path)
    join = {} if choices.join is None else {"join": shown(choices.join)}
    for log, about, retokenizer in zip(logs, abouts, retokenizers, strict=True):
        facts = {name: value for name, value in about.items() if name not in {MODELS, HAS_TEXT}}
        metadata = metadata.made(
            "convert",
            tool=_TOOL,
            format=log.format,
            inputs=[file.name for file in log.inputs],
            rewards=choices.rewards and shown(choices.rewards),
            **join,
            **facts,
            **_template_text(log, about, retokenizer),
        )
    is_verified = metadata.tokenizer_fingerprint is not None
    return [
        Settings(
            adapter=log.adapter,
            format=log.format,
            options=choices,
            retokenizer=retokenizer,
            tokenizer=find_tokenizer(metadata.tokenizer) if is_verified else None,
            layout=choices.layout,
            metadata=metadata,
            spool=spool if holds_copies(spool) else None,
            blobs=blobs,
            recorded=recorded,
            strict=choices.strict,
        )
        for log, retokenizer in zip(logs, retokenizers, strict=True)
    ]


def _template_text(
    log: Log, about: Mapping[str, Any], retokenizer: Retokenizer | None
) -> dict[str, str]:
    """Describe what a chat template adds to prompts; nothing for text without roles."""
    if retokenizer is None or log.adapter.is_table or "text" in about:
        return {}
    for system, which in ((True, "every prompt"), (False, "prompts without a system message")):
        if text := retokenizer.tokenizer.added_text(system=system):
            return {"template_text": f"the chat template adds to {which}: {text!r}"}
    return {}


def refuse_misfits(choices: Choices, logs: Iterable[Log]) -> None:
    """Check that the options apply to the formats of the logs."""
    for log in logs:
        for name, value in (("--rewards", choices.rewards), ("--group-by", choices.group_by)):
            if value and log.adapter.is_table:
                finding = f"logs in the format {log.format} already contain groups and rewards"
                raise ConfigError("choices", name, finding, "", f"omit {name}")
        if choices.group_size is not None and log.format != "skyrl":
            name, finding = "--group-size", f"logs in the format {log.format} name their groups"
            raise ConfigError("choices", name, finding, "", f"omit {name}")


def identity_of(
    opened: Opened, rewards: Input | None, choices: Choices, chunk_bytes: int
) -> dict[str, Any]:
    """Return the identity of a conversion as JSON: file contents, choices and version."""
    files = [*opened.inputs, *([rewards] if rewards else [])]
    return {
        "tool": _TOOL,
        "formats": [log.format for log in opened.logs],
        "choices": asdict(choices)
        | {"group_by": list(choices.group_by), "rewards": rewards and rewards.name},
        "chunk_bytes": chunk_bytes,
        "inputs": [[file.name, digests_of(file)] for file in files],
        "tokenizer": [digests_of(file) for file in _tokenizer_files(choices)],
        "join": None if choices.join is None else states_of(choices.join),
        "unused": [[r.place.where, digest_of(r.place.path)] for r in opened.unused],
    }


def _tokenizer_files(choices: Choices) -> list[Input]:
    """Return the tokenizer's files, without model weights, and the chat template's file."""
    tokenizer = None if choices.tokenizer is None else tokenizer_directory(choices.tokenizer)
    named = [Path(name) for name in (tokenizer, choices.chat_template) if name]
    files = [file for path in named for file in ([path] if path.is_file() else path.glob("*"))]
    weights = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"}
    used = (file for file in sorted(files) if file.is_file() and file.suffix not in weights)
    return [Input(file.name, file) for file in used]
