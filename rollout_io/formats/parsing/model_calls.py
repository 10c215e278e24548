"""Conversion of logged model calls to steps: calls with their messages, and Responses objects with tokens.

The steps of calls (`steps_of`) are exact if the log has raw API responses with the engine's tokens. Otherwise
each context becomes one conversation: a chain of calls, each of which saw the prompt and the reply of the
previous one.

The output of a Responses object (OpenAI's Responses API) contains the model's items (messages, reasoning,
function calls) and the replies to them. The last item of each model call has `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs` (and `routed_experts`), which cover all items of the call.
`rollout_io.formats.dialects.responses` converts items to chat messages.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rollout_io.formats.base import Conversation, Step, note
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.parsing.bodies import Request, Response, Share
from rollout_io.formats.parsing.completions import ASK, holds_tokens, read_choices
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.tokens import logprob_array, route_array, token_ids
from schemas.errors import InputError
from schemas.messages import is_answer

_SAMPLED = b'"token_ids"'
EMPTY = "model calls whose answer says nothing: not trained on"
_FACTS = ("tools", "agent", "stop_reason", "temperature", "top_p")
_RESPONSE_DECODER = msgspec.json.Decoder(Response)


@dataclass(kw_only=True, slots=True)
class Call:
    """A model call, as logged by a harness."""

    where: str
    prompt: Sequence[Message]
    reply: Message
    answer: msgspec.Raw | None = None
    agent: str | None = None
    tools: list[dict[str, Any]] | None = None
    stop_reason: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    sampling_extra: str | None = None


def conversations_of(calls: Iterable[Call]) -> list[Conversation]:
    """Return the conversations of calls, in the order of their first calls.

    A call continues the latest conversation of its agent that its prompt extends, unless the prompt has
    another answer behind the last one. Any other call begins a new one (a sub-agent, or a shortened
    history).
    """
    log, order = Contexts(has_prompts=True), dict[str, int]()
    for call in calls:
        note(EMPTY, not is_answer(call.reply))
        order.setdefault(call.where, len(order))
        facts = {name: getattr(call, name) for name in _FACTS}
        log.call(call.prompt, call.reply, call.where, facts)
    steps = [step for step in log.steps() if isinstance(step, Conversation)]
    return sorted(steps, key=lambda step: order[step.source])


def steps_of(
    calls: Sequence[Call], where: str, *, failed: bool = False
) -> list[Step | Conversation]:
    """Convert calls to steps: exact steps if the responses have token ids, otherwise text.

    A failed run may have no calls; its calls without tokens are left out if others have tokens.

    Raises:
        InputError: `no_calls`: there are no calls; `no_token_ids`: only some responses have tokens.
    """
    if not calls and not failed:
        hint = "delete the log, or give its run an `error` in --rewards"
        raise InputError("no_calls", where, "the run has no model calls", hint=hint)
    answers = [(call, _answer(call)) for call in calls]
    exact = [(call, answer) for call, answer in answers if answer is not None]
    if not exact:
        conversations = conversations_of(calls)
        if calls and not conversations and not failed:
            raise InputError("no_calls", where, "no model call has an answer that says something")
        return [*conversations]
    if len(exact) < len(calls) and not failed:
        first = next(call for call, answer in answers if answer is None)
        finding = f"token ids are missing for {len(calls) - len(exact)} of {len(calls)} calls; "
        finding += f"this one has {_reason(first.answer)}"
        raise InputError("no_token_ids", first.where, finding, hint=ASK)
    return [step for call, answer in exact for step in _exact(call, answer)]


def _answer(call: Call) -> Response | None:
    """Return the response of a call, if it has tokens."""
    if call.answer is None or _SAMPLED not in bytes(call.answer):
        return None
    answer = decode_line(_RESPONSE_DECODER, bytes(call.answer), f"{call.where}, response")
    return answer if holds_tokens(answer) else None


def _reason(raw: msgspec.Raw | None) -> str:
    if raw is None or bytes(raw) == b"null":
        return "no API response"
    if _SAMPLED in bytes(raw):
        return "a response whose ids are null or empty"
    return "a response for which no ids were requested"


def _exact(call: Call, answer: Response) -> list[Step]:
    sent = msgspec.Raw(msgspec.json.encode(list(call.prompt)))
    request = Request(
        messages=sent, temperature=call.temperature, top_p=call.top_p, top_k=call.top_k
    )
    steps = read_choices(answer, request, call.where)
    for step in steps:
        step.agent = call.agent
        step.sampling_extra = call.sampling_extra
        step.stop_reason = step.stop_reason or call.stop_reason
    return steps


NO_TOKENS = "no_token_ids"
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
RawItem = dict[str, msgspec.Raw]

_ASK = "set return_token_id_information: true on the model server (vllm_model), and use an agent "
_ASK += "that passes the items on unchanged"
_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):(\d{1,9})x(\d{1,9})x(\d{1,9}):([A-Za-z0-9+/=]*)")
_Ids = list[int] | msgspec.UnsetType | None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int
    output_tokens: int


class _Incomplete(msgspec.Struct, gc=False):
    reason: str | None = None


class _Failure(msgspec.Struct, gc=False):
    message: str


class ResponsesObject(msgspec.Struct, gc=False):
    """The relevant fields of a Responses object."""

    output: list[msgspec.Raw]
    id: str | None = None
    usage: _Usage | None = None
    error: _Failure | None = None
    incomplete_details: _Incomplete | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    instructions: msgspec.Raw = NO_JSON
    tools: msgspec.Raw = NO_JSON


class _Item(msgspec.Struct, gc=False):
    type: str = "message"
    role: str | None = None
    prompt_token_ids: _Ids = msgspec.UNSET
    generation_token_ids: _Ids = msgspec.UNSET
    generation_log_probs: list[float] | msgspec.UnsetType | None = msgspec.UNSET
    routed_experts: msgspec.Raw = NO_JSON

    @property
    def is_answer(self) -> bool:
        """True if the item is a reply to the model, such as a tool result."""
        others = {"user", "system", "developer", "tool"}
        return self.type.endswith(("_output", "_response")) or self.role in others

    @property
    def has_tokens(self) -> bool:
        """True if the item ends a model call."""
        return any(getattr(self, name) for name in TOKEN_FIELDS)


_ITEM_DECODER = msgspec.json.Decoder(_Item)
_RAW_ITEM_DECODER = msgspec.json.Decoder(RawItem)
_ANY_ITEM_DECODER = msgspec.json.Decoder(dict[str, Any])


def items_hold_tokens(items: Iterable[msgspec.Raw]) -> bool:
    """True if any item has token fields, and thus ends a model call."""
    return any(_ITEM_DECODER.decode(raw).has_tokens for raw in items)


def read_steps(
    response: ResponsesObject, sent: Sequence[Any] | None, where: str, *, failed: bool = False
) -> list[Step]:
    """Return the model calls of a run, in order, one step each.

    The messages before the output are `sent`, if known. Calls of a failed run may lack tokens: they are
    left out.

    Raises:
        InputError: `no_calls`: the run has no model calls; `no_token_ids`: a call has no ids (the
            message explains what the log has instead); `token_fields`: an item has only some of the
            three fields; `sampled_item`: an input item has token ids; `usage_counts`: `usage`
            reports a different number of tokens.
        InvariantError: The ids, log-probabilities or routing break an invariant.
    """
    items = [
        decode_line(_ITEM_DECODER, bytes(raw), f"{where}output[{i}]")
        for i, raw in enumerate(response.output)
    ]
    calls = list(_calls(items, where))
    if failed:
        calls = [call for call in calls if items[call[-1]].has_tokens]
    elif not calls:
        hint = "delete the line, or give the run an `error` in a rewards file"
        raise InputError("no_calls", f"{where}output", "the run has no model calls", hint=hint)
    _refuse_missing(items, calls, where)
    dropped = {*TOKEN_FIELDS, "routed_experts"}
    decoded = map(_RAW_ITEM_DECODER.decode, response.output)
    raw_items = [{k: v for k, v in item.items() if k not in dropped} for item in decoded]
    steps = [_step(items[call[-1]], f"{where}output[{call[-1]}]") for call in calls]
    for step, call in zip(steps, calls, strict=True):
        if sent is not None:
            step.messages = msgspec.json.encode([*sent, *raw_items[: call[0]]]).decode()
        texts = {i: _said(raw_items[i], f"{where}output[{i}]") for i in call}
        step.texts = [text for parts in texts.values() for text in parts]
        step.response_text = "\n".join(
            "\n".join(parts) or msgspec.json.encode(raw_items[i]).decode()
            for i, parts in texts.items()
        )
    if steps and response.incomplete_details is not None:
        steps[-1].stop_reason = response.incomplete_details.reason
    if not failed:
        _check_usage(response.usage, steps, f"{where}usage")
    return steps


def _calls(items: Sequence[_Item], where: str) -> Iterator[range]:
    """Yield the range of the items of each model call.

    A call ends with an item that has tokens, or before an answer.
    """
    start = 0
    for i, item in enumerate(items):
        if item.is_answer and item.has_tokens:
            finding = "an input item has token ids, which only sampled items can have"
            hint = "keep the output exactly as the model server returned it"
            raise InputError("sampled_item", f"{where}output[{i}]", finding, hint=hint)
        if item.has_tokens:
            yield range(start, i + 1)
        elif item.is_answer and start < i:
            yield range(start, i)
        if item.is_answer or item.has_tokens:
            start = i + 1
    if start < len(items):
        yield range(start, len(items))


def _refuse_missing(items: Sequence[_Item], calls: Sequence[range], where: str) -> None:
    missing = [(n, call) for n, call in enumerate(calls, 1) if not items[call[-1]].has_tokens]
    if not missing:
        return
    number, call = missing[0]
    values = [getattr(items[i], name) for i in call for name in TOKEN_FIELDS]
    why = "its items lack the token fields, so the ids were not requested"
    if any(value is None for value in values):
        why = "its token fields are null"
    if any(value == [] for value in values):
        why = "its token fields are empty lists"
    finding = f"call {number} of {len(calls)} has no token ids: {why}"
    raise InputError(NO_TOKENS, f"{where}output[{call[0]}]", finding, hint=_ASK)


def _step(item: _Item, place: str) -> Step:
    prompt, response, logprobs = (getattr(item, name) for name in TOKEN_FIELDS)
    missing = [name for name in TOKEN_FIELDS if not isinstance(getattr(item, name), list)]
    if missing:
        finding = f"the item has some token fields, but lacks {' and '.join(missing)}"
        raise InputError("token_fields", place, finding, hint=_ASK)
    prompt_ids = token_ids(prompt, "prompt", place)
    response_ids = token_ids(response, "response", place)
    num_tokens = len(prompt_ids) + len(response_ids)
    routes = route_array(_routes(item.routed_experts), num_tokens, f"{place}.routed_experts")
    return Step(
        source=place,
        prompt_token_ids=prompt_ids,
        response_ids=response_ids,
        rollout_logprobs=logprob_array(logprobs, len(response_ids), place),
        rollout_expert_indices=routes,
    )


def _routes(raw: msgspec.Raw) -> msgspec.Raw:
    """Return routing as nested lists, decoded if it is in NeMo RL's format (dtype, shape, base64)."""
    match = _ENVELOPE.fullmatch(bytes(raw).decode().strip('"').replace("\\/", "/"))
    if match is None:
        return raw
    try:
        flat = np.frombuffer(base64.b64decode(match[5]), np.dtype(match[1]).newbyteorder("<"))
        nested = flat.reshape([int(size) for size in match.group(2, 3, 4)]).tolist()
    except ValueError:
        return raw
    return msgspec.Raw(msgspec.json.encode(nested))


def _check_usage(usage: _Usage | None, steps: Sequence[Step], where: str) -> None:
    """Compare steps with the server's counts, which cover all calls or only the last one."""
    if usage is None:
        return
    counts = [(len(step.prompt_token_ids), len(step.response_ids)) for step in steps]
    last, total = counts[-1], (sum(p for p, _ in counts), sum(r for _, r in counts))
    if (usage.input_tokens, usage.output_tokens) not in {total, last}:
        finding = f"`usage` reports {usage.input_tokens} + {usage.output_tokens} tokens, "
        finding += f"but the log has {total[0]} + {total[1]} ids"
        finding += f" ({last[0]} + {last[1]} in the last call)" if len(steps) > 1 else ""
        hint = "collect the run again: ids are missing or belong to a different call"
        raise InputError("usage_counts", where, finding, hint=hint)


def _said(raw_item: RawItem, place: str) -> list[str]:
    """Return the texts of a message or reasoning item; an empty list for other items."""
    item = decode_line(_ANY_ITEM_DECODER, msgspec.json.encode(raw_item), place)
    if str(item.get("type", "message")) not in {"message", "reasoning"}:
        return []
    return [part for name in ("summary", "content") for part in _parts(item.get(name))]


def _parts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]
