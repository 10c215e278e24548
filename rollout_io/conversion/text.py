"""What a log holds as text alone, to steps with tokens: by re-tokenisation, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout_io.adapters import Completion, Conversation, Step, Trajectory
from rollout_io.logs.messages import text_of
from rollout_io.logs.tokens import token_ids
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata

if TYPE_CHECKING:
    from rollout_io.retokenize import ChatTokenizer

NO_TOKENS = "no_token_ids"
RETOKENIZED = "retokenized"


@dataclass(frozen=True, kw_only=True, slots=True)
class Retokenizer:
    """The tokenizer and chat template that text is to be encoded with.

    Attributes:
        directory: Of the tokenizer, local.
        chat_template: Name or file of the template; None: the tokenizer's own.
    """

    directory: str
    chat_template: str | None = None

    def conversation(self, conversation: Conversation) -> Step:
        """A conversation as one row: the first prompt, then all that follows.

        The loss mask is true, and `spans` name, what the model wrote.
        """
        from rollout_io.retokenize import retokenize

        tokenizer = _tokenizer(self.directory, self.chat_template)
        encoded = retokenize(
            conversation.messages,
            tokenizer,
            tools=conversation.tools,
            logprobs=conversation.logprobs,
            num_given=conversation.num_given,
            where=conversation.source,
        )
        given = conversation.num_given
        answers = enumerate(conversation.messages[given:], given)
        first = next(i for i, message in answers if message["role"] == "assistant")
        return Step(
            source=conversation.source,
            prompt_token_ids=encoded.prompt_token_ids,
            response_ids=encoded.response_ids,
            rollout_logprobs=encoded.logprobs,
            loss_mask=encoded.loss_mask,
            trains=conversation.trains,
            spans=[(int(start), int(length)) for start, length in encoded.spans],
            token_source=RETOKENIZED,
            reward=conversation.reward,
            stop_reason=conversation.stop_reason,
            temperature=conversation.temperature,
            top_p=conversation.top_p,
            agent=conversation.agent,
            messages=_json(conversation.messages[:first]),
            response_text=_readable(conversation.messages[first:]),
            metrics=conversation.metrics,
        )

    def completion(self, text: Completion) -> Step:
        """Text without roles as one row: both parts as they stand, no template.

        Raises:
            RolloutError: `nonempty_prompt`, `nonempty_response`: one of them has no text.
        """
        tokenizer = _tokenizer(self.directory, self.chat_template)
        prompt, response = tokenizer.encode([text.prompt, text.response], [text.source] * 2)
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


def _tokenizer(directory: str, chat_template: str | None) -> ChatTokenizer:
    """Loaded once in each process, and again where its files have changed."""
    files = [*sorted(Path(directory).glob("*")), Path(chat_template or directory)]
    versions = tuple(file.stat().st_mtime_ns for file in files if file.is_file())
    return _loaded(directory, chat_template, versions)


@lru_cache(maxsize=1)
def _loaded(directory: str, chat_template: str | None, _: tuple[int, ...]) -> ChatTokenizer:
    from rollout_io.retokenize import load_tokenizer

    return load_tokenizer(directory, chat_template, needs_template=False)


def retokenizer_of(
    tokenizer: str | None, chat_template: str | None, *, is_needed: bool
) -> tuple[Retokenizer | None, DatasetMetadata]:
    """The re-tokeniser that was asked for, and what the dataset says of the tokenizer.

    Args:
        tokenizer: Directory; or, where text need not be encoded, any name.
        chat_template: See `Retokenizer`.
        is_needed: Whether the log is text.

    Raises:
        RolloutError: `tokenizer`, `chat_template`: there is none, or it cannot be used.
    """
    if tokenizer is None:
        if chat_template is not None:
            got, hint = "a chat template without a tokenizer", "--tokenizer DIR"
            raise RolloutError("tokenizer", "--chat-template", got, "both", hint)
        return None, DatasetMetadata()
    if not is_needed:
        return None, DatasetMetadata(tokenizer=tokenizer)
    made = Retokenizer(directory=tokenizer, chat_template=chat_template)
    if not Path(tokenizer).is_dir():  # a name will do where all tokens turn out to be exact
        return made, DatasetMetadata(tokenizer=tokenizer)
    loaded = _tokenizer(tokenizer, chat_template)
    metadata = DatasetMetadata(
        tokenizer=tokenizer,
        tokenizer_fingerprint=loaded.fingerprint,
        chat_template_fingerprint=loaded.template_fingerprint,
    )
    return made, metadata


def with_tokens(trajectory: Trajectory, retokenizer: Retokenizer | None) -> list[Step]:
    """The steps of a trajectory, each conversation and completion re-tokenised.

    Raises:
        RolloutError: `no_token_ids`: text, and no re-tokeniser.
    """
    steps = []
    for step in trajectory.steps:
        if isinstance(step, Step):
            steps.append(step)
        elif retokenizer is None:
            raise text_alone(step.source)
        elif isinstance(step, Completion):
            steps.append(retokenizer.completion(step))
        else:
            steps.append(retokenizer.conversation(step))
    return steps


def text_alone(where: str, got: str = "text alone") -> RolloutError:
    """The error of a log that has no tokens, where there is no re-tokeniser."""
    hint = "--tokenizer DIR (a local one) re-tokenises it: near, not exact; exact tokens come from "
    hint += "the engine (return_token_ids)"
    return RolloutError(NO_TOKENS, where, got, "the ids the engine saw and sampled", hint)


def _json(sent: Sequence[dict[str, Any]] | str) -> str:
    return msgspec.json.encode(sent).decode()


def _readable(messages: Sequence[dict[str, Any]]) -> str:
    """Text of the messages, one after the other; those of others with their role.

    What is no text (tool calls, parts) is JSON.
    """
    return "\n".join(_text(message) for message in messages)


def _text(message: dict[str, Any]) -> str:
    text = text_of(message) or ""
    return text if message["role"] == "assistant" else f"[{message['role']}] {text}"
