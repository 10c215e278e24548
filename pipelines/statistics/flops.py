"""Estimate the FLOPs of a training update."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.statistics.savings import Cost
from rollout_io.dataset.opening import read_input
from schemas.errors import InputError, RolloutError

# Config keys of architectures whose parameters `_params` would miscount.
_UNCOUNTED = ("kv_lora_rank", "n_shared_experts", "linear_num_value_heads", "mamba_d_state")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model that determine its training FLOPs.

    Attributes:
        num_params: Parameters that a token is multiplied by: all except the input embeddings; for
            mixtures of experts, only the experts that a token is routed to.
        num_layers: Attention layers; 0 omits the attention term.
        attention_width: Number of query heads times head size (shared key heads save no FLOPs).
    """

    num_params: float
    num_layers: int = 0
    attention_width: int = 0

    def training_flops(self, cost: Cost) -> float:
        """Estimate the floating-point operations of the forward and backward pass over a dataset.

            6 * num_params * num_tokens + 12 * num_layers * attention_width * num_attended

        The forward pass takes 2 operations per parameter and token, and 4 * width per layer and
        attended key for scores and values. The backward pass takes twice as many. Recomputation and
        the forward pass for `old_logprobs` are excluded. Every layer is assumed to attend to the
        entire context.

        The formula follows Kaplan et al. 2020 (arXiv 2001.08361, section 2.1) and Chowdhery et al.
        2022 (arXiv 2204.02311, appendix B). The latter counts T keys per token; we count only the
        keys that each token attends to.

        Example:
            >>> ModelShape(num_params=100, num_layers=1, attention_width=2).training_flops(
            ...     Cost(num_sequences=1, num_tokens=3, num_attended=6)
            ... )
            1944.0
        """
        attention = 12.0 * self.num_layers * self.attention_width * cost.num_attended
        return 6.0 * self.num_params * cost.num_tokens + attention


def read_model_shape(path: str, num_params: float | None = None) -> ModelShape:
    """Read the shape of a model from its `config.json`.

    Parameters are counted for decoders with gated MLPs (Llama, Qwen, Mistral, Gemma and their
    mixtures of experts); norms and biases are ignored.

    Args:
        path: A Hugging Face model directory; weights are not needed.
        num_params: Overrides the counted number of parameters.

    Raises:
        InputError: `input_file`: the file does not exist or is not a JSON object; `model_config`:
            the parameters cannot be counted.
    """
    file = Path(path) / "config.json"
    config = _read(file)
    try:
        heads = config["num_attention_heads"]
        width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
        params = _params(config, width) if num_params is None else num_params
        layers = config["num_hidden_layers"]
        return ModelShape(num_params=params, num_layers=layers, attention_width=width)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        finding = f"cannot count the parameters of this model: {error}"
        if isinstance(error, KeyError):
            finding = f"cannot count the parameters of this model: the key {error} is missing"
        hint = "omit --model and pass the number of parameters: --params 1.5e9"
        raise InputError("model_config", str(file), finding, hint=hint) from None


def _read(file: Path) -> Mapping[str, Any]:
    hint = "pass the directory of a Hugging Face model, or --params 1.5e9"
    try:
        config = json.loads(read_input(file))
    except RolloutError as error:
        raise error.at(error.where, hint) from None
    except ValueError:
        raise InputError("input_file", str(file), "the file is not JSON", hint=hint) from None
    if not isinstance(config, dict):
        raise InputError("input_file", str(file), "the file is not a JSON object", hint=hint)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _params(config: Mapping[str, Any], width: int) -> float:
    for name in _UNCOUNTED:
        if config.get(name):
            raise TypeError(f"architectures with `{name}` are not supported")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    key_width = width // heads * (config.get("num_key_value_heads") or heads)
    attention = 2 * hidden * (width + key_width)
    experts = config.get("num_experts_per_tok") or 1
    expert_size = config.get("moe_intermediate_size") if experts > 1 else None
    size = expert_size or config["intermediate_size"]
    inner = experts * size + (config.get("shared_expert_intermediate_size") or 0)
    layer = attention + 3 * hidden * inner
    return float(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)
