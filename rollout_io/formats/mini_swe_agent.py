"""The `mini_swe_agent` format: trajectories of mini-swe-agent, one JSON document per run.

    {"trajectory_format": "mini-swe-agent-1.1", "instance_id": "astropy__astropy-12907",
     "info": {"exit_status": "Submitted", "model_stats": {...}, "config": {...}},
     "messages": [{"role": "assistant", "content": ..., "extra": {"response": {...}}}, ...]}

A run has one context. `extra.response` is the raw response of the API, which may contain the
engine's tokens. An answer that the program could not use (`interrupt_type` "FormatError") is in the `extra` of
the error message that took its place. Older files have no `extra`; the oldest are a bare list of messages. The file
has no reward: submissions are scored elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory, note
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import inner
from rollout_io.formats.parsing.bodies import Sampling, sampling_extra
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.lines import run_of_file, with_group_rule
from rollout_io.formats.parsing.messages import MESSAGE, read_message
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.start import like

_SUFFIXES = (".traj.json", ".json", ".traj")
_EXIT = "exit"
_UNUSED = "FormatError"
UNREADABLE = "answers that the program could not use, whose text is not in the log: left out"
_MESSAGE = MESSAGE.plus(
    reads={"message": "extra.response extra.interrupt_type extra.model_response"},
    leaves={
        "facts about a call, and its output before it was rendered": "message/extra "
        "message/output message/provider_specific_fields message/usage message/id "
        "message/created_at message/model"
    },
)
_LEAVES = {
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


class _Info(msgspec.Struct, gc=False):
    exit_status: str | None = None
    model_stats: dict[str, float | None] = {}
    config: _Config = msgspec.field(default_factory=_Config)
    traceback: str | None = None
    exception_str: str | None = None


class Document(msgspec.Struct, gc=False):
    """A run."""

    messages: Annotated[list[msgspec.Raw], inner(_MESSAGE)]
    info: _Info = msgspec.field(default_factory=_Info)
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


def run_of(document: Document, place: Place) -> Run:
    """Return the run of a file; the instance is `instance_id`, or inferred from the file name."""
    return run_of_file(place, document.instance_id, _SUFFIXES)


def read(logged: Document, run: Run, _: Options) -> Trajectory:
    """Read the calls of a run.

    The exit status (`Submitted`, `LimitsExceeded`, ...) becomes the `stop_reason` of the last call
    and the column `exit_status`; a run that ended with an exception in the program (`traceback`)
    has failed.
    """
    where, info = run.places[0].where, logged.info
    error = _error(info)
    failed = run.failed or error is not None
    steps = steps_of(list(_calls(logged, f"{where}, messages")), where, failed=failed)
    for step in steps[-1:]:
        step.stop_reason = info.exit_status or step.stop_reason
    texts = {"exit_status": info.exit_status, "model": info.config.model.model_name}
    return Trajectory(
        steps=steps,
        error=error,
        metrics={name: value for name, value in info.model_stats.items() if value is not None},
        user_values={name: text for name, text in texts.items() if text},
    )


def _calls(logged: Document, where: str) -> Iterator[Call]:
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


def _error(info: _Info) -> str | None:
    if not info.traceback:
        return None
    last = info.traceback.strip().rpartition("\n")[2]
    return f"{info.exit_status or 'exception'}: {info.exception_str or last}"


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


ADAPTER = Records(
    records={"": Document},
    leaves=_LEAVES,
    bare="messages",
    run=run_of,
    read=read,
    is_record=_is_run,
    is_whole=lambda _: True,
    finish=with_group_rule,
).adapter("mini-swe-agent's trajectories (.traj.json), including the oldest (a list of messages)")
