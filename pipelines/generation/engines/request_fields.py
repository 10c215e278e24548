"""Fields of requests to vLLM: sampling settings, and the ids that truncated sampling keeps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from pipelines.generation.engines.base import Sampling, contains_any
from rollout_io.formats.parsing import bodies
from schemas.metadata import LogprobsMode

_ANSWER = msgspec.json.Decoder(bodies.Response)


def sampling_fields(sampling: Sampling, special_tokens: Collection[str] = ()) -> dict[str, Any]:
    """Return a request's sampling fields, all explicit so that no server defaults apply.

    Args:
        sampling: Sampling settings.
        special_tokens: See `VllmEngine`.
    """
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_tokens,
        "return_token_ids": True,
    }
    if sampling.stop:
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if contains_any(sampling.stop, special_tokens):
        fields["skip_special_tokens"] = False
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields


def support_fields(
    sampling: Sampling | bodies.Sampling, mode: LogprobsMode | None, *, is_chat: bool
) -> dict[str, Any]:
    """Return the fields of a request that ask for the kept ids; none if they cannot be had."""
    if isinstance(sampling, Sampling):
        names = ("temperature", "top_p", "top_k", "min_p")
        sampling = bodies.Sampling(**{name: getattr(sampling, name) for name in names})
    most = bodies.num_to_ask(sampling) if mode == "processed" else None
    if most is None:
        return {}
    name = "top_logprobs" if is_chat else "logprobs"
    return {name: most, "return_tokens_as_token_ids": True}


def read_support(body: bytes, response_ids: Sequence[int]) -> list[list[int]] | None:
    """Return the kept ids at each token; None unless they are complete at every token."""
    return bodies.read_support(_ANSWER.decode(body).choices[0].logprobs, response_ids)
