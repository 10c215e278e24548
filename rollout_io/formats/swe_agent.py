"""The `swe_agent` and `mini_swe_agent` formats: trajectories of SWE-agent (.traj) and of mini-swe-agent.

Each run is one JSON document. In SWE-agent's, `query` (or `messages`) of a step is the prompt of its
call. Some versions record it after the call: if the last assistant message of every prompt is the step's
response, the prompts are cut before that message. History processors shorten prompts, so a run can have
several contexts. If no step has a prompt, the history of each agent serves as its context.
Demonstrations, which only have a history, are accepted too. The file has no reward.

In mini-swe-agent's, a run has one context. `extra.response` is the raw response of the API, which may contain the
engine's tokens. An answer that the program could not use (`interrupt_type` "FormatError") is in the `extra`
of the error message that took its place. Older files have no `extra`; the oldest are a bare list of messages.
The file has no reward: submissions are scored elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Run, Trajectory, note
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Contents, inner, like
from rollout_io.formats.parsing.bodies import Sampling, sampling_extra
from rollout_io.formats.parsing.content import NO_JSON, Message, filled
from rollout_io.formats.parsing.jsonl import decode_document, decode_line
from rollout_io.formats.parsing.messages import MESSAGE, read_message, read_messages
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.records import run_of_file, with_group_rule
from schemas.errors import InputError

_SUFFIXES = (".traj", ".json")
_CRASHES = frozenset({"exit_error", "exit_environment_error", "exit_api"})
_MESSAGE = MESSAGE.plus(
    reads={"message": "agent is_demo"},
    leaves={
        "repeats parts of the text": "message/thought message/action message/tags",
        "facts about the message": "message/message_type",
    },
)
_SETTINGS = "settings, from which the harness renders messages"
_REPLAY = Contents(reads={"": "problem_statement.id"}, leaves={_SETTINGS: "*"})
_LEAVES = {
    "repeats what is in the history": "trajectory.action trajectory.observation "
    "trajectory.thought trajectory.state trajectory.extra_info trajectory.thinking_blocks "
    "trajectory.execution_time",
    "the result of the run, and facts about it": "info environment",
    _SETTINGS: "replay_config",
}
_Messages = Annotated[list[msgspec.Raw], inner(_MESSAGE)]


class _Info(msgspec.Struct, gc=False):
    exit_status: str | None = None
    model_stats: dict[str, float | None] | None = None


class _Step(msgspec.Struct, gc=False):
    response: str | None = None
    query: _Messages | None = None
    messages: _Messages | None = None

    @property
    def prompt(self) -> list[msgspec.Raw]:
        """The prompt of the step; SWE-agent writes `[{}]` for a step without a model call."""
        prompt = self.messages if self.query is None else self.query
        return [raw for raw in prompt or () if bytes(raw).strip() != b"{}"]


class _Document(msgspec.Struct, gc=False):
    history: _Messages
    trajectory: list[_Step] = []
    info: _Info = msgspec.field(default_factory=_Info)
    replay_config: Annotated[msgspec.Raw, inner(_REPLAY)] = NO_JSON


class _Marks(msgspec.Struct, gc=False):
    """The fields that SWE-agent adds to a message."""

    role: str
    agent: str | None = None
    is_demo: bool | None = None


class _Problem(msgspec.Struct, gc=False):
    id: str | None = None


class _Replay(msgspec.Struct, gc=False):
    problem_statement: _Problem | None = None


_MARKS_DECODER = msgspec.json.Decoder(_Marks)
_REPLAY_DECODER = msgspec.json.Decoder(_Replay | str | None)
_REPLAY_TEXT_DECODER = msgspec.json.Decoder(_Replay)


def _problem(config: msgspec.Raw) -> str | None:
    """Return the problem's id in a replay configuration, which is an object or JSON text."""
    try:
        replay = _REPLAY_DECODER.decode(config)
        replay = _REPLAY_TEXT_DECODER.decode(replay) if isinstance(replay, str) else replay
    except (msgspec.MsgspecError, RecursionError):
        return None
    return replay.problem_statement.id if replay and replay.problem_statement else None


def read(logged: _Document, run: Run, _: Options) -> Trajectory:
    """Read the calls of a run.

    The exit status becomes the `stop_reason` of the last call and the column `exit_status`. A run
    has failed if the environment or the model's server ended it (exit_environment_error,
    exit_error, exit_api), but not if it exhausted its budget or submitted nothing.
    """
    where = run.places[0].where
    status, stats = logged.info.exit_status, logged.info.model_stats or {}
    failed = run.failed or status in _CRASHES
    has_prompts = any(step.prompt for step in logged.trajectory)
    calls = _calls_of_steps(logged, where) if has_prompts else _calls_of_history(logged, where)
    steps = steps_of([*calls], where, failed=failed)
    for step in steps[-1:]:
        step.stop_reason = status
    return Trajectory(
        steps=steps,
        error=status if status in _CRASHES else None,
        metrics={name: value for name, value in stats.items() if value is not None},
        user_values={} if status is None else {"exit_status": status},
    )


def _calls_of_steps(logged: _Document, where: str) -> Iterator[Call]:
    replies = [
        (marks.agent, message)
        for _, marks, message in _history(logged, where)
        if message["role"] == "assistant" and not marks.is_demo
    ]
    calls = []
    for index, step in enumerate(logged.trajectory):
        here = f"{where}, trajectory[{index}]"
        if not step.prompt:
            if step.response:
                finding, hint = "the response has no prompt (`query`)", "run SWE-agent again"
                raise InputError("no_prompt", here, finding, hint=hint)
            continue
        agent, reply = _match(step.response or "", replies)
        prompt = read_messages(step.prompt, f"{here}.query")
        calls.append(Call(where=here, prompt=prompt, reply=reply, agent=agent))
    ends = [_end_of_prompt(call) for call in calls]
    for call, end in zip(calls, ends, strict=True):
        yield call if None in ends else replace(call, prompt=call.prompt[:end])


def _end_of_prompt(call: Call) -> int | None:
    """Return the index of the prompt's last assistant message if it is the call's reply, or None."""
    spoken = (i for i, message in enumerate(call.prompt) if message["role"] == "assistant")
    last = max(spoken, default=None)
    return None if last is None or call.prompt[last] != call.reply else last


def _match(response: str, replies: list[tuple[str | None, Message]]) -> tuple[str | None, Message]:
    """Find the next reply in the history whose text is `response`; return its agent and message.

    If the response is not in the history (SWE-agent queried the model again), the message
    has only the text.
    """
    for index, (agent, reply) in enumerate(replies):
        if reply["content"] == response:
            del replies[: index + 1]
            return agent, reply
    agent = replies[0][0] if replies else None
    return agent, {"role": "assistant", "content": response}


def _calls_of_history(logged: _Document, where: str) -> Iterator[Call]:
    """Yield the calls of all agents, one context per agent; demonstrations are not calls."""
    seen: dict[str | None, list[Message]] = {}
    for here, marks, message in _history(logged, where):
        before = seen.setdefault(marks.agent, [])
        if message["role"] == "assistant" and not marks.is_demo:
            yield Call(where=here, prompt=list(before), reply=message, agent=marks.agent)
        before.append(message)


def _history(logged: _Document, where: str) -> Iterator[tuple[str, _Marks, Message]]:
    for index, raw in enumerate(logged.history):
        here = f"{where}, history[{index}]"
        marks = decode_line(_MARKS_DECODER, bytes(raw), here)
        yield here, marks, read_message(raw, here)


ADAPTER = Records(
    records={"": _Document},
    leaves=_LEAVES,
    run=lambda logged, place: run_of_file(place, _problem(logged.replay_config), _SUFFIXES),
    read=read,
    is_record=like({"history": [{"role": str, "agent": str}]}),
    is_whole=lambda _: True,
    finish=with_group_rule,
).adapter("SWE-agent's trajectories (.traj), and its demonstrations")


_MINI_SUFFIXES = (".traj.json", ".json", ".traj")
_EXIT = "exit"
_UNUSED = "FormatError"
UNREADABLE = "answers that the program could not use, whose text is not in the log: left out"
_MINI_MESSAGE = MESSAGE.plus(
    reads={"message": "extra.response extra.interrupt_type extra.model_response"},
    leaves={
        "facts about a call, and its output before it was rendered": "message/extra "
        "message/output message/provider_specific_fields message/usage message/id "
        "message/created_at message/model"
    },
)
_MINI_LEAVES = {
    "settings, from which the harness renders messages": "info.config info.config.model "
    "info.mini_version",
    "the result of the run": "info.submission info.exit_status_details",
    "the version of the format": "trajectory_format",
}


class _Model(msgspec.Struct, gc=False):
    model_name: str | None = None
    model_kwargs: Sampling = msgspec.field(default_factory=Sampling)


class _Config(msgspec.Struct, gc=False):
    model: _Model = msgspec.field(default_factory=_Model)


class _MiniInfo(msgspec.Struct, gc=False):
    exit_status: str | None = None
    model_stats: dict[str, float | None] = {}
    config: _Config = msgspec.field(default_factory=_Config)
    traceback: str | None = None
    exception_str: str | None = None


class _MiniDocument(msgspec.Struct, gc=False):
    """A run."""

    messages: Annotated[list[msgspec.Raw], inner(_MINI_MESSAGE)]
    info: _MiniInfo = msgspec.field(default_factory=_MiniInfo)
    instance_id: str | None = None


class _Extra(msgspec.Struct, gc=False):
    response: msgspec.Raw = NO_JSON
    interrupt_type: str | None = None
    model_response: str | None = None


class _Reply(msgspec.Struct, gc=False):
    role: str | None = None
    object: str | None = None
    extra: _Extra | None = None

    @property
    def is_call(self) -> bool:
        return self.role == "assistant" or self.object == "response"


class _Choice(msgspec.Struct, gc=False):
    message: msgspec.Raw = NO_JSON


class _Response(msgspec.Struct, gc=False):
    object: str | None = None
    choices: list[_Choice] = []


_REPLY_DECODER = msgspec.json.Decoder(_Reply)
_RESPONSE_DECODER = msgspec.json.Decoder(_Response)


def _read_mini(logged: _MiniDocument, run: Run, _: Options) -> Trajectory:
    """Read the calls of a run.

    The exit status (`Submitted`, `LimitsExceeded`, ...) becomes the `stop_reason` of the last call
    and the column `exit_status`; a run that ended with an exception in the program (`traceback`)
    has failed.
    """
    where, info = run.places[0].where, logged.info
    error = None
    if info.traceback:
        last = info.traceback.strip().rpartition("\n")[2]
        error = f"{info.exit_status or 'exception'}: {info.exception_str or last}"
    failed = run.failed or error is not None
    steps = steps_of(list(_mini_calls(logged, f"{where}, messages")), where, failed=failed)
    for step in steps[-1:]:
        step.stop_reason = info.exit_status or step.stop_reason
    return Trajectory(
        steps=steps,
        error=error,
        metrics={name: value for name, value in info.model_stats.items() if value is not None},
        user_values=filled(exit_status=info.exit_status, model=info.config.model.model_name),
    )


def _mini_calls(logged: _MiniDocument, where: str) -> Iterator[Call]:
    sampling = logged.info.config.model.model_kwargs
    history: list[Message] = []
    for index, raw in enumerate(logged.messages):
        here = f"{where}[{index}]"
        reply = decode_document(_REPLY_DECODER, bytes(raw), here)
        if reply.role == _EXIT:
            continue
        message = read_message(raw, here)
        extra = reply.extra or _Extra()
        is_unused = extra.interrupt_type == _UNUSED
        answer = _unused(extra, f"{here}, extra") if is_unused else message
        note(UNREADABLE, answer is None)
        if answer is not None and (is_unused or reply.is_call):
            yield Call(
                where=here,
                prompt=list(history),
                reply=answer,
                answer=extra.response,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                sampling_extra=sampling_extra(sampling),
            )
        history.append(message)


def _unused(extra: _Extra, where: str) -> Message | None:
    """Return the answer in whose place an error message stands; None if the log has not its text."""
    raw = extra.response
    if bytes(raw).startswith(b"{"):
        response = decode_document(_RESPONSE_DECODER, bytes(raw), f"{where}.response")
        if response.choices:
            raw = response.choices[0].message
        if response.choices or response.object == "response":
            return read_message(raw, f"{where}.response")
    text = extra.model_response
    return None if text is None else {"role": "assistant", "content": text}


def _is_run(value: Any) -> bool:
    """True for a document with the program's names.

    A bare list of messages is recognized if every user message between the first and the last reply
    is command output in this agent's format (`<returncode>`).
    """
    if isinstance(value, list):
        return all(map(_is_plain, value)) and _is_bare(value)
    is_named = _has_messages(value) and str(value.get("trajectory_format")).startswith(_FORMAT)
    return is_named or _has_info(value)


_FORMAT = "mini-swe-agent"
_has_messages = like({"messages": list})
_has_info = like(
    {"messages": list, "info": {"model_stats": {"api_calls": object}}},
    {"messages": list, "info": {"mini_version": str}},
)


def _is_plain(message: Any) -> bool:
    is_chat = isinstance(message, dict) and message.keys() == {"role", "content"}
    return is_chat and all(isinstance(value, str) for value in message.values())


def _is_bare(messages: list[dict[str, str]]) -> bool:
    outputs = [message["content"] for message in messages[3:-1] if message["role"] == "user"]
    roles = [message["role"] for message in messages[:3]]
    is_run = roles == ["system", "user", "assistant"] and bool(outputs)
    return is_run and all(output.startswith("<returncode>") for output in outputs)


MINI = Records(
    records={"": _MiniDocument},
    leaves=_MINI_LEAVES,
    bare="messages",
    run=lambda logged, place: run_of_file(place, logged.instance_id, _MINI_SUFFIXES),
    read=_read_mini,
    is_record=_is_run,
    is_whole=lambda _: True,
    finish=with_group_rule,
).adapter("mini-swe-agent's trajectories (.traj.json), including the oldest (a list of messages)")
