"""The encoding of messages: their tokens after a constant base conversation, with texts as plain text.

Rendering messages by themselves would add a default system prompt. Rendering them in their own
conversation would not reproduce what the model generated either: templates like Qwen3's depend on
the position. They strip <think>...</think> from assistant messages before the last user message,
and put an empty think block into the last assistant message if it has none, so a message's text
changes when another message is appended. After the base, every assistant message is the last
message and follows the last user message. The model generated it in this position, with its
thinking.

Tokenizers turn the text of a special token, such as "<|im_end|>", into its id, wherever it occurs.
In a file that a tool has read, or in an answer, it is not a control token: as one, it would end the
message. So before a conversation with such texts is rendered, each is replaced by a mark, which
survives the chat template. In the rendered text, the template's own special tokens get private
names and the marks become the texts again. A copy of the tokenizer, whose special tokens have
these names, encodes the result: all tokens around are as the tokenizer would split them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer, Message, Tools
from schemas.errors import InputError
from schemas.imports import requires_extra

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


_NAME = "<|rollouts-control-{}|>"
_STEM = _NAME.partition("{")[0]
_MAX_TRIES = 64


class Literal(NamedTuple):
    """A conversation whose texts contain no special tokens, and the tokenizer for it.

    Attributes:
        messages: The messages; special tokens in their texts are replaced by marks.
        tools: The tool definitions, in the same way.
        tokenizer: Renders and encodes the conversation; encodes marks as the texts they replace.
        num_texts: Number of special tokens in the texts.
    """

    messages: list[dict[str, Any]]
    tools: Tools | None
    tokenizer: ChatTokenizer
    num_texts: int


def as_text(
    messages: Sequence[Message], tools: Tools | None, tokenizer: ChatTokenizer, where: str
) -> Literal:
    """Prepare a conversation so that special tokens in its texts are encoded as plain text.

    Args:
        messages: Normalised messages.
        tools: Tool schemas.
        tokenizer: From `load_tokenizer`.
        where: Name of the conversation, for error messages.

    Returns:
        The arguments unchanged if no text contains a special token.

    Raises:
        InputError: `special_tokens`: a text contains a special token, but the tokenizer cannot
            encode it as plain text.
    """
    plain = [dict(message) for message in messages]
    patterns = {True: _pattern(tokenizer.control_tokens), False: _pattern(tokenizer.marker_tokens)}
    pairs: list[tuple[Message, re.Pattern[str]]]
    pairs = [(value, patterns[value["role"] == "assistant"]) for value in plain]
    pairs += [(tool, patterns[False]) for tool in tools or ()]
    texts = [(text, pattern) for value, pattern in pairs for text in _texts(value)]
    num_texts = sum(len(pattern.findall(text)) for text, pattern in texts)
    if not num_texts:
        return Literal(plain, tools, tokenizer, 0)
    literal = _literal(tokenizer, [text for text, _ in texts], where)
    marked = [_mapped(value, partial(literal.marked, pattern)) for value, pattern in pairs]
    size = len(plain)
    return Literal(marked[:size], None if tools is None else marked[size:], literal, num_texts)


def encode_text(
    texts: Sequence[str], tokenizer: ChatTokenizer, places: Sequence[str]
) -> tuple[list[list[int]], int]:
    """Return the ids of texts in which special tokens are plain text, and how many there are.

    Args:
        texts: Texts without special tokens, such as decoded text from which they were removed.
        tokenizer: From `load_tokenizer`.
        places: Name of each text, for error messages.

    Raises:
        InputError: `special_tokens`: see `as_text`; `tokenizer`: a text is invalid Unicode.
    """
    pattern = _pattern(tokenizer.marker_tokens)
    num_texts = sum(len(pattern.findall(text)) for text in texts)
    if not num_texts:
        return tokenizer.encode(texts, places), 0
    literal = _literal(tokenizer, texts, places[0])
    return literal.encode([literal.marked(pattern, text) for text in texts], places), num_texts


@dataclass(frozen=True, eq=False)
class LiteralTokenizer(ChatTokenizer):
    """A tokenizer that encodes marks as the text of special tokens.

    Attributes:
        marks: Mark of each special token.
        names: Private name of each special token.
        renamed: Copy of the backend (a `tokenizers.Tokenizer`) with these names.
    """

    marks: Mapping[str, str] = None  # type: ignore[assignment]
    names: Mapping[str, str] = None  # type: ignore[assignment]
    renamed: Any = None

    def marked(self, pattern: re.Pattern[str], text: str) -> str:
        """Replace the special tokens in a text by their marks."""
        return pattern.sub(lambda match: self.marks[match[0]], text)

    def encode(self, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
        """Return the ids of rendered texts; see `ChatTokenizer.encode`."""
        self.refuse_lone_surrogates(texts, places)
        texts = self.with_placeholders(texts)
        literals = {mark: token for token, mark in self.marks.items()}
        pattern, spelled = _pattern(self.names), _pattern(literals)
        marked = [pattern.sub(lambda match: self.names[match[0]], text) for text in texts]
        marked = [spelled.sub(lambda match: literals[match[0]], text) for text in marked]
        encoded = [
            encoding.ids for encoding in self.renamed.encode_batch(marked, add_special_tokens=False)
        ]
        ids = {self.backend.convert_tokens_to_ids(token) for token in self.names}
        for text, tokens, where in zip(texts, encoded, places, strict=True):
            if sum(token in ids for token in tokens) != len(pattern.findall(text)):
                raise _refused(self, where)
        return encoded


@lru_cache(maxsize=64)
def _compiled(tokens: frozenset[str]) -> re.Pattern[str]:
    longest = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of these tokens, the longest first; it matches nothing without tokens."""
    return _compiled(frozenset(tokens))


def _literal(tokenizer: ChatTokenizer, texts: Iterable[str], where: str) -> LiteralTokenizer:
    """Return the tokenizer whose marks occur in none of the texts."""
    whole = "\n".join(texts)
    if _STEM in whole:
        raise _refused(tokenizer, where, f"{_STEM!r} occurs as well")
    for number in range(_MAX_TRIES):
        marks = {token: _mark(token, number) for token in tokenizer.marker_tokens}
        if not any(mark in whole for mark in marks.values()):
            literal = tokenizer.literals.get(number)
            if literal is None:
                literal = tokenizer.literals[number] = _made(tokenizer, marks, where)
            return literal
    raise _refused(tokenizer, where, "all marks for it occur as well")


def _mark(token: str, number: int) -> str:
    """Return a text that reads like a special token but is none: `<|im_end|~0~>`."""
    return f"{token[:-1]}~{number}~{token[-1:]}"


def _made(tokenizer: ChatTokenizer, marks: dict[str, str], where: str) -> LiteralTokenizer:
    pattern, tokens = _pattern(marks), sorted(marks)
    names = {token: _NAME.format(i) for i, token in enumerate(tokens)}
    if any(pattern.search(text) for text in (*marks.values(), *names.values())):
        raise _refused(tokenizer, where, "its special tokens occur inside others")
    literal = LiteralTokenizer(
        tokenizer.name,
        tokenizer.backend,
        tokenizer.template_kwargs,
        tokenizer.expansions,
        marks=marks,
        names=names,
        renamed=_renamed(tokenizer, names, where),
    )
    sample = "".join(f"{token}a b\n" for token in tokens)
    if literal.encode([sample], [where]) != tokenizer.encode([sample], [where]):
        raise _refused(tokenizer, where)
    return literal


def _renamed(tokenizer: ChatTokenizer, names: Mapping[str, str], where: str) -> Any:
    with requires_extra("text", where):
        from tokenizers import Tokenizer
    backend = getattr(tokenizer.backend, "backend_tokenizer", None)
    if backend is None:
        raise _refused(tokenizer, where, "it has no tokenizer.json")
    try:
        state = json.loads(backend.to_str())
        for added in state["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), *rest] for token, *rest in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        state |= {"post_processor": None, "truncation": None, "padding": None}
        return Tokenizer.from_str(json.dumps(state))
    except Exception as error:  # tokenizers raises bare exceptions
        finding = " ".join(str(error).split())[:120]
        raise _refused(tokenizer, where, f"{type(error).__name__}: {finding}") from None


def _refused(tokenizer: ChatTokenizer, where: str, why: str = "") -> InputError:
    finding = (
        f"a text contains a special token of {tokenizer.name}, which the tokenizer cannot encode "
    )
    finding += f"as plain text{why and ': '}{why}"
    hint = "use a tokenizer with a tokenizer.json, or replace the special token in the text"
    return InputError("special_tokens", where, finding, "", hint)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for inner in value:
            yield from _texts(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_mapped(inner, change) for inner in value]
    return value
