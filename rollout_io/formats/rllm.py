"""The `rllm` format: rLLM's episodes, one JSON document each, or directories that contain them.

An episode is a run, and each of its trajectories is an agent. The group is the part of the id before
the colon, or else the task. Evaluation episodes have empty id lists; their text is read instead.
`episode_schema` 2 stores each message once, in `message_nodes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rollout_io.formats.base import Conversation, Options, Place, Run, Step, Trajectory
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import account, like
from rollout_io.formats.parsing.bodies import Int32
from rollout_io.formats.parsing.content import NO_JSON, filled
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import MESSAGE, read_messages, text_of
from rollout_io.formats.parsing.model_calls import Call, conversations_of
from rollout_io.formats.parsing.records import label, logs_of, numbers, with_group_rule
from rollout_io.formats.parsing.tokens import logprob_array, same_ids, strict_ids
from schemas.errors import InputError, count

_GROUPS = "inferred: episodes whose id does not begin with their task are grouped by task"
_SAVE_TRAINING = "save training episodes: evaluation episodes have no ids"
_NO_IDS = frozenset({b"null", b"[]"})
_BESIDE = {"meta.json", "batch_summary.json"}
_LEAVES = {
    "repeats the messages": "trajectories.steps.input trajectories.steps.output "
    "trajectories.steps.action trajectories.steps.observation trajectories.steps.thought",
    "facts about steps and agents": "trajectories.steps.id trajectories.steps.done "
    "trajectories.steps.info trajectories.steps.metadata trajectories.steps.mc_return "
    "trajectories.steps.advantage trajectories.uid trajectories.task trajectories.input "
    "trajectories.output trajectories.info trajectories.metadata",
    "the program's own state": "artifacts episode_schema",
}
_TASK_NAMES = ("id", "task_id", "uid", "instance_id")


class _Output(msgspec.Struct, gc=False):
    prompt_ids: msgspec.Raw = NO_JSON
    completion_ids: msgspec.Raw = NO_JSON
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    weight_version: Int32 | None = None


class _Step(msgspec.Struct, gc=False):
    prompt_ids: msgspec.Raw = NO_JSON
    response_ids: msgspec.Raw = NO_JSON
    logprobs: list[float] | None = None
    chat_completions: list[msgspec.Raw] | None = None
    chat_completions_ref: tuple[str | None, int] | None = None
    model_output: msgspec.Raw = NO_JSON
    model_response: msgspec.Raw = NO_JSON
    reward: float | None = None
    weight_version: Int32 | None = None


class _Node(msgspec.Struct, gc=False):
    m: msgspec.Raw
    p: str | None = None


class _Trajectory(msgspec.Struct, gc=False):
    name: str | None = None
    reward: float | None = None
    steps: list[_Step] = []
    signals: dict[str, msgspec.Raw] | None = None
    message_nodes: dict[str, _Node] | None = None


class _Episode(msgspec.Struct, gc=False):
    id: str | None = None
    episode_id: str | None = None
    task: msgspec.Raw = NO_JSON
    training_step: msgspec.Raw = NO_JSON
    session_id: msgspec.Raw = NO_JSON
    trajectories: list[_Trajectory] = []
    termination_reason: msgspec.Raw = NO_JSON
    is_correct: bool | None = None
    metrics: dict[str, msgspec.Raw] | None = None
    metadata: dict[str, msgspec.Raw] | None = None


_OUTPUT = msgspec.json.Decoder(_Output)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder(Any)


def run_of(episode: _Episode, place: Place) -> Run:
    """Return the run of an episode."""
    name = episode.id or episode.episode_id
    if not name:
        raise InputError("group", place.where, "the episode has no `id`")
    task, colon, rollout = name.partition(":")
    labels = filled(
        episode=name,
        task=task if colon else None,
        rollout=rollout,
        task_id=_task_id(episode.task, place.where),
        training_step=label(episode.training_step, place.where),
        session=label(episode.session_id, place.where),
    )
    task_json = bytes(episode.task)
    digest = f"task-{hashlib.blake2b(task_json, digest_size=6).hexdigest()}"
    unnamed = name if task_json == b"null" else digest
    instance = labels.get("task") or labels.get("task_id") or unnamed
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def _task_id(task: msgspec.Raw, where: str) -> str | None:
    if not bytes(task).startswith(b"{"):
        return label(task, where)
    fields = decode_line(_FIELDS, bytes(task), f"{where}, task")
    names = (label(fields.get(name), where) for name in _TASK_NAMES)
    return next((name for name in names if name), None)


def read(episode: _Episode, run: Run, options: Options) -> Trajectory:
    """Read the calls of an episode, agent by agent in the order of its trajectories.

    The outcome is the reward of the first trajectory, as in rLLM's results; all rewards are metrics
    (`solver.reward`). The step rewards of a single trajectory are kept if any differs from 0, the
    default. The episode's metrics, `is_correct` and signals become metrics too.
    """
    (place,) = run.places
    error = _error(episode, options, place.where)
    failed = run.failed or error is not None
    names = _names(episode.trajectories)
    steps: list[Step | Conversation] = []
    has_tokens = any(_has_tokens(s) for t in episode.trajectories for s in t.steps)
    for i, (name, trajectory) in enumerate(zip(names, episode.trajectories, strict=True)):
        where = f"{place.where}, trajectories[{i}]"
        agent = trajectory.name or name
        if has_tokens or failed:
            calls: list[Step | Conversation] = list(_steps(trajectory, agent, where, failed=failed))
        else:
            calls = [*conversations_of(_calls(trajectory, agent, where))]
        rewards = [step.reward for step in trajectory.steps]
        if len(names) == 1 and any(rewards) and len(rewards) == len(calls):
            for step, reward in zip(calls, rewards, strict=True):
                step.reward = reward
        steps += calls
    if not steps and not failed:
        raise InputError("no_calls", place.where, "the episode has no steps")
    return Trajectory(
        steps=steps,
        reward=episode.trajectories[0].reward if episode.trajectories else None,
        error=error,
        metrics=_metrics(episode, names, place.where),
        user_values=filled(
            episode=episode.id or episode.episode_id,
            termination_reason=label(episode.termination_reason, place.where),
        ),
    )


def _names(trajectories: Sequence[_Trajectory]) -> list[str]:
    """Return the name of each trajectory; numbers are appended to repeated names."""
    names = [trajectory.name or "agent" for trajectory in trajectories]
    return [n if names.count(n) == 1 else f"{n}{names[:i].count(n)}" for i, n in enumerate(names)]


def _has_tokens(step: _Step) -> bool:
    return any(bytes(ids) not in _NO_IDS for ids in _ids(step))


def _ids(step: _Step) -> tuple[msgspec.Raw, msgspec.Raw]:
    ids = (step.prompt_ids, step.response_ids)
    if all(bytes(raw) in _NO_IDS for raw in ids) and _is_object(step.model_output):
        output = _output(step, "model_output")
        return output.prompt_ids, output.completion_ids
    return ids


def _is_object(raw: msgspec.Raw) -> bool:
    return bytes(raw).startswith(b"{")


def _output(step: _Step, where: str) -> _Output:
    """Parse the engine's output; return an empty output if it was not logged as a JSON object."""
    if not _is_object(step.model_output):
        return _Output()
    return decode_line(_OUTPUT, bytes(step.model_output), where)


def _steps(trajectory: _Trajectory, agent: str, where: str, *, failed: bool) -> Iterator[Step]:
    for i, step in enumerate(trajectory.steps):
        place = f"{where}.steps[{i}]"
        if _has_tokens(step):
            yield _step(step, _chat(step, trajectory, place), agent, place)
        elif not failed:
            finding = "the step has no token ids, but another step has them"
            raise InputError("no_token_ids", place, finding, hint=_SAVE_TRAINING)


def _step(step: _Step, chat: Sequence[bytes], agent: str, where: str) -> Step:
    output = _output(step, f"{where}.model_output")
    prompt, response = (
        np.zeros(0, np.int32) if bytes(raw) == b"null" else strict_ids(bytes(raw), what, where)
        for raw, what in zip(_ids(step), ("prompt", "response"), strict=True)
    )
    for name, one, other in zip(
        ("prompt_ids", "response_ids"),
        (step.prompt_ids, step.response_ids),
        (output.prompt_ids, output.completion_ids),
        strict=True,
    ):
        if not {bytes(one), bytes(other)} & _NO_IDS:
            same_ids(bytes(one), bytes(other), name, f"{where} and its model_output")
    if step.logprobs and output.logprobs and step.logprobs != output.logprobs:
        finding, hint = "the logprobs differ from those in model_output", "save the episode again"
        raise InputError("conflicting_ids", where, finding, hint=hint)
    logprobs = step.logprobs or output.logprobs
    last = decode_line(_ANY, chat[-1], where) if chat else None
    sent = chat[:-1] if _is_assistant(last) else chat
    lines = [msgspec.json.format(message, indent=-1) for message in sent]
    text = label(step.model_response, where) or (text_of(last) if _is_assistant(last) else None)
    version = output.weight_version if step.weight_version is None else step.weight_version
    return Step(
        source=where,
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=logprob_array(logprobs, len(response), where) if logprobs else None,
        stop_reason=output.finish_reason,
        policy_version=version,
        agent=agent,
        messages=f"[{b','.join(lines).decode()}]" if lines else None,
        response_text=text,
        texts=(text,) if text else (),
    )


def _is_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _chat(step: _Step, trajectory: _Trajectory, where: str) -> list[bytes]:
    """Return the messages of a step as JSON, ending with the answer."""
    if step.chat_completions_ref is None:
        return [bytes(message) for message in step.chat_completions or ()]
    (name, length), nodes = step.chat_completions_ref, trajectory.message_nodes or {}
    chain: list[bytes] = []
    while name is not None and name in nodes and len(chain) < length:
        chain.append(bytes(nodes[name].m))
        name = nodes[name].p
    if name is not None or len(chain) != length:
        finding = f"`message_nodes` has no chain of {count(length, 'message')} from this node"
        raise InputError("dangling_reference", f"{where}.chat_completions_ref", finding)
    return chain[::-1]


def _calls(trajectory: _Trajectory, agent: str, where: str) -> Iterator[Call]:
    """Yield the steps as calls; the last assistant message of a chat is the reply."""
    accounted: set[bytes] = set()
    for i, step in enumerate(trajectory.steps):
        place = f"{where}.steps[{i}]"
        chat = _chat(step, trajectory, place)
        if not chat:
            finding = "the step has neither token ids nor `chat_completions`"
            raise InputError("no_token_ids", place, finding, hint=_SAVE_TRAINING)
        for raw in chat:
            if raw not in accounted:
                account(MESSAGE, raw, "chat_completions")
        accounted.update(chat)
        messages = read_messages(map(msgspec.Raw, chat), place)
        spoken = [at for at, message in enumerate(messages) if _is_assistant(message)]
        if spoken:
            last = spoken[-1]
            yield Call(where=place, prompt=messages[:last], reply=messages[last], agent=agent)


def _metrics(episode: _Episode, names: Iterable[str], where: str) -> dict[str, float]:
    metrics = numbers(episode.metrics or {}, f"{where}, metrics")
    if episode.is_correct is not None:
        metrics["is_correct"] = float(episode.is_correct)
    is_alone = len(episode.trajectories) == 1
    for name, trajectory in zip(names, episode.trajectories, strict=True):
        prefix = "" if is_alone else f"{name}."
        signals = numbers(trajectory.signals or {}, f"{where}, signals")
        metrics |= {f"{prefix}{key}": value for key, value in signals.items()}
        if trajectory.reward is not None:
            metrics[f"{prefix}reward"] = trajectory.reward
    return metrics


def _error(episode: _Episode, options: Options, where: str) -> str | None:
    reason = label(episode.termination_reason, where) or ""
    if reason == "timeout":
        return reason if options.timeouts == "fail" else None
    if not reason.endswith("error"):
        return None
    raw = (episode.metadata or {}).get("error", NO_JSON)
    fields = decode_line(_FIELDS, bytes(raw), where) if _is_object(raw) else {"message": raw}
    message = label(fields.get("message"), where)
    return f"{reason}: {message[:500]}" if message else reason


_EPISODE = {
    "termination_reason": object,
    "is_correct": object,
    "trajectories": [{"steps": list}],
}
ADAPTER = Records(
    records={"": _Episode},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=like({**_EPISODE, "id": str}, {**_EPISODE, "episode_id": str}),
    is_whole=lambda _: True,
    files=partial(
        logs_of,
        is_log=lambda name: name.startswith("episode_") and name.endswith(".json"),
        is_beside=lambda name: name in _BESIDE or name.startswith("item_"),
    ),
    finish=partial(with_group_rule, rule=_GROUPS, label="task"),
).adapter("rLLM: episodes, one JSON document each, or run directories")
