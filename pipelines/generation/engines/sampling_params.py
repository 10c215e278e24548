"""Convert sampling settings to the `sampling_params` of vLLM and SkyRL, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipelines.generation.config import GenerateConfig
from schemas.errors import InputError

_CONFIG_KEYS = {
    "max_tokens": "max_response_tokens",
    "max_generate_length": "max_response_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "seed")},
}
_ALWAYS = {"skip_special_tokens": True, "include_stop_str_in_output": True, "logprobs": 1}
_IMPLIED = frozenset({*_ALWAYS, "return_token_ids"})


def sampling_params(config: GenerateConfig) -> dict[str, Any]:
    """Convert a configuration to vLLM's `sampling_params`, without the seed, which differs per call.

    Example:
        >>> config = GenerateConfig(tasks="t", model="m", out="o", temperature=0.5)
        >>> params = sampling_params(config)
        >>> params["max_tokens"], params["temperature"], params["top_k"], params["stop"]
        (1024, 0.5, -1, None)
    """
    return {
        **_ALWAYS,
        "max_tokens": config.max_response_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": -1 if config.top_k is None else config.top_k,
        "min_p": config.min_p,
        "stop": list(config.stop) or None,
        **config.sampling_extra,
    }


def with_sampling_params(config: GenerateConfig, params: Mapping[str, Any]) -> GenerateConfig:
    """Apply a GeneratorInput's `sampling_params`, which are named as in vLLM, to a configuration.

    Raises:
        InputError: `generator_input`: `n` requests several samples per prompt.
        ConfigError: `config_value`, `sampling`: a value is invalid.

    Example:
        >>> changed = with_sampling_params(
        ...     config, {"max_tokens": 8, "top_k": -1, "bad_words": ["a"]}
        ... )
        >>> changed.max_response_tokens, changed.top_k, changed.sampling_extra
        (8, None, {'bad_words': ['a']})
    """
    if params.get("n", 1) != 1:
        hint = "repeat the prompt instead, each time with a different repetition_id"
        where, got = "GeneratorInput, sampling_params", f"n = {params['n']}"
        raise InputError("generator_input", where, got, "n = 1", hint)
    changes: dict[str, Any] = {}
    extra = dict(config.sampling_extra)
    for name, value in params.items():
        if name in _CONFIG_KEYS:
            changes[_CONFIG_KEYS[name]] = value
        elif name not in _IMPLIED | {"n"} and (name, value) != ("min_tokens", 1):
            extra[name] = value
    top_k = changes.get("top_k")
    if top_k is not None and top_k < 1:
        changes["top_k"] = None
    if "stop" in changes:
        stop = changes["stop"] or ()
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return dataclasses.replace(config, **changes, sampling_extra=extra)
