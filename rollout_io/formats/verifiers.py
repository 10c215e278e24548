"""The `verifiers` format: episodes (`traces.jsonl`), rows (`results.jsonl`), or directories.

    outputs/evals/<env>--<model>/<hash>/{results.jsonl, metadata.json}
    <run>/traces.jsonl
    rollouts/step_<N>/<train|eval>/<all|effective>/traces.jsonl
    traces/{stream/<N>.jsonl, annotations/<producer>/<N>.jsonl}

An episode is a run; if it occurs in several subsets, it is one run with several records. Its group
is `group.id`, or else its task. The annotations of its traces are records of its run
(`prime_rl`). A row is a run, and its example is its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import (
    About,
    Conversation,
    Found,
    Input,
    Logged,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Step,
    Trajectory,
    note,
)
from rollout_io.formats.engines.records import Open, Records
from rollout_io.formats.grammar import Grammar, account
from rollout_io.formats.parsing.bodies import Int32
from rollout_io.formats.parsing.content import NO_JSON, filled
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.records import label, logs_of, read_record, refuse_repeated
from rollout_io.formats.prime_rl import HEAD, PART, UPDATES, Update, read_updates
from rollout_io.formats.verifiers_rows import METADATA, ROWS, metadata_beside, read_row
from rollout_io.formats.verifiers_traces import Failure, Graph, Trace, metrics_of
from schemas.errors import InputError, count

_LOGS = {"results.jsonl", "traces.jsonl"}
_BESIDE = {METADATA, "config.json"}
_TASKS = "inferred: episodes that do not name a group are grouped by the key of their task"
_UNUSED = "annotated traces without a row"
_EXAMPLES = "inferred: rows that name no environment are grouped by file and example"


class _Data(msgspec.Struct, gc=False):
    name: msgspec.Raw = NO_JSON


class _Task(msgspec.Struct, gc=False):
    key: str | None = None
    hash: str | None = None
    data: _Data | None = None


class _Group(msgspec.Struct, gc=False):
    id: str | None = None


class _Policy(msgspec.Struct, gc=False):
    start: Int32 | None = None
    end: Int32 | None = None


class _Work(msgspec.Struct, gc=False):
    type: str | None = None
    step: Int32 | None = None
    policy: _Policy | None = None


class _RunInfo(msgspec.Struct, gc=False):
    type: str | None = None
    id: str | None = None
    work: _Work | None = None


class _Env(msgspec.Struct, gc=False):
    id: str | None = None
    name: str | None = None


class _Named(msgspec.Struct, gc=False):
    id: str
    task: _Task
    group: _Group | None = None
    run: _RunInfo | None = None
    env: _Env | None = None


class _TraceHead(msgspec.Struct, gc=False):
    id: Any = None


class _EpisodeHead(_Named, gc=False):
    traces: list[_TraceHead] = []


class _Episode(_Named, gc=False):
    traces: list[Trace] = []
    ok: bool = True
    is_timeout: bool = False
    errors: list[Failure] | None = None


class _RowHead(msgspec.Struct, gc=False):
    prompt: str | list[msgspec.Raw] | None
    completion: str | list[msgspec.Raw] | None
    reward: float | None
    id: msgspec.Raw = NO_JSON
    example_id: msgspec.Raw = NO_JSON
    task: msgspec.Raw = NO_JSON


class Record(Open):
    """An episode, an annotation of a trace, or a row; the keys that tell which."""

    traces: msgspec.Raw = NO_JSON
    trace_id: msgspec.Raw = NO_JSON
    completion: msgspec.Raw = NO_JSON


EPISODES = Grammar(
    records={"": _Episode},
    leaves={
        "the task, whose messages are in the traces": "task.data task.type traces.task",
        "facts about the episode and its calls": "run.name traces.agent.config "
        "traces.agent.runtime traces.calls.model traces.calls.endpoint traces.calls.acp "
        "traces.info traces.errors.traceback errors.traceback",
    },
).contents
_EPISODE_HEAD = msgspec.json.Decoder(_EpisodeHead)
_EPISODE = msgspec.json.Decoder(_Episode)
_ROW_HEAD = msgspec.json.Decoder(_RowHead)


def find(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield rows, then episodes, in the order of the logs, and facts on how groups were inferred.

    Episodes with the same id, and the annotations of their traces, are records of one run.
    """
    files = [file for log in inputs for file in _files(log)]
    owners = {file.path: file.name for file in files} if len(files) > 1 else {}
    rows, holders = dict[bytes, str](), dict[str, set[str]]()

    def run_of(record: Record, place: Place) -> Run:
        content = read_record(place)
        if bytes(record.traces) != b"null":
            head = decode_line(_EPISODE_HEAD, content, place.where)
            for trace in head.traces:
                if isinstance(trace.id, str):
                    holders.setdefault(trace.id, set()).add(head.id)
            return _episode_run(place, head)
        if bytes(record.trace_id) != b"null" and bytes(record.completion) == b"null":
            trace_id = decode_line(HEAD, content, place.where).trace_id
            place = msgspec.structs.replace(place, part=PART)
            return Run(instance_id=trace_id, repetition_id=None, places=[place])
        refuse_repeated(content.strip(), place.where, rows)
        return _row_run(place, decode_line(_ROW_HEAD, content, place.where), owners)

    episodes, annotations, rules = dict[str, Run](), list[Run](), dict[str, str]()
    for item in replace(_RECORDS, run=run_of).find(inputs, progress):
        if isinstance(item, Run) and item.places[0].part == PART:
            annotations.append(item)
        elif isinstance(item, Run) and "episode" in item.labels:
            first = episodes.setdefault(item.labels["episode"], item)
            first.places = [*first.places, *item.places] if first is not item else first.places
        else:
            if isinstance(item, Run) and "env" not in item.labels and owners:
                rules["groups"] = _EXAMPLES
            yield item
    if any("group" not in run.labels for run in episodes.values()):
        rules["groups"] = _TASKS
    repeated = sum(len(run.places) > 1 for run in episodes.values())
    if repeated:
        text = f"{count(repeated, 'episode')} in several files (subsets of one step): one run each"
        rules["repeated_episodes"] = text
    for annotation in annotations:
        names = holders.get(annotation.instance_id, set()) & episodes.keys()
        if len(names) == 1:
            run = episodes[names.pop()]
            run.places = [*run.places, *annotation.places]
        else:
            what = "several episodes have" if names else "no episode has"
            finding = f"an annotation of the trace {annotation.instance_id[:100]!r}, which {what}"
            hint = "convert the annotations together with the episodes of their run"
            (place,) = annotation.places
            error = InputError("dangling_reference", place.where, finding, hint=hint)
            yield Rejected(place, error)
    yield from episodes.values()
    yield from (About(name, rule) for name, rule in rules.items())


def _episode_run(place: Place, head: _EpisodeHead) -> Run:
    run, data, env = head.run or _RunInfo(), head.task.data or _Data(), head.env or _Env()
    work = run.work or _Work()
    task = head.task.key or head.task.hash
    group = None if head.group is None else head.group.id
    if not head.id or not (group or task):
        finding = "the episode needs an `id`, and a `group.id`, `task.key` or `task.hash`"
        raise InputError("group", place.where, finding)
    labels = filled(
        episode=head.id,
        group=group,
        task=task,
        run=run.id,
        step=None if work.step is None else str(work.step),
        name=label(data.name, place.where),
        env=env.name or env.id,
        kind=work.type,
    )
    return Run(instance_id=group or task or "", repetition_id=None, places=[place], labels=labels)


def _row_run(place: Place, head: _RowHead, owners: Mapping[Path, str]) -> Run:
    example = label(head.example_id, place.where) or label(head.id, place.where)
    if example is None:
        hint = "use the file as the verifiers library saved it"
        finding = "the row has no `example_id` or `id`"
        raise InputError("group", place.where, finding, hint=hint)
    metadata, owner = metadata_beside(place.path), owners.get(place.path)
    env = metadata.env or metadata.env_id
    labels = filled(
        example=example,
        env=env,
        model=metadata.model,
        file=owner,
        task=label(head.task, place.where),
    )
    instance = f"{env or owner}/{example}" if env or owner else example
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def read(record: Record, run: Run, options: Options) -> Trajectory:
    """Read the calls of an episode or a row.

    Raises:
        RolloutError: The run cannot be used (`no_token_ids`, `tokens_disagree`, `no_calls`, ...).
    """
    place = run.places[0]
    if "episode" not in run.labels:
        return read_row(record, place, options)
    others = [part for part in run.places[1:] if part.part != PART]
    updates = read_updates([part for part in run.places if part.part == PART])
    first = _read_episode(place, options, updates, failed=run.failed)
    for other in others:
        second = _read_episode(other, options, updates, failed=run.failed)
        if [*map(_said, first.steps)] != [*map(_said, second.steps)]:
            finding = f"the episode differs from {place.where}, which has the same id"
            hint = "convert each run separately"
            raise InputError("tokens_disagree", other.where, finding, hint=hint)
    return first


def _said(step: Logged) -> Any:
    """Return what is the same wherever a call is logged."""
    if isinstance(step, Step):
        return bytes(step.prompt_token_ids), bytes(step.response_ids)
    assert isinstance(step, Conversation)
    return step.messages


def _read_episode(
    place: Place, options: Options, updates: Mapping[str, Sequence[Update]], *, failed: bool
) -> Trajectory:
    """Read an episode; untrained agents come first, so that the policy's call is last.

    The outcome is the reward (scores times weights) of the last trained trace that has one; all
    rewards are metrics. The calls of untrained traces without tokens (judges, users) are counted
    but left out.
    """
    content = read_record(place)
    episode = decode_line(_EPISODE, content, place.where)
    account(EPISODES, content)
    error = _error(episode, options)
    failed = failed or error is not None
    numbered = sorted(enumerate(episode.traces), key=lambda item: item[1].agent.trainable)
    graphs = [
        Graph(t, f"{place.where}, traces[{i}]", updates.get(t.id or "", ())) for i, t in numbered
    ]
    work, env = (episode.run or _RunInfo()).work or _Work(), episode.env or _Env()
    policy = work.policy or _Policy()
    steps, num_left_out = _steps(graphs, policy, failed=failed)
    names = [trace.agent.name for _, trace in numbered]
    repeats = [f"{names[:i].count(n)}" if names.count(n) > 1 else "" for i, n in enumerate(names)]
    prefixes = [f"{name}{number}." for name, number in zip(names, repeats, strict=True)]
    prefixes[-1:] = [""] * len(prefixes[-1:])  # the last trace's metrics have the names alone
    traces = [trace for _, trace in numbered]
    metrics = metrics_of([*zip(prefixes, traces, strict=True)])
    rewards = [t.reward for _, t in numbered if t.agent.trainable and t.reward is not None]
    if rewards:
        metrics.setdefault("reward", rewards[-1])
    if num_left_out:
        metrics["num_calls_without_tokens"] = float(num_left_out)
    return Trajectory(
        steps=steps,
        reward=rewards[-1] if rewards else None,
        error=error,
        metrics=metrics,
        user_values=filled(
            episode=episode.id,
            env=env.name or env.id,
            stop_condition=traces[-1].stop_condition if traces else None,
            policy_start=None if policy.start is None else str(policy.start),
            policy_end=None if policy.end is None else str(policy.end),
        ),
    )


def _steps(
    graphs: Sequence[Graph], policy: _Policy, *, failed: bool
) -> tuple[list[Step | Conversation], int]:
    """Return the calls of all traces, and the number of calls left out.

    The policy sampled the calls of trainable agents. Calls of a failed run may lack tokens.
    """
    has_tokens = any(len(g.sampled) > len(g.without_tokens) for g in graphs)
    steps: list[Step | Conversation] = []
    num_left_out = 0
    for graph in graphs:
        missing = graph.without_tokens
        if not has_tokens and not failed:
            graph_steps: list[Step | Conversation] = [*graph.conversations()]
        else:
            trains = graph.trace.agent.trainable or len(missing) < len(graph.sampled)
            if missing and trains and not failed:
                raise graph.missing()
            num_left_out += len(missing)
            graph_steps = list(graph.steps(failed=failed))
        for step in graph_steps:
            if isinstance(step, Step) and graph.trace.agent.trainable:
                step.policy_version = policy.start
        note(_UNUSED, int(graph.is_annotated and not graph_steps))
        steps += graph_steps
    return steps, num_left_out


def _error(episode: _Episode, options: Options) -> str | None:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [error for t in trained if not t.ok for error in t.errors or ()]
    errors += [] if episode.ok else episode.errors or []
    if not episode.ok or not all(trace.ok for trace in trained):
        last = errors[-1] if errors else Failure(type="not ok")
        return ": ".join(text[:500] for text in (last.type, last.message) if text) or "not ok"
    is_timeout = episode.is_timeout or any(trace.is_timeout for trace in trained)
    return "timeout" if is_timeout and options.timeouts == "fail" else None


def _is_record(record: Any) -> bool:
    """True for an episode, an annotation, or a row with fields that are specific to this format."""
    if not isinstance(record, dict):
        return False
    if isinstance(record.get("traces"), list):
        return isinstance(record.get("id"), str) and isinstance(record.get("task"), dict)
    if isinstance(record.get("trace_id"), str):
        is_update = "version" in record and isinstance(record.get("branches"), list)
        return is_update or ("advantage" in record and isinstance(record.get("subset"), str))
    parts = [record.get("metrics"), record.get("timing")]
    is_new = record.get("example_id") is not None and all(isinstance(p, dict) for p in parts)
    is_old = record.get("id") is not None and isinstance(record.get("generation_ms"), int | float)
    return {"prompt", "completion", "reward"} <= record.keys() and (is_new or is_old)


def _files(log: Input) -> list[Input]:
    return logs_of(log, _LOGS.__contains__, _BESIDE.__contains__)


_RECORDS = Records(
    records={"": Record},
    leaves={"each kind of record has fields of its own": "*"},
    run=lambda _, place: Run(instance_id="", repetition_id=None, places=[place]),
    read=read,
    is_record=_is_record,
    is_whole=lambda _: False,
    files=_files,
)
ADAPTER = replace(
    _RECORDS.adapter(
        "verifiers and prime-rl: episodes and annotations (v1), rows (v0, legacy), directories"
    ),
    find=find,
    line=_RowHead,
    contents=EPISODES.plus(
        reads={"": f"{ROWS.reads['']} {UPDATES.reads['']} subset effective advantage"},
        leaves=ROWS.leaves,
    ),
)
