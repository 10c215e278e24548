"""The fixed-base encoding of messages: their tokens after a constant base conversation.

Rendering messages by themselves would add a default system prompt. Rendering them in their own
conversation would not reproduce what the model generated either: templates like Qwen3's depend on
the position. They strip <think>...</think> from assistant messages before the last user message,
and put an empty think block into the last assistant message if it has none, so a message's text
changes when another message is appended. After the base, every assistant message is the last
message and follows the last user message. The model generated it in this position, with its
thinking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.literals import as_text
from rollout_io.retokenize.tokenizer import ChatTokenizer, Message, Tools
from schemas.errors import InputError

BASE: tuple[Message, ...] = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
)
"""Constant conversation that is rendered before the messages."""


@dataclass(frozen=True, slots=True)
class FixedBase:
    """The rendering of the base conversation, computed once per tokenizer and tools.

    Attributes:
        text: The rendered base.
        anchor: Tail of `text` from its last EOS token (the entire text if there is none).
            Tokenizers split texts at special tokens, so this tail suffices as context to encode
            what follows the base.
        anchor_ids: Ids of `anchor`.
        generation_prompt: Header of an assistant message after the base.
        generation_prompt_ids: Ids of that header.
    """

    text: str
    anchor: str
    anchor_ids: list[int]
    generation_prompt: str
    generation_prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and ids of messages, without the base."""

    text: str
    ids: list[int]


def encode_messages(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    tools: Tools | None = None,
    *,
    where: str = "messages",
) -> npt.NDArray[np.int32]:
    r"""Return the ids of messages, independent of the conversation around them.

    This is the fixed-base encoding, where ids() is the tokenizer and `base` consists of a system
    message and a user message:

        encode(messages) = ids(template(base + messages)) minus its prefix ids(template(base))

    The module docstring explains why simpler encodings fail.

    Pass consecutive tool messages in one call: Qwen3 renders them as one user block.

    Source: https://jybsuper.github.io/posts/multiturn_tokenization/

    Args:
        messages: OpenAI-style messages (`rollout_io.retokenize.chat_template.normalize`).
        tokenizer: From `load_tokenizer`.
        tools: Tool schemas for the template.
        where: Name of the conversation, for error messages.

    Returns:
        [tokens] int32; empty if there are no messages.

    Raises:
        InputError: `chat_template`: the template raised an error; `fixed_base`: the base is not a
            prefix of base + messages; `generation_prompt`: the template needs a generation prompt
            but has none; `message`, `tool_arguments`, `tokenizer`: a message is invalid.

    Example:
        With Qwen3's tokenizer and template:

        >>> encode_messages([{"role": "user", "content": "Hi"}], tokenizer).tolist()
        [151644, 872, 198, 13048, 151645, 198]
        >>> tokenizer.decode(_)
        '<|im_start|>user\nHi<|im_end|>\n'
        >>> encode_messages([{"role": "assistant", "content": "Hi"}], tokenizer).tolist()
        [151644, 77091, 198, 151667, 271, 151668, 271, 13048, 151645, 198]
        >>> tokenizer.decode(_)
        '<|im_start|>assistant\n<think>\n\n</think>\n\nHi<|im_end|>\n'
    """
    plain = [normalize(m, f"{where}, message {i}") for i, m in enumerate(messages)]
    plain, tools, tokenizer, _ = as_text(plain, tools, tokenizer, where)
    pieces = encode_pieces([plain] if plain else [], tokenizer, tools, [where])
    return np.array([token for piece in pieces for token in piece.ids], np.int32)


def encode_pieces(
    runs: Sequence[Sequence[Message]],
    tokenizer: ChatTokenizer,
    tools: Tools | None,
    places: Sequence[str],
) -> list[Piece]:
    """Encode each run of messages after the fixed base, in linear time.

    Args:
        runs: Normalised messages, at least one per run.
        tokenizer: From `load_tokenizer`.
        tools: Tool schemas.
        places: Name of each run, for error messages.

    Raises:
        InputError: As for `encode_messages`.
    """
    if not runs:
        return []
    base = fixed_base(tokenizer, tools, places[0])
    texts = [
        _after(base.text, tokenizer.render([*BASE, *run], tools, where=place), place)
        for run, place in zip(runs, places, strict=True)
    ]
    all_ids = tokenizer.encode([base.anchor + text for text in texts], places)
    cut = len(base.anchor_ids)
    for ids, place in zip(all_ids, places, strict=True):
        if ids[:cut] != base.anchor_ids:
            finding = "a token spans the end of the base conversation and the start of the message"
            hint = "use the chat template of this model: its markers must be special tokens"
            raise _not_a_prefix(place, finding, hint)
    return [Piece(text, ids[cut:]) for text, ids in zip(texts, all_ids, strict=True)]


def fixed_base(tokenizer: ChatTokenizer, tools: Tools | None, where: str) -> FixedBase:
    """Return the rendered base conversation, cached per tokenizer and tools.

    Raises:
        InputError: `tools`: the tools are not JSON; `chat_template`: the template fails on the
            base; `fixed_base`: the generation prompt is not at the end; `generation_prompt`: the
            template has no generation prompt, yet writes a header before assistant messages.
    """
    try:
        key = json.dumps(list(tools) if tools else None)
    except (TypeError, ValueError, RecursionError) as error:
        finding = f"the tools are not a list of JSON schemas: {error}"
        raise InputError("tools", where, finding) from None
    return _fixed_base(tokenizer, key)


@lru_cache(maxsize=64)
def _fixed_base(tokenizer: ChatTokenizer, tools_json: str) -> FixedBase:
    where, tools = f"{tokenizer.name}: the fixed base", json.loads(tools_json)
    text = tokenizer.render(BASE, tools, where=where)
    prompted = tokenizer.render(BASE, tools, generation_prompt=True, where=where)
    header = _after(text, prompted, where)
    if not header:
        _check_headless(tokenizer, text, tools, where)
    start = text.rfind(tokenizer.eos_token) if tokenizer.eos_token else -1
    anchor = text[max(start, 0) :]
    ids, anchor_ids, both = tokenizer.encode([text, anchor, anchor + header], [where] * 3)
    if ids[len(ids) - len(anchor_ids) :] != anchor_ids:
        # The tail alone is tokenized differently: use the entire base as context.
        anchor, anchor_ids = text, ids
        (both,) = tokenizer.encode([prompted], [where])
    return FixedBase(text, anchor, anchor_ids, header, both[len(anchor_ids) :])


def _check_headless(tokenizer: ChatTokenizer, text: str, tools: Tools | None, where: str) -> None:
    """Reject a template that begins assistant messages with a header but has no generation prompt.

    Such a header would be trained on.
    """
    answer = {"role": "assistant", "content": "answer"}
    shown = _after(text, tokenizer.render([*BASE, answer], tools, where=where), where)
    if not shown.lstrip().startswith("answer"):
        finding = f"the template has no generation prompt, but begins answers with {shown[:40]!r}"
        hint = "change the template so that it appends this text when add_generation_prompt is true"
        raise InputError("generation_prompt", where, finding, "", hint)


def _after(base: str, text: str, where: str) -> str:
    if not text.startswith(base):
        hint = "use a template that only appends, such as --chat-template qwen3_acc_thinking"
        raise _not_a_prefix(where, "the chat template changes earlier messages", hint)
    return text[len(base) :]


def _not_a_prefix(where: str, got: str, hint: str) -> InputError:
    return InputError("fixed_base", where, got, "", hint)
