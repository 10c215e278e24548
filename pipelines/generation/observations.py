"""Tokenize observations: the tokens between two responses of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_io.retokenize.fixed_base import BASE, fixed_base
from rollout_io.retokenize.messages import normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import InputError


def observation_ids(
    response_ids: Sequence[int],
    observations: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    where: str = "observations",
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

    Raises:
        InputError: `fixed_base`, `chat_template`, `message`: see `encode_messages`.

    Example:
        With SmolLM2 ("<|im_start|>" is 1, "<|im_end|>" 2, newline 198), after a closed response:

        >>> observation_ids([36, 2], [{"role": "user", "content": "3+3?"}], tokenizer)
        [198, 1, 4093, 198, 35, 27, 35, 47, 2, 198, 1, 520, 9531, 198]
    """
    plain = [normalize(m, f"{where}, message {i}") for i, m in enumerate(observations)]
    base = fixed_base(tokenizer, None, where)
    text = tokenizer.render([*BASE, *plain], generation_prompt=True, where=where)
    if not text.startswith(base.text):
        got, hint = "the chat template changes earlier messages", "set history = step_wise"
        raise InputError("fixed_base", where, got, hint=hint)
    eos = tokenizer.eos_token_id
    ends_with_eos = eos is not None and base.anchor_ids[:1] == [eos]
    cut = 1 if ends_with_eos else len(base.anchor_ids)
    (ids,) = tokenizer.encode([base.anchor + text[len(base.text) :]], [where])
    if ids[:cut] != base.anchor_ids[:cut]:
        got = "a token spans the end of the base conversation and the start of the message"
        raise InputError("fixed_base", where, got)
    is_open = ends_with_eos and (not response_ids or response_ids[-1] != eos)
    return ids[0 if is_open else cut :]
