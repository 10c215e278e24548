"""Rows of verifiers v0 and its legacy environments: lines of `results.jsonl`.

v0 has `id` instead of `example_id`, and metrics as columns. A row has the engine's tokens if it has
`trajectory` (saved if `state_columns` lists it), otherwise only text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.dataset.opening import Version
from rollout_io.formats.base import Conversation, Options, Place, Step, Trajectory
from rollout_io.formats.engines.records import Open
from rollout_io.formats.grammar import Grammar, account
from rollout_io.formats.parsing.bodies import Sampling, Usage, sampling_extra
from rollout_io.formats.parsing.content import NO_JSON, Message, filled
from rollout_io.formats.parsing.jsonl import decode_line, read_document
from rollout_io.formats.parsing.messages import MESSAGE, openai_tools, read_messages, text_of
from rollout_io.formats.parsing.records import label, numbers, read_record
from rollout_io.formats.parsing.tokens import broken, logprob_array, same_ids, strict_ids
from schemas.errors import InputError

METADATA = "metadata.json"
_AS_SAVED = "use the file as the verifiers library saved it"
_NAMES = {"id", "example_id", "reward", "metrics", "is_completed"}
_Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]
Text = str | list[msgspec.Raw] | None


class _Tokens(msgspec.Struct, gc=False):
    prompt_ids: msgspec.Raw = NO_JSON
    completion_ids: msgspec.Raw = NO_JSON
    completion_mask: list[_Flag | bool] | None = None
    completion_logprobs: list[float] | None = None
    overlong_prompt: bool = False
    is_truncated: bool = False


class _Message(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    tokens: _Tokens | None = None


class _Response(msgspec.Struct, gc=False):
    message: _Message | None = None
    usage: Usage | None = None


class _Step(msgspec.Struct, gc=False):
    prompt: msgspec.Raw = NO_JSON
    completion: Text = None
    tokens: _Tokens | None = None
    response: _Response | None = None
    reward: float | None = None
    is_truncated: bool | None = None
    trajectory_id: str | None = None


class _Row(msgspec.Struct, gc=False):
    prompt: Text = None
    completion: Text = None
    reward: float | None = None
    metrics: dict[str, msgspec.Raw] | None = None
    info: Any = None
    tool_defs: Any = None
    error: Any = None
    stop_condition: str | None = None
    trajectory: list[_Step] | None = None


class Metadata(msgspec.Struct, gc=False):
    """Settings that all rows of a file share, from `metadata.json` beside it."""

    env: str | None = None
    env_id: str | None = None
    model: str | None = None
    sampling_args: Sampling | None = None


ROWS = Grammar(
    records={"": _Row},
    leaves={
        "facts about the row, not sent": "run_id env_name timing answer",
        "repeats the completion": "trajectory.response trajectory.response.message.* "
        "trajectory.response.message.tokens.prompt_mask trajectory.tokens.prompt_mask",
    },
).contents.plus(reads={"": "task id example_id"})
_ROW = msgspec.json.Decoder(_Row)
_ANY = msgspec.json.Decoder(Any)
_METADATA = msgspec.json.Decoder(Metadata)


def metadata_beside(path: Path) -> Metadata:
    """Read `metadata.json` in a file's directory; without it, all fields are None.

    Raises:
        InputError: `metadata.json` is unreadable or invalid (see `read_document`).
    """
    beside = path.parent / METADATA
    if not beside.is_file():
        return Metadata()
    return _metadata(beside, Version.of(beside))


@lru_cache(maxsize=64)
def _metadata(path: Path, _: Version) -> Metadata:
    """Read a file of metadata, again if it has changed."""
    return read_document(_METADATA, path)[0]


def read_row(record: Open, place: Place, options: Options) -> Trajectory:
    """Read the run of a row, as calls if they have tokens, else as text.

    Metrics are the reward, `metrics` and all other numbers of the row. Step rewards are left out if
    each of them is a copy of the row's reward.

    Raises:
        RolloutError: The row cannot be used (`no_token_ids`, `conflicting_ids`, `no_calls`, ...).
    """
    where, fields = place.where, record.fields
    content = read_record(place)
    row = decode_line(_ROW, content, where)
    account(ROWS, content)
    error = _error(row.error)
    if error is None and options.timeouts == "fail" and "timeout" in (row.stop_condition or ""):
        error = row.stop_condition
    rewards = {"reward": row.reward} if row.reward is not None else {}
    others = {name: value for name, value in fields.items() if name not in _NAMES}
    return Trajectory(
        steps=_steps(row, where, metadata_beside(place.path), failed=error is not None),
        reward=row.reward,
        error=error,
        metrics={**rewards, **numbers(others, where), **numbers(row.metrics or {}, where)},
        user_values=filled(
            stop_condition=row.stop_condition, task=label(fields.get("task"), where)
        ),
    )


def _error(error: Any) -> str | None:
    if isinstance(error, dict):
        parts = [error.get(name) for name in ("error", "message")]
        return ": ".join(str(p)[:500] for p in parts if isinstance(p, str) and p) or "an error"
    return str(error)[:500] if error else None


def _steps(
    row: _Row, where: str, metadata: Metadata, *, failed: bool
) -> Sequence[Step | Conversation]:
    calls = row.trajectory or []
    missing = [i for i, call in enumerate(calls) if call.tokens is None]
    if not calls or len(missing) == len(calls):
        return _conversation(row, where, metadata)
    if missing and not failed:
        place = f"{where}, trajectory[{missing[0]}].tokens"
        hint = "sample all calls with a client that returns tokens"
        finding = f"the tokens are null in {len(missing)} of {len(calls)} calls"
        raise InputError("no_token_ids", place, finding, hint=hint)
    agents = {call.trajectory_id for call in calls}
    copies = all(call.reward == row.reward for call in calls)
    steps: list[Step] = []
    for i, call in enumerate(calls):
        if call.tokens is None:
            continue
        step = _step(call, call.tokens, f"{where}, trajectory[{i}]", metadata)
        step.reward = None if copies else call.reward
        step.agent = call.trajectory_id if len(agents) > 1 else None
        steps.append(step)
    return steps


def _step(call: _Step, tokens: _Tokens, where: str, metadata: Metadata) -> Step:
    if tokens.overlong_prompt:
        finding = "the prompt exceeded the context, and its ids were cut off (overlong_prompt)"
        hint = "delete the row, or give its run an `error` in --rewards"
        raise InputError("no_token_ids", f"{where}.tokens", finding, hint=hint)
    prompt = _ids(tokens.prompt_ids, "prompt", where)
    response = _ids(tokens.completion_ids, "completion", where)
    sampling = metadata.sampling_args or Sampling()
    answer = call.response or _Response()
    reason = answer.message.finish_reason if answer.message else None
    usage = Usage()
    if not tokens.is_truncated:  # truncated to the trainer's context, so the originals differ
        _refuse_difference(tokens, answer.message.tokens if answer.message else None, where)
        usage = answer.usage or usage
    sent = bytes(call.prompt)
    completion = _messages(call.completion, "assistant")
    texts = [text for m in completion if (text := text_of(decode_line(_ANY, bytes(m), where)))]
    logprobs = None
    if tokens.completion_logprobs:
        logprobs = logprob_array(tokens.completion_logprobs, len(response), f"{where}.tokens")
    return Step(
        source=where,
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=logprobs,
        loss_mask=_mask(tokens, len(response), where),
        stop_reason=reason or ("length" if call.is_truncated else None),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        sampling_extra=sampling_extra(sampling),
        messages=None if sent == b"null" else sent.decode(),
        response_text="\n".join(texts) or None,
        texts=texts if len(completion) == 1 else (),
        num_counted=(usage.prompt_tokens or None, usage.completion_tokens or None),
    )


def _refuse_difference(tokens: _Tokens, others: _Tokens | None, where: str) -> None:
    """Compare a call's tokens with the tokens in its response, if the row has both."""
    if others is None:
        return
    for name in ("prompt_ids", "completion_ids"):
        ids, others_ids = bytes(getattr(tokens, name)), bytes(getattr(others, name))
        if others_ids != b"null":
            same_ids(ids, others_ids, name, where)
    if others.completion_logprobs and others.completion_logprobs != tokens.completion_logprobs:
        finding = "the two lists of completion_logprobs differ"
        raise InputError("conflicting_ids", where, finding, hint=_AS_SAVED)


def _ids(raw: msgspec.Raw, what: str, where: str) -> npt.NDArray[np.int32]:
    text = bytes(raw)
    if text == b"null":
        finding = f"the call has no {what}_ids"
        raise InputError("no_token_ids", f"{where}.tokens", finding, hint=_AS_SAVED)
    return strict_ids(text, what, f"{where}.tokens")


def _mask(tokens: _Tokens, num: int, where: str) -> npt.NDArray[np.bool_] | None:
    if tokens.completion_mask is None:
        return None
    mask = np.array([bool(value) for value in tokens.completion_mask], np.bool_)
    if len(mask) != num:
        finding, expected = f"a completion_mask of length {len(mask)}", f"{num}, one per token"
        raise broken("lengths_align", f"{where}.tokens", finding, expected)
    return None if mask.all() else mask


def _conversation(row: _Row, where: str, metadata: Metadata) -> list[Conversation]:
    messages = [
        *_read_messages(row.prompt, "user", "prompt", where),
        *_read_messages(row.completion, "assistant", "completion", where),
    ]
    if all(message["role"] != "assistant" for message in messages):
        return []
    tools = row.tool_defs
    if not tools and isinstance(row.info, dict):
        tools = row.info.get("oai_tools")
    sampling = metadata.sampling_args or Sampling()
    return [
        Conversation(
            source=where,
            messages=messages,
            tools=openai_tools(tools),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
    ]


def _messages(text: Text, role: str) -> list[msgspec.Raw]:
    """Return messages unchanged; plain text of completion environments becomes one message."""
    if isinstance(text, str):
        return [msgspec.Raw(msgspec.json.encode({"role": role, "content": text}))]
    return text or []


def _read_messages(text: Text, role: str, name: str, where: str) -> list[Message]:
    raws = _messages(text, role)
    for raw in raws:
        account(MESSAGE, raw, name)
    return read_messages(raws, f"{where}, {name}")
