r"""Prompt, response and loss mask of a logged conversation.

If the first answer begins with whitespace that fuses with the end of the generation prompt ("\n" +
"\n" is one token), the fused token becomes the first token of the response, and the prompt ends
before it. Prompt + response is then still the text of the conversation.

The chat template must render every part of a message. A part is dropped if the message renders to the same
text without it. In addition, content and reasoning must occur verbatim in the text, since a template may
truncate them. A text search alone is not enough: a tool's name or argument may occur in the content by
chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_io.retokenize.chat_template import KEEPS_ALL, normalize
from rollout_io.retokenize.encoding import (
    BASE,
    FixedBase,
    Piece,
    as_text,
    encode_pieces,
    fixed_base,
)
from rollout_io.retokenize.tokenizer import ChatTokenizer, Message, Tools
from schemas.errors import InputError, InvariantError, RolloutError

Logprobs = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTokens:
    """Tokens of the messages in a response.

    Attributes:
        response_ids: [tokens] int32.
        loss_mask: [tokens] bool; true exactly on the tokens that the model generates.
        logprobs: [tokens] float32 nats, 0.0 where `loss_mask` is false; None if unknown.
        spans: [assistant messages, 2] int32: start and length of each message's generated tokens,
            in order (`start` and `length` of the table's `segments`).
    """

    response_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32] | None
    spans: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenized(ResponseTokens):
    """Tokens of a conversation: prompt and response.

    Attributes:
        prompt_token_ids: [tokens] int32: everything before the first generated token.
        num_literal: Number of special tokens in texts, which are encoded as plain text.
    """

    prompt_token_ids: npt.NDArray[np.int32]
    num_literal: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant message, or the run of other messages between two assistant messages."""

    is_assistant: bool
    messages: list[dict[str, Any]]
    where: str


def retokenize(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    tools: Tools | None = None,
    logprobs: Logprobs | None = None,
    num_given: int = 0,
    where: str = "messages",
) -> Retokenized:
    r"""Convert a logged conversation to prompt, response and loss mask.

        prompt   = ids(template(messages before the first answer, generation prompt))
        response = the first answer after its header, then all later messages,
                   each encoded after a fixed base (`encode_messages`)

    Special tokens in the texts of messages and tools are encoded as plain text.

    The ids may differ from the sampled ids, because text does not determine its tokenization: mark
    such rows `token_source = "retokenized"`.

    Args:
        messages: The conversation: any roles up to the first assistant message, then assistant,
            user and tool.
        tokenizer: From `load_tokenizer`.
        tools: Tool schemas for the template.
        logprobs: Log-probabilities of each assistant message's span, nats; None if unknown.
        num_given: Number of leading messages that are part of the prompt regardless of their roles,
            such as few-shot examples or a shortened history; the first answer comes after them.
        where: Name of the conversation, for error messages.

    Raises:
        InputError: `special_tokens`: the tokenizer cannot encode a special token in a text as plain
            text; `retokenize`: the conversation has no answer, or begins with one; or any error
            of `encode_response`.

    Example:
        With SmolLM2's tokenizer and template ("<|im_start|>" is 1, "<|im_end|>" 2, newline 198):

        >>> said = {"system": "Be brief.", "user": "2+2?", "assistant": "4"}
        >>> chat = [{"role": role, "content": text} for role, text in said.items()]
        >>> tokenizer.decode(retokenize(chat, tokenizer).prompt_token_ids)
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n'
    """
    plain, tools, tokenizer, num_literal = as_text(
        _normalized(messages, where), tools, tokenizer, where
    )
    first = _first_answer(plain, num_given, where)
    response = _response(plain, first, tokenizer, tools, logprobs, where)
    header, values = int(response.spans[0, 0]), response.logprobs
    return Retokenized(
        prompt_token_ids=_prompt(plain[:first], header, tokenizer, tools, where),
        response_ids=response.response_ids[header:],
        loss_mask=response.loss_mask[header:],
        logprobs=None if values is None else values[header:],
        spans=response.spans - np.array([header, 0], np.int32),
        num_literal=num_literal,
    )


def encode_response(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    tools: Tools | None = None,
    logprobs: Logprobs | None = None,
    where: str = "messages",
) -> ResponseTokens:
    r"""Encode the messages after a prompt: ids, loss mask and log-probabilities.

    Corresponds to SkyRL's `get_response_ids_and_loss_mask_from_messages`, except that consecutive
    user and tool messages are encoded together, as templates render them.

    Each assistant message, and each run of other messages between two of them, is encoded after a
    fixed base (`encode_messages`) and appended. In an assistant message, the mask is false on the
    header (the generation prompt) and after the last EOS token; without an EOS token, it is true on
    everything after the header. The mask is true on a token that fuses the header's end with leading
    whitespace of the message, and false on user and tool messages.

    Args:
        messages: Assistant, user and tool messages.
        tokenizer: From `load_tokenizer`.
        tools: Tool schemas for the template.
        logprobs: Log-probabilities of each assistant message's span.
        where: Name of the conversation, for error messages.

    Raises:
        InputError: `message_role`: a role is unsupported; `generation_prompt`: an assistant message
            does not begin with the generation prompt, or renders to nothing after it; `text_kept`:
            the template drops a part of a message; or any error of `encode_messages`.
        InvariantError: `lengths_align`: `logprobs` does not have one value per generated token.

    Example:
        With SmolLM2's tokenizer and template:

        >>> answer = encode_response([{"role": "assistant", "content": "4"}], tokenizer)
        >>> answer.response_ids.tolist()
        [1, 520, 9531, 198, 36, 2, 198]
        >>> answer.loss_mask.astype(int).tolist()
        [0, 0, 0, 0, 1, 1, 0]
        >>> answer.spans.tolist()
        [[4, 2]]
    """
    plain, tools, tokenizer, _ = as_text(_normalized(messages, where), tools, tokenizer, where)
    return _response(plain, 0, tokenizer, tools, logprobs, where)


def _normalized(messages: Sequence[Message], where: str) -> list[dict[str, Any]]:
    return [normalize(message, f"{where}, message {i}") for i, message in enumerate(messages)]


def _first_answer(messages: list[dict[str, Any]], num_given: int, where: str) -> int:
    answers = (i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= num_given)
    first = next(answers, None)
    if not first:
        finding = "the conversation begins with an assistant message"
        finding = finding if first == 0 else "the conversation has no assistant message to train on"
        hint = "remove the conversation, or add a prompt and an answer"
        raise InputError("retokenize", where, finding, "", hint)
    return first


def _response(
    messages: list[dict[str, Any]],
    first: int,
    tokenizer: ChatTokenizer,
    tools: Tools | None,
    logprobs: Logprobs | None,
    where: str,
) -> ResponseTokens:
    turns = list(_turns(messages, first, where))
    places = [turn.where for turn in turns]
    pieces = encode_pieces([turn.messages for turn in turns], tokenizer, tools, places)
    base = fixed_base(tokenizer, tools, where)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for turn, piece in zip(turns, pieces, strict=True):
        _refuse_dropped(turn.messages, piece.text, tokenizer, tools, turn.where)
        if not piece.ids:
            raise _dropped(f"the {turn.messages[0]['role']} message", tokenizer, turn.where)
        if turn.is_assistant:
            start, end = _generated(piece, base, tokenizer.eos_token_id, turn.where)
            spans.append((len(ids) + start, end - start))
        ids += piece.ids
    mask = np.zeros(len(ids), np.bool_)
    for start, length in spans:
        mask[start : start + length] = True
    return ResponseTokens(
        response_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=None if logprobs is None else _aligned(logprobs, spans, mask, where),
        spans=np.array(spans, np.int32).reshape(-1, 2),
    )


def _turns(messages: list[dict[str, Any]], first: int, where: str) -> Iterator[_Turn]:
    for index in range(first, len(messages)):
        if (role := messages[index]["role"]) not in {"assistant", "user", "tool"}:
            hint = "put instructions before the first assistant message, or into user messages"
            expected = "assistant, user or tool after the first assistant message"
            place = f"{where}, message {index}"
            raise InputError("message_role", place, f"role {role!r}", expected, hint)
    numbered = enumerate(messages[first:], first)
    for is_assistant, group in groupby(numbered, lambda item: item[1]["role"] == "assistant"):
        run = list(group)
        parts = [[item] for item in run] if is_assistant else [run]
        for part in parts:
            place = f"{where}, message {part[0][0]}"
            yield _Turn(is_assistant, [message for _, message in part], place)


def _generated(piece: Piece, base: FixedBase, eos: int | None, where: str) -> tuple[int, int]:
    """Return the start and end of an assistant message's generated tokens."""
    pairs = enumerate(zip(piece.ids, base.generation_prompt_ids, strict=False))
    shorter = min(len(piece.ids), len(base.generation_prompt_ids))
    start = next((i for i, (ours, header) in pairs if ours != header), shorter)
    end = len(piece.ids)
    if eos in piece.ids[start:]:
        end -= piece.ids[::-1].index(eos)
    if piece.text.startswith(base.generation_prompt) and start < end:
        return start, end
    finding = f"the assistant message begins with {piece.text[:60]!r}, but must begin with the "
    finding += f"generation prompt, {base.generation_prompt!r}, followed by text"
    hint = "use a template that renders assistant messages exactly as the model generates them, "
    hint += "including thinking, such as qwen3_acc_thinking"
    raise InputError("generation_prompt", where, finding, "", hint)


def _aligned(
    logprobs: Logprobs, spans: list[tuple[int, int]], mask: npt.NDArray[np.bool_], where: str
) -> npt.NDArray[np.float32]:
    hint = "omit the log-probabilities: the text was tokenized differently when it was sampled"
    try:
        arrays = [np.array(list(values), np.float32) for values in logprobs]
    except (TypeError, ValueError) as error:
        finding = (
            f"the log-probabilities are not one list of numbers per assistant message: {error}"
        )
        raise InvariantError("lengths_align", where, finding, "", hint) from None
    if [array.shape for array in arrays] != [(length,) for _, length in spans]:
        sizes, lengths = [array.size for array in arrays], [length for _, length in spans]
        finding = f"the assistant messages have {lengths} tokens but {sizes} log-probabilities"
        raise InvariantError("lengths_align", where, finding, "", hint)
    result = np.zeros(len(mask), np.float32)
    result[mask] = [value for array in arrays for value in array]
    return result


def _prompt(
    messages: list[dict[str, Any]],
    num_kept: int,
    tokenizer: ChatTokenizer,
    tools: Tools | None,
    where: str,
) -> npt.NDArray[np.int32]:
    """Return the ids of the prompt, without the tokens that fuse with the answer's first text.

    Args:
        messages: Messages before the answer.
        num_kept: Number of generation-prompt tokens that belong to the prompt.
        tokenizer: From `load_tokenizer`.
        tools: Tool schemas.
        where: Name of the conversation, for error messages.
    """
    base = fixed_base(tokenizer, tools, where)
    if tools and base.text == fixed_base(tokenizer, None, where).text:
        raise _dropped("the definitions of the tools", tokenizer, where)
    text = tokenizer.render(messages, tools, generation_prompt=True, where=where)
    _refuse_dropped_texts(messages, text, tokenizer, where)
    _check_given_calls(messages, tokenizer, tools, where)
    ids, header = tokenizer.encode([text], [where])[0], base.generation_prompt_ids
    start = len(ids) - len(header)
    if ids[start:] != header:
        finding = f"the prompt does not end with the generation prompt {base.generation_prompt!r}"
        raise InputError("generation_prompt", where, finding)
    return np.array(ids[: start + num_kept], np.int32)


def _check_given_calls(
    messages: Sequence[dict[str, Any]], tokenizer: ChatTokenizer, tools: Tools | None, where: str
) -> None:
    """Check that the template keeps the tool calls of answers that are part of a prompt."""
    base = fixed_base(tokenizer, tools, where).text
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            place = f"{where}, message {index}"
            shown = {k: v for k, v in message.items() if k != "reasoning_content"}
            text = tokenizer.render([*BASE, shown], tools, where=place).removeprefix(base)
            _refuse_dropped([shown], text, tokenizer, tools, place)


_THINK = re.compile(r"(</?think>)")
_IM_MARKS = ("<|im_start|>", "<|im_end|>")

Messages = Sequence[Mapping[str, Any]]


class _Part(NamedTuple):
    """A part of a message, with a name for errors, a text, and the message without the part.

    Attributes:
        text: None if it may be rendered in several ways, such as a tool's arguments.
    """

    name: str
    text: str | None
    without: dict[str, Any]


def _refuse_dropped(
    messages: Messages, text: str, tokenizer: ChatTokenizer, tools: Tools | None, where: str
) -> None:
    """Check that the template drops no part of a message."""
    base = fixed_base(tokenizer, tools, where).text
    for i, message in enumerate(messages):
        for part in _parts(message):
            others = [*BASE, *messages[:i], part.without, *messages[i + 1 :]]
            is_found = part.text is None or part.text in text
            if not is_found or _renders_to(base + text, others, tokenizer, tools):
                raise _dropped(part.name, tokenizer, where)


def _refuse_dropped_texts(
    messages: Messages, text: str, tokenizer: ChatTokenizer, where: str
) -> None:
    """Check that a prompt's text contains the content of every message.

    Reasoning may be missing: some templates drop it from earlier answers, and the engine used the
    same template.
    """
    for i, message in enumerate(messages):
        content = _THINK.split(message["content"])[-1].strip()
        if content not in text:
            raise _dropped(_named_text(message, content), tokenizer, f"{where}, message {i}")


def _renders_to(
    text: str, messages: Messages, tokenizer: ChatTokenizer, tools: Tools | None
) -> bool:
    try:
        return tokenizer.render(messages, tools) == text
    except RolloutError:
        return False


def _dropped(part: str, tokenizer: ChatTokenizer, where: str) -> InputError:
    """Return the error for a chat template that drops a part of a message."""
    finding = f"the chat template drops {part}"
    hint = "use a different --chat-template, or put the text into the message's content"
    if _is_chatml(tokenizer):
        hint = f"use --chat-template {KEEPS_ALL}, which keeps it"
    return InputError("text_kept", where, finding, "", hint)


def _is_chatml(tokenizer: ChatTokenizer) -> bool:
    """True if each ChatML marker is a single token."""
    return all(len(ids) == 1 for ids in tokenizer.encode(_IM_MARKS, _IM_MARKS))


def _parts(message: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield each part of a message.

    Parts are its reasoning, the role of a tool message, each piece of its content (split at think
    tags), and the name and each argument of every tool call.
    """
    if reasoning := message.get("reasoning_content", "").strip():
        without = {k: v for k, v in message.items() if k != "reasoning_content"}
        yield _Part(f"the reasoning {_shown(reasoning)}", reasoning, without)
    if message["role"] == "tool":
        yield _Part("the role of a tool message", None, {**message, "role": "user"})
    pieces = _THINK.split(message["content"])
    for i, piece in enumerate(pieces):
        if (text := piece.strip()) and not i % 2:
            rest = "".join([*pieces[:i], *pieces[i + 1 :]])
            yield _Part(_named_text(message, text), text, {**message, "content": rest})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield from _parts_of_call(message, index, call)


def _parts_of_call(
    message: Mapping[str, Any], index: int, call: Mapping[str, Any]
) -> Iterator[_Part]:
    nested = isinstance(call.get("function"), Mapping)
    function = call["function"] if nested else call
    name, arguments = function["name"], function["arguments"]

    def with_call(**fields: Any) -> dict[str, Any]:
        changed = {**function, **fields}
        calls = [*message["tool_calls"]]
        calls[index] = {**call, "function": changed} if nested else changed
        return {**message, "tool_calls": calls}

    which = f"call {index + 1} of {len(message['tool_calls'])}"
    yield _Part(f"the name {name!r} of {which}", None, with_call(name=f"{name}_"))
    for key in arguments:
        rest = {k: v for k, v in arguments.items() if k != key}
        yield _Part(f"argument {key!r} of {name!r}, {which}", None, with_call(arguments=rest))


def _named_text(message: Mapping[str, Any], text: str) -> str:
    return f"the {message['role']} message's text {_shown(text)}"


def _shown(text: str) -> str:
    return f"{text!r:.60}"
