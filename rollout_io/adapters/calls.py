"""The `calls` format: JSONL, one LLM call a line, in any order, with the engine's exact tokens.

    {"session": "shop-1/0", "agent": "main", "time": 1795251821.16, "final": true,
     "request": {"messages": [...], "temperature": 1.0, ...},
     "response": {"prompt_token_ids": [...], "choices": [{"token_ids": [...], ...}], ...}}

`request` and `response` are as an OpenAI-compatible server took and gave them, asked for
`return_token_ids` and `logprobs`. `final`, `reward`, `policy_version`, `agent` and `time` are
optional; without `time`, calls of a session are in the order of the lines.

The log is read twice: once to check every line and to note where the calls of each session are,
once to yield trajectories; so memory holds a few words per call, however long the contexts are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.adapters import (
    Adapter,
    Progress,
    Step,
    Trajectory,
    natural_key,
    raise_first,
    refuse_repeated,
    split_session,
    tables,
)
from rollout_io.adapters.detect import has_record
from rollout_io.adapters.jsonl import decode_line, open_input, read_lines
from rollout_io.adapters.rewards import Key, Outcome, read_rewards
from rollout_io.adapters.sessions import Entry, check_outcomes, order_sessions, settle
from rollout_io.adapters.tokens import (
    INT32_MAX,
    broken,
    logprob_array,
    one_routing,
    route_array,
    token_ids,
)
from schemas.errors import RolloutError

_Int32 = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
_NO_JSON = msgspec.Raw(b"null")

_Temperature = Annotated[float, msgspec.Meta(ge=0, le=1e38)]


class _Request(msgspec.Struct, gc=False):
    messages: msgspec.Raw = _NO_JSON
    temperature: _Temperature | None = None
    top_p: _Temperature | None = None
    top_k: _Int32 | None = None


class _Token(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None


class _Message(msgspec.Struct, gc=False):
    reasoning: str | None = None
    content: str | None = None
    tool_calls: msgspec.Raw = _NO_JSON


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    message: _Message | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = _NO_JSON


class _Response(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _Call(msgspec.Struct, gc=False):
    session: str
    request: _Request
    response: _Response
    agent: str | None = None
    time: float | None = None
    final: bool = False
    reward: float | None = None
    policy_version: _Int32 | None = None


class _Head(msgspec.Struct, gc=False):
    session: str
    request: dict[str, msgspec.Raw]
    response: dict[str, msgspec.Raw]


@dataclass(slots=True)
class _Index:
    sessions: dict[Key, list[Entry]] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    routing: tuple[int, int] | None = None
    errors: list[RolloutError] = field(default_factory=list)


_HEAD_DECODER = msgspec.json.Decoder(_Head)
_DECODER = msgspec.json.Decoder(_Call)
_OPTIONAL = (
    *("rollout_logprobs", "reward", "stop_reason", "policy_version", "temperature", "top_p"),
    *("top_k", "agent", "messages", "response_text"),
)


def read_calls(
    paths: Sequence[str | Path],
    *,
    rewards: str | Path | None = None,
    progress: Progress | None = None,
) -> Iterator[pa.Table]:
    """Read logged calls as rollout tables, one row per sampled choice.

    Trajectories come in natural order of their instances (shop-2 before shop-10), repetitions
    ascending, so a group is contiguous; steps in order of time. Any permutation of lines that
    carry `time` gives the same rows. Each of the n choices of a call is a step.

    The outcome is the rewards file's, or the last call's own `reward`. Where it is known, earlier
    steps without a reward of their own get 0.0; where it is not, null stays null. A trajectory
    with an `error` in the rewards file has null rewards; a number given all the same is kept as
    `metrics["reward"]`.

    Args:
        paths: JSONL files; a session may spread over several.
        rewards: JSONL of outcomes, see `read_rewards`.
        progress: Told the bytes read; twice the size of the inputs in all.

    Returns:
        Tables of whole trajectories, all with one schema: the declared columns that the log has
        something for, then the string columns of the rewards file.

    Raises:
        RolloutError: Any bad record, before the first table: the first one's place, and how many
            more there are.
    """
    report = progress or (lambda _: None)
    outcomes = {} if rewards is None else read_rewards(rewards)
    index = _Index()
    refuse_repeated(paths)
    for path in paths:
        _index_file(Path(path), index, outcomes, report)
    errors = index.errors or list(order_sessions(index.sessions))
    errors = errors or list(check_outcomes(index.sessions, outcomes))
    if errors:
        raise_first(errors)
    if not index.sessions and not outcomes:
        where = ", ".join(str(p) for p in paths)
        raise RolloutError("no_calls", where, "no calls at all", "one JSON object a line")
    optional = index.present | {"source"} | _present_outcomes(index, outcomes)
    user_columns = sorted({name for o in outcomes.values() for name in o.user_values})
    trajectories = _trajectories(index, outcomes, report)
    return tables(trajectories, optional, user_columns, index.routing)


def _index_file(
    path: Path, index: _Index, outcomes: Mapping[Key, Outcome], report: Callable[[int], object]
) -> None:
    with open_input(path) as file:
        if not file.seekable():
            hint = "save it to a file first: a log is read twice"
            raise RolloutError("input_file", str(path), "a pipe", "a file", hint)
        for line in read_lines(file):
            where = f"{path}:{line.number}"
            report(len(line.content))
            try:
                call = decode_line(_DECODER, line.content, where)
                key = split_session(call.session, where)
                steps = _steps(call, where, failed=_is_failed(outcomes.get(key)))
                index.routing = one_routing(steps, index.routing, where)
            except RolloutError as error:
                index.errors.append(error)
                continue
            for step in steps:
                index.present.update(n for n in _OPTIONAL if getattr(step, n) is not None)
            entry = Entry(
                *(path, line.number, line.offset, len(line.content), call.time, call.final),
                len(call.response.prompt_token_ids or ()),
                hashlib.blake2b(line.content.rstrip(), digest_size=16).digest(),
                call.reward,
            )
            index.sessions.setdefault(key, []).append(entry)


def _steps(call: _Call, where: str, *, failed: bool) -> list[Step]:
    """The choices of a call as steps, by index; a call's own reward goes to its last choice."""
    choices = sorted(call.response.choices, key=lambda choice: choice.index)
    if not choices:
        raise broken("nonempty_response", where, "a response without choices", "at least 1 choice")
    prompt = _token_ids(call.response.prompt_token_ids, "prompt", where, failed=failed)
    steps = [_step(call, choice, prompt, where, failed=failed) for choice in choices]
    steps[-1].reward = call.reward
    return steps


def _step(
    call: _Call, choice: _Choice, prompt: npt.NDArray[np.int32], where: str, *, failed: bool
) -> Step:
    response = _token_ids(choice.token_ids, "response", where, failed=failed)
    request = call.request
    return Step(
        source=where,
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=_logprobs(choice.logprobs, len(response), where),
        rollout_expert_indices=_routes(choice, len(prompt) + len(response), where),
        stop_reason=choice.finish_reason,
        policy_version=call.policy_version,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        agent=call.agent,
        messages=_json_text(request.messages),
        response_text=_response_text(choice.message),
    )


def _token_ids(
    ids: list[int] | None, what: str, where: str, *, failed: bool
) -> npt.NDArray[np.int32]:
    if ids is None and not failed:
        hint = 'ask the engine for them: "return_token_ids": true in the request (vLLM)'
        got = f"a call without the token ids of its {what}"
        raise RolloutError("no_token_ids", where, got, "the ids the engine saw and sampled", hint)
    if not ids and failed:
        return np.zeros(0, np.int32)
    return token_ids(ids or (), what, where)


def _logprobs(
    logprobs: _Logprobs | None, num_tokens: int, where: str
) -> npt.NDArray[np.float32] | None:
    if logprobs is None or logprobs.content is None:
        return None
    return logprob_array([token.logprob for token in logprobs.content], num_tokens, where)


def _routes(choice: _Choice, num_tokens: int, where: str) -> npt.NDArray[np.int16] | None:
    place = f"{where}, choice {choice.index}, routed_experts"
    return route_array(choice.routed_experts, num_tokens, place)


def _json_text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode()
    return None if text == "null" else text


def _response_text(message: _Message | None) -> str | None:
    if message is None:
        return None
    parts = (message.reasoning, message.content, _json_text(message.tool_calls))
    known = [part for part in parts if part is not None]
    return "\n".join(known) if known else None


def _is_failed(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.error is not None


def _present_outcomes(index: _Index, outcomes: Mapping[Key, Outcome]) -> set[str]:
    found = set()
    for outcome in outcomes.values():
        kept = outcome.error is not None and outcome.reward is not None
        found |= {"error"} if outcome.error is not None else {"reward"}
        found |= {"metrics"} if outcome.metrics or kept else set()
    if "error" in found and "reward" in index.present:
        found.add("metrics")
    return found


def _trajectories(
    index: _Index, outcomes: Mapping[Key, Outcome], report: Callable[[int], object]
) -> Iterator[Trajectory]:
    keys = sorted({*index.sessions, *outcomes}, key=lambda key: (natural_key(key[0]), key[1]))
    with ExitStack() as stack:
        paths = {entry.path for entries in index.sessions.values() for entry in entries}
        files = {path: stack.enter_context(open_input(path)) for path in paths}
        for key in keys:
            outcome = outcomes.get(key)
            entries = index.sessions.get(key, [])
            steps = list(_read_steps(entries, files, report, failed=_is_failed(outcome)))
            yield settle(key, steps, outcome)


def _read_steps(
    entries: Iterable[Entry],
    files: Mapping[Path, BinaryIO],
    report: Callable[[int], object],
    *,
    failed: bool,
) -> Iterator[Step]:
    for entry in entries:
        file = files[entry.path]
        file.seek(entry.offset)
        report(entry.num_bytes)
        call = decode_line(_DECODER, file.read(entry.num_bytes), entry.where)
        yield from _steps(call, entry.where, failed=failed)


def recognizes(path: Path) -> bool:
    """Whether a file has lines with a `session`, a `request` and a `response`."""
    return has_record(path, _HEAD_DECODER)


ADAPTER = Adapter(
    summary="calls of an OpenAI-compatible engine (vLLM), as they went over the wire: JSONL",
    recognizes=recognizes,
    read=read_calls,
)
