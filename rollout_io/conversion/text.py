"""Conversion of logged text to steps with tokens, by re-tokenization, or without, to read it before.

Each answer of a conversation is trained on exactly once. Where a log has ids and text, the decoded
ids are compared with the text, to check that the tokenizer is the right one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from rollout_io.conversion.joining import Recorded
from rollout_io.conversion.rows import entries_of, expansions_of, with_pictures
from rollout_io.dataset.opening import Version
from rollout_io.formats.base import Completion, Conversation, Logged, Step, Trajectory, note
from rollout_io.formats.parsing.media import restored
from rollout_io.formats.parsing.messages import text_of
from rollout_io.formats.parsing.tokens import parse_ids, token_ids
from rollout_io.formats.parsing.witnesses import holds, missing_word
from rollout_io.retokenize.local import tokenizer_directory
from rollout_io.retokenize.tokenizer import PICTURE, picture_mark
from schemas.errors import ConfigError, InputError, InvariantError, RolloutError, quoted
from schemas.messages import RETOKENIZED, SAID, is_answer, marked, media_in
from schemas.metadata import DatasetMetadata

if TYPE_CHECKING:
    from rollout_io.retokenize import ChatTokenizer


MEDIA_ROWS = "re-tokenized rows with images or other parts that are not text"
MEDIA = "images and other parts that are not text, each replaced by a mark such as [image]"
PLACED = "images encoded as the placeholder of the chat template"
LITERALS = "special tokens in texts, encoded as plain text"
NO_TOKENS = "no_token_ids"
_NEEDS_TOKENIZER = "pass --tokenizer DIR to re-tokenize the text (approximate), or "
_COLLECT = "collect exact ids from the engine (return_token_ids)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Retokenizer:
    """Tokenizer and chat template for re-tokenization."""

    directory: str
    chat_template: str | None = None

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer, loaded once per process."""
        return cached_tokenizer(self.directory, self.chat_template)

    def conversation(self, conversation: Conversation) -> Step:
        """Encode a conversation as one row: the first prompt, then everything after it.

        The loss mask is true on the model's messages, and `spans` lists them. An assistant message
        that is not an answer (`is_answer`) is masked.
        """
        from rollout_io.retokenize import retokenize

        picture = self._marks(conversation)
        messages = [dict(marked(message, picture)) for message in conversation.messages]
        encoded = retokenize(
            messages,
            self.tokenizer,
            tools=conversation.tools,
            logprobs=conversation.logprobs,
            num_given=conversation.num_given,
            where=conversation.source,
        )
        note(LITERALS, encoded.num_literal)
        first = conversation.num_given
        spoken = [m for m in conversation.messages[first:] if m["role"] == "assistant"]
        answers = encoded.spans[[is_answer(message) for message in spoken]]
        loss_mask = np.zeros_like(encoded.loss_mask)
        for start, length in answers:
            loss_mask[start : start + length] = True
        step = _step_of(
            conversation,
            prompt_token_ids=encoded.prompt_token_ids,
            response_ids=encoded.response_ids,
            rollout_logprobs=encoded.logprobs,
            loss_mask=loss_mask,
            spans=[(int(start), int(length)) for start, length in answers],
            response_text=PICTURE.sub("[image]", _readable(messages[first:])),
            columns=conversation.columns,
        )
        parts = _media(conversation)
        if parts:
            note(MEDIA_ROWS)
            num_placed = sum(picture is not None and part["type"] == "image" for part in parts)
            note(PLACED, num_placed)
            note(MEDIA, len(parts) - num_placed)
            step.pictures = entries_of(parts, step, lambda: self.tokenizer if picture else None)
        return step

    def _marks(self, conversation: Conversation) -> Callable[[Mapping[str, Any]], str] | None:
        """Return what stands for pictures until the messages are rendered; None without a placeholder."""
        images = [part for part in _media(conversation) if part["type"] == "image"]
        placeholder = self.tokenizer.placeholder if images else None
        if placeholder is None or "\ufdd0" in _json_of(conversation.messages):
            return None
        expansions = expansions_of(images, self.tokenizer, conversation.source)
        self.tokenizer.expansions.clear()
        if expansions is not None and (processor := self.tokenizer.processor) is not None:
            for part, expansion in zip(images, expansions, strict=True):
                text = placeholder.replace(processor.token, expansion.text)
                self.tokenizer.expansions[picture_mark(part)] = text
        return picture_mark

    def completion(self, text: Completion) -> Step:
        """Encode a prompt and a response without roles as one row, verbatim, without a template."""
        prompt = self._ids(text.prompt, text.source, has_special=text.has_special[0])
        response = self._ids(text.response, text.source, has_special=text.has_special[1])
        return _step_of(
            text,
            prompt_token_ids=token_ids(prompt, "prompt", text.source),
            response_ids=token_ids(response, "response", text.source),
            response_text=text.response,
        )

    def _ids(self, text: str, where: str, *, has_special: bool) -> list[int]:
        from rollout_io.retokenize.encoding import encode_text

        if has_special:
            return self.tokenizer.encode([text], [where])[0]
        (ids,), num_literal = encode_text([text], self.tokenizer, [where])
        note(LITERALS, num_literal)
        return ids


def cached_tokenizer(directory: str, chat_template: str | None) -> ChatTokenizer:
    """Load a tokenizer once per process, and again if its files have changed."""
    files = [*sorted(Path(directory).glob("*")), Path(chat_template or directory)]
    versions = tuple(Version.of(file) for file in files if file.is_file())
    return _loaded(directory, chat_template, versions)


@lru_cache(maxsize=2)  # with the chosen template, and with the tokenizer's own
def _loaded(directory: str, chat_template: str | None, _: tuple[Version, ...]) -> ChatTokenizer:
    from rollout_io.retokenize import load_tokenizer

    return load_tokenizer(directory, chat_template, needs_template=False)


def retokenizer_of(
    tokenizer: str | None, chat_template: str | None, *, is_needed: bool
) -> tuple[Retokenizer | None, DatasetMetadata]:
    """Return the re-tokenizer, and the metadata fields that describe its tokenizer."""
    if tokenizer is None:
        if chat_template is not None:
            finding, hint = "a chat template needs a tokenizer", "pass --tokenizer DIR"
            raise ConfigError("tokenizer", "--chat-template", finding, "", hint)
        return None, DatasetMetadata()
    directory = tokenizer_directory(tokenizer)
    retokenizer = (
        Retokenizer(directory=directory, chat_template=chat_template) if is_needed else None
    )
    loaded = cached_tokenizer(directory, chat_template if is_needed else None)
    metadata = DatasetMetadata(
        tokenizer=tokenizer,
        tokenizer_fingerprint=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        chat_template_fingerprint=loaded.template_fingerprint if is_needed else None,
    )
    return retokenizer, metadata


def with_tokens(
    trajectory: Trajectory,
    retokenizer: Retokenizer | Untokenized | None,
    tokenizer: str | None = None,
    recorded: Recorded | None = None,
) -> list[Step]:
    """Return the steps of a trajectory; conversations and completions are re-tokenized.

    Text stays text with `Untokenized`, and is refused without a re-tokenizer. Recorded calls have the
    tokens of the log's answers. `tokenizer` is the directory of that of exact ids, if it is known.
    """
    if recorded is not None:
        return recorded.joined(trajectory, with_answers(trajectory))
    steps = []
    for step in with_answers(trajectory):
        if isinstance(step, Step):
            steps.append(with_pictures(step, partial(_tokenizer_of_ids, tokenizer)))
        elif retokenizer is None:
            raise text_alone(step)
        elif isinstance(step, Completion):
            steps.append(retokenizer.completion(step))
        else:
            step.messages = restored(step.messages)
            steps.append(retokenizer.conversation(step))
    return steps


def _tokenizer_of_ids(tokenizer: str | None) -> ChatTokenizer | None:
    return None if tokenizer is None else cached_tokenizer(tokenizer, None)


def _media(conversation: Conversation) -> list[Mapping[str, Any]]:
    return [part for message in conversation.messages for part in media_in(message)]


class TextAlone(InputError):
    """A log has text but no token ids; passing `--tokenizer` fixes it."""


def text_alone(step: Conversation | Completion) -> TextAlone:
    """Return the error for a log without token ids, to raise if there is no re-tokenizer."""
    why = step.tokenless if isinstance(step, Conversation) else None
    if why is None:
        finding = "the log has text but no token ids"
        return TextAlone(NO_TOKENS, step.source, finding, "", _NEEDS_TOKENIZER + _COLLECT)
    return TextAlone(NO_TOKENS, why.where, why.got, "", f"{_NEEDS_TOKENIZER}{why.hint}")


def is_of_tokenizer(error: RolloutError, retokenizer: Retokenizer | Untokenized | None) -> bool:
    """True if the error means that the tokenizer cannot be used for any text."""
    return retokenizer is not None and (error.rule, error.where) == (
        "tokenizer",
        retokenizer.directory,
    )


def _readable(messages: Sequence[dict[str, Any]]) -> str:
    """Join the texts of messages; all but assistant messages are prefixed with their role."""
    roles = [message["role"] for message in messages]
    prefixes = ["" if role == "assistant" else f"[{role}] " for role in roles]
    texts = [text_of(message) or "" for message in messages]
    return "\n".join(map(str.__add__, prefixes, texts))


MIN_CHARS = 64
"""Shorter answers without tool calls may equal an example in the prompt by chance."""


def with_answers(trajectory: Trajectory) -> list[Logged]:
    """Return the steps of a trajectory, with each conversation cut after its last answer.

    Messages after the last answer are omitted because they were not sent to the model.
    Conversations without an answer are omitted too. Everything before the first answer becomes the
    prompt (`num_given`).
    """
    if not any(isinstance(step, Conversation) for step in trajectory.steps):
        return list(trajectory.steps)
    steps = [cut for step in trajectory.steps if (cut := _cut(step)) is not None]
    if trajectory.steps and not steps and trajectory.error is None:
        finding = "no answer in the run has text, reasoning or tool calls"
        hint = "give the run an `error` in --rewards if every model call failed"
        raise InputError("no_calls", trajectory.steps[0].source, finding, "", hint)
    _refuse_repeated(step for step in steps if isinstance(step, Conversation))
    return steps


def _cut(step: Logged) -> Logged | None:
    if not isinstance(step, Conversation):
        return step
    numbered = enumerate(step.messages)
    answers = [i for i, m in numbered if i >= step.num_given and is_answer(m)]
    if not answers:
        return None
    return replace(step, messages=step.messages[: answers[-1] + 1], num_given=answers[0])


def _refuse_repeated(conversations: Iterable[Conversation]) -> None:
    """Reject a conversation whose prompt ends with the conversation's first answer.

    The prompt was logged after the call if it contains the answer more often than earlier
    conversations of the trajectory produced the answer. Short answers are exempt, see `MIN_CHARS`.
    """
    answered: Counter[bytes] = Counter()
    for conversation in conversations:
        spoken = [
            (i, msgspec.json.encode(message))
            for i, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]
        before = [text for i, text in spoken if i < conversation.num_given]
        sampled = [text for i, text in spoken if i >= conversation.num_given]
        answer = conversation.messages[conversation.num_given]
        texts = (str(answer.get(name) or "") for name in SAID)
        is_long = answer.get("tool_calls") or sum(map(len, texts)) >= MIN_CHARS
        if (
            is_long
            and before[-1:] == sampled[:1]
            and before.count(sampled[0]) > answered[sampled[0]]
        ):
            finding = "the last assistant message of the prompt is the answer itself"
            hint = "log the messages before the answer is appended to them, not after the call"
            raise InvariantError("response_in_prompt", conversation.source, finding, "", hint)
        answered.update(sampled)


_WORD = re.compile(r"[A-Za-z]{4,}")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_MIN_WORDS = 6


def check_decoded(steps: Iterable[Step], directory: str) -> bool:
    """Decode the sampled ids and compare them with the text in the log; true if it has any.

    If the log has the text of each token next to its log-probability, all tokens are compared;
    otherwise only the text of one response per run, and the words of all tool calls. If the harness
    stored that text in a modified form (parsed, or joined with tool calls), only its words are compared
    (`has_words_of`).
    """
    is_sampled = is_compared = False
    for step in steps:
        whole_text = () if step.token_text is None else (step.token_text,)
        texts = whole_text or (() if is_sampled else step.texts)
        edited = None if texts or is_sampled else step.response_text
        if edited is not None and len(_words(edited)) < _MIN_WORDS:
            edited = None  # too few to tell tokenizers apart
        if step.token_source == RETOKENIZED or not (texts or edited or step.called):
            continue
        tokenizer = cached_tokenizer(directory, None)
        ids = _ids(step)
        if not ids or max(ids) >= tokenizer.vocab_size or min(ids) < 0:
            continue  # reported by token_range
        decoded = tokenizer.decode_each(ids) if whole_text else tokenizer.decode(ids)
        is_sampled, is_compared = is_sampled or bool(not whole_text and (texts or edited)), True
        for text in texts:
            if not holds(decoded, text):
                raise _other(step, directory, decoded, text)
        if (word := missing_word(decoded, step.called)) is not None:
            raise _other(step, directory, decoded, f"a tool call with {word}")
        if edited and not has_words_of(decoded, edited):
            raise _other(step, directory, decoded, edited)
    return is_compared


def has_words_of(decoded: str, text: str) -> bool:
    """True if at least a third of the English words of a text occur in decoded tokens.

    Harnesses may store a response parsed, without markup, or escaped differently, so the texts need
    not be equal. With the tokenizer of a different model, nearly all words differ. Only words of at
    least four letters count.

    Example:
        >>> text = "Analysis: the terminal is ready. Plan: create a directory"
        >>> has_words_of('{"analysis": "the terminal is ready", "plan": "create', text)
        True
        >>> has_words_of("ized distled progironient tuvwxyz{|}~", text)
        False
    """
    words = _words(text)
    return 3 * sum(word in decoded for word in words) >= len(words)


def _words(text: str) -> set[str]:
    # Remove escapes such as \n, whose letter would otherwise join the next word. If the backslash
    # is literal, the rest of the word remains and still occurs in the decoded tokens.
    return set(_WORD.findall(_ESCAPE.sub(" ", text)))


def _ids(step: Step) -> list[int]:
    ids = step.response_ids
    if not isinstance(ids, bytes):
        return [int(token) for token in ids]
    try:
        parsed: list[int] = parse_ids([ids])[0].tolist()
    except ValueError:  # reported when the table is built
        return []
    return parsed


def _other(step: Step, directory: str, decoded: str, text: str) -> InputError:
    finding = f"{directory} decodes the response ids to {quoted(decoded)}"
    finding += f", but the logged text is {quoted(text)}"
    hint = (
        "pass the tokenizer of the model that sampled the ids, or check that ids and text belong "
    )
    hint += "to the same call"
    return InputError("other_tokenizer", step.source, finding, "", hint)


@dataclass(frozen=True, slots=True)
class Untokenized:
    """Stands in for a `Retokenizer` where there is no tokenizer: the steps have text and empty ids.

    All other values are those of the conversion. A conversation has one empty segment per answer, so
    that its turns can be counted.

    Example:
        >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> step = Untokenized().conversation(
        ...     Conversation(source="a:1", messages=chat, num_given=1)
        ... )
        >>> len(step.response_ids), step.spans
        (0, [(0, 0)])
    """

    directory: ClassVar[str] = ""

    def conversation(self, conversation: Conversation) -> Step:
        """Return a conversation as one row."""
        messages = conversation.messages[conversation.num_given :]
        spans = [(0, 0) for message in messages if is_answer(message)]
        return _step_of(conversation, spans=spans, columns=conversation.columns)

    def completion(self, text: Completion) -> Step:
        """Return a prompt and a response without roles as one row."""
        return _step_of(text, response_text=text.response)


_COMMON = [f.name for f in fields(Completion) if f.name in Step.__struct_fields__]


def _step_of(logged: Conversation | Completion, **values: Any) -> Step:
    """Return the step of a logged text: what both have, and these values."""
    sent = logged.messages if isinstance(logged, Conversation) else logged.prompt
    common = {name: getattr(logged, name) for name in _COMMON}
    return Step(**common, **values, token_source=RETOKENIZED, messages=_json_of(sent))


def _json_of(sent: Sequence[Mapping[str, Any]] | str) -> str:
    """Return messages, or a prompt, as JSON."""
    return msgspec.json.encode(sent).decode()
