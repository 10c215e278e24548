"""The `swe_agent` format: trajectories of SWE-agent (.traj), one JSON document per run.

    {"trajectory": [{"response": ..., "query": [message, ...], "action": ..., ...}, ...],
     "history": [{"role": ..., "content": ..., "agent": "main", "message_type": "action"}, ...],
     "info": {"exit_status": "submitted", "model_stats": {...}}, "replay_config": ...}

`query` (or `messages`) of a step is the prompt of its call. Some versions record it after the call:
if the last assistant message of every prompt is the step's response, the prompts are cut before
that message. History processors shorten prompts, so a run can have several contexts. If no step has
a prompt, the history of each agent serves as its context. Demonstrations, which only have a
history, are accepted too. The file has no reward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Contents, inner
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import run_of_file, with_group_rule
from rollout_io.formats.parsing.messages import MESSAGE, read_message, read_messages
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.start import like
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


class Document(msgspec.Struct, gc=False):
    """A run."""

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


def run_of(document: Document, place: Place) -> Run:
    """Return the run of a file; the instance is the problem's id, or inferred from the file name."""
    return run_of_file(place, _problem(document.replay_config), _SUFFIXES)


def _problem(config: msgspec.Raw) -> str | None:
    """Return the problem's id in a replay configuration, which is an object or JSON text."""
    try:
        replay = _REPLAY_DECODER.decode(config)
        replay = _REPLAY_TEXT_DECODER.decode(replay) if isinstance(replay, str) else replay
    except (msgspec.MsgspecError, RecursionError):
        return None
    return replay.problem_statement.id if replay and replay.problem_statement else None


def read(logged: Document, run: Run, _: Options) -> Trajectory:
    """Read the calls of a run.

    The exit status becomes the `stop_reason` of the last call and the column `exit_status`. A run
    has failed if the environment or the model's server ended it (exit_environment_error,
    exit_error, exit_api), but not if it exhausted its budget or submitted nothing.
    """
    where = run.places[0].where
    status, stats = logged.info.exit_status, logged.info.model_stats or {}
    failed = run.failed or status in _CRASHES
    steps = steps_of(list(_calls(logged, where)), where, failed=failed)
    for step in steps[-1:]:
        step.stop_reason = status
    return Trajectory(
        steps=steps,
        error=status if status in _CRASHES else None,
        metrics={name: value for name, value in stats.items() if value is not None},
        user_values={} if status is None else {"exit_status": status},
    )


def _calls(logged: Document, where: str) -> Iterator[Call]:
    if any(step.prompt for step in logged.trajectory):
        yield from _calls_of_steps(logged, where)
    else:
        yield from _calls_of_history(logged, f"{where}, history")


def _calls_of_steps(logged: Document, where: str) -> Iterator[Call]:
    replies = _replies(logged, f"{where}, history")
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


def _replies(logged: Document, where: str) -> list[tuple[str | None, Message]]:
    return [
        (marks.agent, message)
        for _, marks, message in _history(logged, where)
        if message["role"] == "assistant" and not marks.is_demo
    ]


def _calls_of_history(logged: Document, where: str) -> Iterator[Call]:
    """Yield the calls of all agents, one context per agent; demonstrations are not calls."""
    seen: dict[str | None, list[Message]] = {}
    for here, marks, message in _history(logged, where):
        before = seen.setdefault(marks.agent, [])
        if message["role"] == "assistant" and not marks.is_demo:
            yield Call(where=here, prompt=list(before), reply=message, agent=marks.agent)
        before.append(message)


def _history(logged: Document, where: str) -> Iterator[tuple[str, _Marks, Message]]:
    for index, raw in enumerate(logged.history):
        here = f"{where}[{index}]"
        marks = decode_line(_MARKS_DECODER, bytes(raw), here)
        yield here, marks, read_message(raw, here)


ADAPTER = Records(
    records={"": Document},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=like({"history": [{"role": str, "agent": str}]}),
    is_whole=lambda _: True,
    finish=with_group_rule,
).adapter("SWE-agent's trajectories (.traj), and its demonstrations")
