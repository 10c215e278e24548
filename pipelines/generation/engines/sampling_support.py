"""Ask a vLLM server for the ids that truncated sampling kept at each token, and read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pipelines.generation.engines.base import Sampling
from rollout_io.formats.parsing import bodies, support
from schemas.metadata import LogprobsMode

_ANSWER = msgspec.json.Decoder(bodies.Response)


def support_fields(
    sampling: Sampling | bodies.Sampling, mode: LogprobsMode | None, *, is_chat: bool
) -> dict[str, Any]:
    """Return the fields of a request that ask for the kept ids; none if they cannot be had."""
    if isinstance(sampling, Sampling):
        names = ("temperature", "top_p", "top_k", "min_p")
        sampling = bodies.Sampling(**{name: getattr(sampling, name) for name in names})
    most = support.num_to_ask(sampling) if mode == "processed" else None
    if most is None:
        return {}
    name = "top_logprobs" if is_chat else "logprobs"
    return {name: most, "return_tokens_as_token_ids": True}


def read_support(body: bytes, response_ids: Sequence[int]) -> list[list[int]] | None:
    """Return the kept ids at each token; None unless they are complete at every token."""
    return support.read_support(_ANSWER.decode(body).choices[0].logprobs, response_ids)
