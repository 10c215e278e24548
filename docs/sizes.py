"""Compute the table of docs/limits.md, memory by model size, with the code of `train --dry-run`.

Models are built without weights (torch's `meta` device) from the dimensions below.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from trainer.config.train_config import load_config
from trainer.models.lora import linear_layers
from trainer.run.memory import state_bytes

LORA_RANK = 16


def _qwen3(
    hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_attention_heads: int
) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=hidden_size < 4096,
    )


MODELS: dict[str, Any] = {
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32),
}
"""Dimensions of the models, as in their config.json; the small Qwen3 models tie their embeddings."""

SETTINGS: dict[str, dict[str, Any]] = {
    "full, float32": {"model.dtype": "float32"},
    "full, bfloat16": {"model.dtype": "bfloat16"},
    "full, bfloat16, adamw_8bit": {"model.dtype": "bfloat16", "optimizer.algorithm": "adamw_8bit"},
    "LoRA 16, bfloat16": {"model.dtype": "bfloat16", "model.lora_rank": LORA_RANK},
}


def held_bytes(name: str, settings: dict[str, Any]) -> int:
    """Return the bytes of weights, gradients and optimizer of a run with one of the models."""
    import peft

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
        paths = {"data.dataset": "ds", "model.path": name, "run.out": "run"}
        config = load_config(None, options=paths | settings)
        if config.model.lora_rank:
            lora = peft.LoraConfig(r=config.model.lora_rank, target_modules=linear_layers(model))
            peft.inject_adapter_in_model(lora, model)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return state_bytes(parameters, trained, parameters, config).total


def table() -> list[str]:
    """Return the lines of the table, in GiB."""
    lines = [f"| model | {' | '.join(SETTINGS)} |", "|---|" + "---|" * len(SETTINGS)]
    for name in MODELS:
        sizes = [f"{held_bytes(name, settings) / 2**30:.1f}" for settings in SETTINGS.values()]
        lines.append(f"| {name} | {' | '.join(sizes)} |")
    return lines
