"""Requests that wait at the same time, continued in one batch over one key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pipelines.generation.engine import Sampling
from trainer.sampling import sample_token

Decode = Callable[[Sequence[int]], str]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt that is being continued.

    Attributes:
        prompt: [P >= 1] ids.
        sampling: How.
        max_tokens: Of the response; at most what the context has room for.
        generator: Its own, so that what it draws does not depend on the batch it is in.
        is_wanted: Whether somebody still waits for it.
        response: Ids so far.
        logprobs: Of each of them, in nats.
        stop_reason: None: it goes on.
    """

    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    generator: torch.Generator
    is_wanted: Callable[[], bool]
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str | None = None

    def take(self, logits: Tensor, ends: Collection[int], decode: Decode) -> None:
        """Sample the next token from [V] logits, and see whether the response ends with it."""
        token, logprob = sample_token(logits, self.sampling, self.generator)
        self.response.append(token)
        self.logprobs.append(logprob)
        if token in ends or (self.sampling.stop and self._met_stop(decode)):
            self.stop_reason = "stop"
        elif len(self.response) >= self.max_tokens:
            self.stop_reason = "length"
        elif not self.is_wanted():
            self.stop_reason = "abort"

    def _met_stop(self, decode: Decode) -> bool:
        longest = max(map(len, self.sampling.stop))
        tail = decode(self.response[-4 * longest - 4 :])  # a character has at most 4 tokens
        return any(text in tail for text in self.sampling.stop)


@torch.no_grad()
def continue_batch(
    model: Any,
    requests: Sequence[Request],
    *,
    ends: Collection[int],
    decode: Decode,
    finished: Callable[[Request], None],
) -> None:
    """Sample until every request has a stop reason.

    Prompts are padded on the left; rows that have ended leave the batch.

    Args:
        model: A Transformers causal LM.
        requests: At least one.
        ends: Ids that end a sequence.
        decode: Ids to text.
        finished: Called with each request as it ends.
    """
    ids, mask = (part.to(model.device) for part in _padded([r.prompt for r in requests]))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    rows = list(requests)
    while True:
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        for row, last in zip(rows, logits, strict=True):
            row.take(last, ends, decode)
            if row.stop_reason is not None:
                finished(row)
        kept = [i for i, row in enumerate(rows) if row.stop_reason is None]
        if not kept:
            return
        if len(kept) < len(rows):
            keep = torch.tensor(kept, device=model.device)
            cache.batch_select_indices(keep)
            mask, positions = mask[keep], positions[keep]
            rows = [rows[i] for i in kept]
        ids = torch.tensor([[row.response[-1]] for row in rows], device=model.device)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], -1)
        positions = positions[:, -1:] + 1


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """[N, longest] ids, padded on the left, and 1 where they are real."""
    missing = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    ids = [[0] * num + list(prompt) for num, prompt in zip(missing, prompts, strict=True)]
    real = [[0] * num + [1] * len(prompt) for num, prompt in zip(missing, prompts, strict=True)]
    return torch.tensor(ids), torch.tensor(real)
