"""Conversion of logged text to steps with tokens, by re-tokenization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout_io.conversion.answers import with_answers
from rollout_io.dataset.opening import Version
from rollout_io.formats.base import Completion, Conversation, Step, Trajectory
from rollout_io.formats.parsing.messages import text_of
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.tokens import token_ids
from rollout_io.retokenize.local import tokenizer_directory
from schemas.errors import ConfigError, InputError, RolloutError
from schemas.messages import RETOKENIZED, is_answer
from schemas.metadata import DatasetMetadata

if TYPE_CHECKING:
    from rollout_io.retokenize import ChatTokenizer

LITERALS = "special tokens in texts, encoded as plain text"
NO_TOKENS = "no_token_ids"
_NEEDS_TOKENIZER = "pass --tokenizer DIR to re-tokenize the text (approximate), or "
_COLLECT = "collect exact ids from the engine (return_token_ids)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Retokenizer:
    """Tokenizer and chat template for re-tokenization.

    Attributes:
        directory: Local directory of the tokenizer.
        chat_template: Name or file of the template; None uses the tokenizer's.
    """

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

        encoded = retokenize(
            conversation.messages,
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
        return Step(
            source=conversation.source,
            prompt_token_ids=encoded.prompt_token_ids,
            response_ids=encoded.response_ids,
            rollout_logprobs=encoded.logprobs,
            loss_mask=loss_mask,
            trains=conversation.trains,
            spans=[(int(start), int(length)) for start, length in answers],
            token_source=RETOKENIZED,
            reward=conversation.reward,
            stop_reason=conversation.stop_reason,
            temperature=conversation.temperature,
            top_p=conversation.top_p,
            agent=conversation.agent,
            messages=_json(conversation.messages),
            response_text=_readable(conversation.messages[first:]),
            metrics=conversation.metrics,
        )

    def completion(self, text: Completion) -> Step:
        """Encode a prompt and a response without roles as one row, verbatim, without a template.

        Raises:
            RolloutError: `nonempty_prompt`, `nonempty_response`: one of the texts is empty.
        """
        prompt = self._ids(text.prompt, text.source, has_special=text.has_special[0])
        response = self._ids(text.response, text.source, has_special=text.has_special[1])
        return Step(
            source=text.source,
            prompt_token_ids=token_ids(prompt, "prompt", text.source),
            response_ids=token_ids(response, "response", text.source),
            trains=text.trains,
            token_source=RETOKENIZED,
            reward=text.reward,
            stop_reason=text.stop_reason,
            temperature=text.temperature,
            top_p=text.top_p,
            agent=text.agent,
            messages=_json(text.prompt),
            response_text=text.response,
            metrics=text.metrics,
        )

    def _ids(self, text: str, where: str, *, has_special: bool) -> list[int]:
        from rollout_io.retokenize.literals import encode_text

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
    """Return the re-tokenizer, and the metadata fields that describe its tokenizer.

    Args:
        tokenizer: Directory, or Hub id in the local cache.
        chat_template: See `Retokenizer`.
        is_needed: True if the log contains text to encode.

    Raises:
        ConfigError: `tokenizer`, `chat_template`: the option is missing or cannot be used.
        InputError: `tokenizer`: the tokenizer is not found, or cannot be loaded.
    """
    if tokenizer is None:
        if chat_template is not None:
            got, hint = "a chat template needs a tokenizer", "pass --tokenizer DIR"
            raise ConfigError("tokenizer", "--chat-template", got, "", hint)
        return None, DatasetMetadata()
    directory = tokenizer_directory(tokenizer)
    made = Retokenizer(directory=directory, chat_template=chat_template) if is_needed else None
    loaded = cached_tokenizer(directory, chat_template if is_needed else None)
    metadata = DatasetMetadata(
        tokenizer=tokenizer,
        tokenizer_fingerprint=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        chat_template_fingerprint=loaded.template_fingerprint if is_needed else None,
    )
    return made, metadata


def about_template(retokenizer: Retokenizer | None) -> dict[str, str]:
    """Describe the text that a chat template adds to prompts, for the dataset's history."""
    if retokenizer is None:
        return {}
    always, alone = (retokenizer.tokenizer.added_text(system=system) for system in (True, False))
    if always:
        return {"template_text": f"the chat template adds to every prompt: {always!r}"}
    if alone:
        return {
            "template_text": f"the chat template adds to prompts without a system message: {alone!r}"
        }
    return {}


def with_tokens(trajectory: Trajectory, retokenizer: Retokenizer | None) -> list[Step]:
    """Return the steps of a trajectory; conversations and completions are re-tokenized.

    Raises:
        InputError: `no_token_ids`: there is text but no re-tokenizer; `no_calls`: see `with_answers`.
        InvariantError: `response_in_prompt`: see `with_answers`.
    """
    steps = []
    for step in with_answers(trajectory):
        if isinstance(step, Step):
            steps.append(step)
        elif retokenizer is None:
            raise text_alone(step)
        elif isinstance(step, Completion):
            steps.append(retokenizer.completion(step))
        else:
            steps.append(retokenizer.conversation(step))
    return steps


def text_alone(step: Conversation | Completion) -> InputError:
    """Return the error for a log without token ids, to raise if there is no re-tokenizer."""
    why = step.tokenless if isinstance(step, Conversation) else None
    if why is None:
        got = "the log has text but no token ids"
        return InputError(NO_TOKENS, step.source, got, "", _NEEDS_TOKENIZER + _COLLECT)
    return InputError(NO_TOKENS, why.where, why.got, "", f"{_NEEDS_TOKENIZER}{why.hint}")


def is_text_alone(error: RolloutError) -> bool:
    """True if the error is from `text_alone`; passing `--tokenizer` fixes it."""
    return error.rule == NO_TOKENS and (error.hint or "").startswith(_NEEDS_TOKENIZER)


def is_of_tokenizer(error: RolloutError, retokenizer: Retokenizer | None) -> bool:
    """True if the error means that the tokenizer cannot be used for any text."""
    return retokenizer is not None and (error.rule, error.where) == (
        "tokenizer",
        retokenizer.directory,
    )


def _json(sent: Sequence[dict[str, Any]] | str) -> str:
    return msgspec.json.encode(sent).decode()


def _readable(messages: Sequence[dict[str, Any]]) -> str:
    """Join the texts of messages; all but assistant messages are prefixed with their role.

    Tool calls and other parts that are not text are written as JSON.
    """
    return "\n".join(_text(message) for message in messages)


def _text(message: dict[str, Any]) -> str:
    text = text_of(message) or ""
    return text if message["role"] == "assistant" else f"[{message['role']}] {text}"
