"""Build the next turn's prompt: by appending tokens, or by rendering the messages again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from pipelines.generation.config import History
from pipelines.generation.user_code import encodable
from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.encoding import BASE, fixed_base
from rollout_io.retokenize.tokenizer import ChatTokenizer, Tools
from schemas.errors import InputError, count

Messages = Sequence[Mapping[str, Any]]


def observation_ids(
    response_ids: Sequence[int],
    observations: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    where: str = "observations",
    tools: Tools | None = None,
) -> list[int]:
    r"""Return the ids between a response and the first token of the next one.

    Uses fixed-base encoding, where `base` is a constant conversation whose ids are cut after its
    last end-of-sequence (EOS) token:

        ids(template(base + observations, generation prompt)) minus ids(template(base))

    The cut keeps text that the template writes after a message's EOS (a newline in ChatML) and that
    no engine samples. If the response ended without an EOS (at a stop string or the length limit),
    the returned ids start with the EOS that closes its message. All returned ids belong to the next
    prompt, not to a response, and are never trained on.

    Source: https://jybsuper.github.io/posts/multiturn_tokenization/

    Args:
        response_ids: [R] ids of the response.
        observations: Messages; if there are none, the model writes another message.
        tokenizer: From `load_tokenizer`.
        where: Location shown in error messages.
        tools: Tool definitions of the conversation.

    Raises:
        InputError: `fixed_base`, `chat_template`, `message`: see `encode_messages`.

    Example:
        With SmolLM2 ("<|im_start|>" is 1, "<|im_end|>" 2, newline 198), after a closed response:

        >>> observation_ids([36, 2], [{"role": "user", "content": "3+3?"}], tokenizer)
        [198, 1, 4093, 198, 35, 27, 35, 47, 2, 198, 1, 520, 9531, 198]
    """
    plain = [normalize(m, f"{where}, message {i}") for i, m in enumerate(observations)]
    base = fixed_base(tokenizer, tools, where)
    text = tokenizer.render([*BASE, *plain], tools, generation_prompt=True, where=where)
    if not text.startswith(base.text):
        finding, hint = "the chat template changes earlier messages", "set history = step_wise"
        raise InputError("fixed_base", where, finding, hint=hint)
    eos = tokenizer.eos_token_id
    ends_with_eos = eos is not None and base.anchor_ids[:1] == [eos]
    cut = 1 if ends_with_eos else len(base.anchor_ids)
    (ids,) = tokenizer.encode([base.anchor + text[len(base.text) :]], [where])
    if ids[:cut] != base.anchor_ids[:cut]:
        finding = "a token spans the end of the base conversation and the start of the message"
        raise InputError("fixed_base", where, finding)
    is_open = ends_with_eos and (not response_ids or response_ids[-1] != eos)
    return ids[0 if is_open else cut :]


class Conversation(Protocol):
    """A conversation that builds a trajectory's prompts turn by turn.

    Attributes:
        messages: The conversation so far, for display.
    """

    messages: list[dict[str, Any]]

    def prompt_ids(self) -> list[int]:
        """[P] Return the prompt ids for the next call."""
        ...

    def extend(
        self, response_ids: list[int], text: str, replaced: str | None, observations: Messages
    ) -> list[int]:
        """Add a turn to the conversation.

        Args:
            response_ids: [R] ids sampled for `prompt_ids()`.
            text: The response as text.
            replaced: The environment's replacement for the text; None if it is unchanged.
            observations: The environment's messages.

        Returns:
            [1 to R] leading ids of the response that belong to the conversation.
        """
        ...


def begin(
    history: History,
    prompt: Messages,
    tokenizer: ChatTokenizer,
    where: str,
    tools: Tools | None = None,
) -> Conversation:
    """Start a conversation that builds prompts as `history` specifies.

    Raises:
        InputError: `chat_template`: the template does not accept the prompt.
    """
    if history == "append":
        return _Appended(prompt, tokenizer, where, tools)
    if history == "one_message":
        return _OneMessage(prompt, tokenizer, where, tools)
    return _Rendered(prompt, tokenizer, where, tools)


class _Rendered:
    """Messages that are rendered again for every turn; tokens of earlier turns may change."""

    def __init__(
        self, prompt: Messages, tokenizer: ChatTokenizer, where: str, tools: Tools | None = None
    ) -> None:
        self.messages = [dict(message) for message in prompt]
        self.tokenizer, self.where, self.tools = tokenizer, where, tools

    def prompt_ids(self) -> list[int]:
        text = self.tokenizer.render(
            self.messages, self.tools, generation_prompt=True, where=self.where
        )
        return self._encode(text)

    def extend(
        self, response_ids: list[int], text: str, replaced: str | None, observations: Messages
    ) -> list[int]:
        said = text if replaced is None else replaced
        self.messages.append({"role": "assistant", "content": said})
        self.messages += [dict(message) for message in observations]
        return response_ids

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode([text], [self.where])[0]


class _Appended(_Rendered):
    """Tokens in, tokens out: the next prompt is the last prompt, its response, and observations.

    The steps of a trajectory therefore merge into one sequence, unless the environment replaces an
    action: the next prompt then contains the tokens of the replacement instead of the sampled ones.
    """

    def __init__(
        self, prompt: Messages, tokenizer: ChatTokenizer, where: str, tools: Tools | None = None
    ) -> None:
        super().__init__(prompt, tokenizer, where, tools)
        self.ids = super().prompt_ids()

    def prompt_ids(self) -> list[int]:
        return list(self.ids)

    def extend(
        self, response_ids: list[int], text: str, replaced: str | None, observations: Messages
    ) -> list[int]:
        super().extend(response_ids, text, replaced, observations)
        said = response_ids if replaced is None else self._encode(replaced)
        self.ids += said + observation_ids(
            said, observations, self.tokenizer, self.where, self.tools
        )
        return response_ids


class _OneMessage(_Appended):
    """All turns in one assistant message, with observations as plain text inside it.

    If the message continues after a turn, the turn's final EOS is removed from the conversation and
    from the response. A turn whose only token is the EOS keeps it in both.
    """

    def extend(
        self, response_ids: list[int], text: str, replaced: str | None, observations: Messages
    ) -> list[int]:
        _Rendered.extend(self, response_ids, text, replaced, observations)
        kept, eos = list(response_ids), self.tokenizer.eos_token_id
        while kept and kept[-1] == eos:
            kept.pop()
        kept = kept or list(response_ids)
        self.ids += kept if replaced is None else self._encode(replaced)
        for observation in observations:
            self.ids += self._encode(observation["content"])
        return kept


def final_rendering(
    messages: Messages,
    num_turns: int,
    tokenizer: ChatTokenizer,
    where: str,
    tools: Tools | None = None,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Render an entire conversation with its template, and locate the generated turns.

    Args:
        messages: The conversation, ending with the last turn's response.
        num_turns: Number of generated turns, which are the conversation's last assistant messages.
        tokenizer: Tokenizer whose chat template marks generated text with {% generation %}.
        where: Location shown in error messages.
        tools: Tool definitions of the conversation.

    Returns:
        [N] ids, and the (start, end) of each turn among them.

    Raises:
        InputError: `assistant_masks`: the template does not mark every assistant message.
    """
    ids, mask = tokenizer.render_marked(messages, tools, where=where)
    bounds = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    runs = [(a, b) for a, b in pairwise(bounds) if a < b and mask[a]]
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if len(runs) != num_answers:
        finding = f"the template marks {len(runs)} of {count(num_answers, 'assistant message')}"
        hint = "use a template that marks all of them: chat_template = qwen3_without_thinking"
        raise InputError("assistant_masks", where, finding, hint=hint)
    return ids, runs[len(runs) - num_turns :]


def as_json(messages: Messages) -> str:
    """Serialise messages for the column `messages`."""
    return encodable(json.dumps(list(messages), ensure_ascii=False))
