"""The `mini_swe_agent` format: trajectories of mini-swe-agent, one JSON document per run.

    {"trajectory_format": "mini-swe-agent-1.1", "instance_id": "astropy__astropy-12907",
     "info": {"exit_status": "Submitted", "model_stats": {...}, "config": {...}},
     "messages": [{"role": "assistant", "content": ..., "extra": {"response": {...}}}, ...]}

A run has one context. `extra.response` is the raw response of the API, which may contain the
engine's tokens. Older files have no `extra`; the oldest are a bare list of messages. The file
has no reward: submissions are scored elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollout_io.dataset.opening import read_input
from rollout_io.formats.base import (
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.parsing.bodies import NO_JSON, Sampling
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.documents import (
    find_documents,
    run_of_file,
    with_group_rule,
)
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.lines import read_record
from rollout_io.formats.parsing.messages import MESSAGE, read_message
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.sampling import sampling_extra
from rollout_io.formats.start import Start

_SUFFIXES = (".traj.json", ".json", ".traj")
_MARKS = (b'"messages"', b'"mini_version"', b'"trajectory_format"', b"<returncode>")
_EXIT = "exit"


CONTENTS = Contents(
    reads={
        "": "trajectory_format instance_id info.exit_status info.model_stats info.traceback "
        "info.exception_str info.config.model.model_name info.config.model.model_kwargs"
    },
    leaves={
        "settings, from which the harness renders messages": "info.config info.mini_version",
        "the result of the run": "info.submission info.exit_status_details",
    },
    inner={
        "messages": MESSAGE.plus(
            reads={"message": "extra.response"},
            leaves={
                "facts about a call, and its output before it was rendered": "message/extra "
                "message/output message/provider_specific_fields message/usage message/id "
                "message/created_at message/model"
            },
        )
    },
)


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


class _TrajectoryFile(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]
    info: _Info = msgspec.field(default_factory=_Info)
    instance_id: str | None = None


class _Extra(msgspec.Struct, gc=False):
    response: msgspec.Raw = NO_JSON


class _Reply(msgspec.Struct, gc=False):
    role: str | None = None
    object: str | None = None
    extra: _Extra | None = None

    @property
    def is_call(self) -> bool:
        return self.role == "assistant" or self.object == "response"


class _Stats(msgspec.Struct, gc=False):
    api_calls: int


class _HeadInfo(msgspec.Struct, gc=False):
    mini_version: str | None = None
    model_stats: _Stats | None = None


class _Role(msgspec.Struct, gc=False):
    role: str | None = None


class _Head(msgspec.Struct, gc=False):
    messages: list[_Role]
    trajectory_format: str = ""
    info: _HeadInfo = msgspec.field(default_factory=_HeadInfo)

    def __post_init__(self) -> None:
        is_known = self.info.mini_version is not None or self.info.model_stats is not None
        if not (self.trajectory_format.startswith("mini-swe-agent") or is_known):
            raise ValueError("the record is not a mini-swe-agent trajectory")


class _Bare(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    role: str
    content: str


_RUN_DECODER = msgspec.json.Decoder(_TrajectoryFile)
_LIST_DECODER = msgspec.json.Decoder(list[msgspec.Raw])
_REPLY_DECODER = msgspec.json.Decoder(_Reply)
_HEAD_DECODER = msgspec.json.Decoder(_Head)
_BARE_DECODER = msgspec.json.Decoder(list[_Bare])


def find_runs(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per file; the instance is `instance_id`, or inferred from the file name."""
    yield from with_group_rule(find_documents(inputs, progress, _find))


def _find(place: Place, content: bytes) -> Iterator[Run]:
    yield run_of_file(place, _decode(content, place.where).instance_id, _SUFFIXES)


def _decode(content: bytes, where: str) -> _TrajectoryFile:
    if content.lstrip().startswith(b"["):
        return _TrajectoryFile(decode_document(_LIST_DECODER, content, where))
    return decode_document(_RUN_DECODER, content, where)


def read_run(run: Run, _: Options) -> Trajectory:
    """Read the calls of a run.

    The exit status (`Submitted`, `LimitsExceeded`, ...) becomes the `stop_reason` of the last call
    and the column `exit_status`; a run that ended with an exception in the program (`traceback`)
    has failed.

    Raises:
        RolloutError: The run cannot be used (`no_calls`, `no_token_ids`, `record_type`, ...).
    """
    (place,) = run.places
    content = read_record(place)
    logged = _decode(content, place.where)
    account(CONTENTS, b'{"messages":%s}' % content if content[:1] == b"[" else content)
    info = logged.info
    error = _error(info)
    failed = run.failed or error is not None
    calls = list(_calls(logged, f"{place.where}, messages"))
    steps = steps_of(calls, place.where, failed=failed)
    for step in steps[-1:]:
        step.stop_reason = info.exit_status or step.stop_reason
    texts = {"exit_status": info.exit_status, "model": info.config.model.model_name}
    return Trajectory(
        steps=steps,
        error=error,
        metrics={name: value for name, value in info.model_stats.items() if value is not None},
        user_values={name: text for name, text in texts.items() if text},
    )


def _calls(logged: _TrajectoryFile, where: str) -> Iterator[Call]:
    sampling = logged.info.config.model.model_kwargs
    history: list[Message] = []
    for index, raw in enumerate(logged.messages):
        here = f"{where}[{index}]"
        reply = decode_document(_REPLY_DECODER, bytes(raw), here)
        if reply.role == _EXIT:
            continue
        message = read_message(raw, here)
        if reply.is_call:
            yield Call(
                where=here,
                prompt=list(history),
                reply=message,
                answer=reply.extra.response if reply.extra else None,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                sampling_extra=sampling_extra(sampling),
            )
        history.append(message)


def _error(info: _Info) -> str | None:
    if not info.traceback:
        return None
    last = info.traceback.strip().rpartition("\n")[2]
    said = info.exception_str or last
    return f"{info.exit_status or 'exception'}: {said}"


def recognizes(start: Start) -> bool:
    """True if a file is a trajectory of mini-swe-agent.

    A bare list of messages is recognized if every user message between the first and the last reply
    is command output in this agent's format (`<returncode>`).
    """
    path = start.path
    if start.is_document_of(_HEAD_DECODER, _MARKS):
        return True
    return start.is_document_of(_BARE_DECODER, _MARKS[-1:]) and _is_bare(path)


def _is_bare(path: Path) -> bool:
    try:
        messages = _BARE_DECODER.decode(read_input(path))
    except (OSError, ValueError, RecursionError):
        return False
    outputs = [m for m in messages[3:-1] if m.role == "user"]
    roles = [message.role for message in messages[:3]]
    is_run = roles == ["system", "user", "assistant"] and bool(outputs)
    return is_run and all(m.content.startswith("<returncode>") for m in outputs)


ADAPTER = Adapter(
    summary="mini-swe-agent's trajectories (.traj.json), including the oldest (a list of messages)",
    recognizes=recognizes,
    find=find_runs,
    read=read_run,
    is_text=True,
    contents=CONTENTS,
)
