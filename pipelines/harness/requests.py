"""Add configured defaults to the requests of harnesses, and limit the length of responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.vllm import sampling_fields
from pipelines.record.engine_requests import Fields

_LENGTHS = ("max_completion_tokens", "max_tokens")
_OURS = ("model", "cache_salt")
_NOT_ASKED = ("max_tokens", "return_token_ids", "include_stop_str_in_output", "seed")


def usual_fields(
    config: GenerateConfig,
    seed: int | None,
    policy_version: int,
    special_tokens: Collection[str] = (),
) -> dict[str, Any]:
    """Return the default fields of a harness's requests.

    Args:
        config: Sampling settings.
        seed: Seed of this call; None to send no seed.
        policy_version: Version of the engine's weights; prevents cache hits from older weights.
        special_tokens: See `VllmEngine`.
    """
    usual = sampling_fields(config.sampling, special_tokens)
    fields = {name: value for name, value in usual.items() if name not in _NOT_ASKED}
    fields |= config.sampling_extra
    if config.chat_template_kwargs:
        fields["chat_template_kwargs"] = config.chat_template_kwargs
    if seed is not None:
        fields["seed"] = seed
    if config.engine == "vllm":
        fields["cache_salt"] = f"policy_version={policy_version}"
    return fields


def completed(fields: Fields, usual: Mapping[str, Any], max_response_tokens: int) -> Fields:
    r"""Add missing fields to a request, and limit the length of its response.

    Args:
        fields: Fields that the client sent; null is treated as missing.
        usual: Defaults. `model` and `cache_salt` always override the client's.
        max_response_tokens: Upper bound on the requested length.

    Example:
        >>> made = completed({"max_tokens": msgspec.Raw(b"9")}, {"temperature": 0.5}, 4)
        >>> msgspec.json.encode(made)
        b'{"temperature":0.5,"max_tokens":4}'
    """
    made = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in usual.items()}
    named = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    ours = {name: made[name] for name in _OURS if name in made}
    made |= named | ours
    lengths = [name for name in _LENGTHS if name in named] or ["max_tokens"]
    most = msgspec.Raw(msgspec.json.encode(max_response_tokens))
    for name in lengths:
        if name not in named or _number(named[name]) > max_response_tokens:
            made[name] = most
    return made


def _number(raw: msgspec.Raw) -> float:
    """Parse a number, or a numeric string, which vLLM accepts too; return 0 for anything else."""
    try:
        return msgspec.convert(msgspec.json.decode(raw), float, strict=False)
    except msgspec.ValidationError:
        return 0
