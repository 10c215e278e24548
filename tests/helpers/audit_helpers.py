"""Rows sampled from tiny models, with the errors of an engine's precision, and planted faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.generation.engines.base import Sampling
from tests.helpers.trainer_helpers import VOCAB, step, tiny_llama
from trainer.engine.batching import sampled_distribution

TYPICAL = 0.05
"""Standard deviation of the errors of logits in these rows: about that of bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to sample; `versions` is a number, or a function of the position."""

    prompt: list[int]
    length: int = 40
    versions: Any = 1
    noise: float = TYPICAL
    raw: bool = False
    sampling: Sampling = field(default_factory=Sampling)

    def version(self, position: int) -> int:
        return self.versions(position) if callable(self.versions) else self.versions


Sampled = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""


def sample(models: Sequence[Any], requests: Sequence[Request], seed: int = 0) -> list[Sampled]:
    """Sample all requests side by side; every logit has an error of its own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [list(one.prompt) for one in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    for position in range(max(one.length for one in requests)):
        open_ones = [i for i, one in enumerate(requests) if position < one.length]
        for version, model in enumerate(models):
            own = [i for i in open_ones if requests[i].version(position) == version]
            if not own:
                continue
            lengths = torch.tensor([len(tokens[i]) for i in own])
            ids = torch.zeros(len(own), int(lengths.max()), dtype=torch.int64)
            for place, i in enumerate(own):
                ids[place, : len(tokens[i])] = torch.tensor(tokens[i])
            with torch.no_grad():
                every = model(ids).logits[torch.arange(len(own)), lengths - 1].float()
            for i, logits in zip(own, every, strict=True):
                one = requests[i]
                logits = logits + one.noise * torch.randn(len(logits), generator=generator)
                found = sampled_distribution(logits[None], [one.sampling])[0]
                token = int(torch.multinomial(found.exp(), 1, generator=generator))
                reported = logits.log_softmax(-1) if one.raw else found
                tokens[i].append(token)
                logprobs[i].append(min(float(reported[token]), 0.0))
    responses = [t[len(one.prompt) :] for t, one in zip(tokens, requests, strict=True)]
    return list(zip(responses, logprobs, strict=True))


def tiny_models(num: int, apart: float = 0.1, **settings: Any) -> list[Any]:
    """Versions of a model, each some way from the one before it."""
    model = tiny_llama(**settings)
    found = [model]
    for seed in range(1, num):
        state = {name: t.clone() for name, t in found[-1].state_dict().items()}
        torch.manual_seed(seed)
        for name, weights in state.items():
            if weights.ndim == 2:
                state[name] = weights + apart * weights.std() * torch.randn_like(weights)
        other = tiny_llama(**settings)
        other.load_state_dict(state)
        found.append(other)
    return [one.eval() for one in found]


def save_versions(path: Path, models: Sequence[Any]) -> str:
    """A folder of directories version_0, version_1, ..."""
    for version, model in enumerate(models):
        model.save_pretrained(path / f"version_{version}")
    return str(path)


def prompt_of(rng: np.random.Generator, length: int = 6) -> list[int]:
    return rng.integers(0, VOCAB, length).tolist()


def row(
    instance: int,
    repetition: int,
    prompt: list[int],
    sampled: Sampled,
    *,
    version: int | None = 1,
    **values: Any,
) -> dict[str, Any]:
    usual = {"temperature": 1.0, "reward": 0.0, "is_last_step": True}
    usual |= {"policy_version": version, "rollout_logprobs": sampled[1]}
    return step(f"g{instance}", repetition, 0, prompt, sampled[0], **(usual | values))
