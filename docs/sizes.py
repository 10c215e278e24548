"""Compute the table of docs/limits.md: memory by model size, from the code that `train --dry-run` uses.

Models are built without weights (torch's `meta` device) from the dimensions below.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from trainer.config.train_config import TrainConfig
from trainer.models.lora import linear_layers
from trainer.reports.memory_estimate import state_bytes

LORA_RANK = 16
_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
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
    "Qwen3-0.6B": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
    "Qwen3-1.7B": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
        **_QWEN3,
    ),
}
"""Dimensions of the models, as in their config.json."""

SETTINGS: dict[str, dict[str, Any]] = {
    "full, float32": {"dtype": "float32"},
    "full, bfloat16": {"dtype": "bfloat16"},
    "full, bfloat16, adamw_8bit": {"dtype": "bfloat16", "optimizer": "adamw_8bit"},
    "LoRA 16, bfloat16": {"dtype": "bfloat16", "lora_rank": LORA_RANK},
}


def held_bytes(name: str, settings: dict[str, Any]) -> int:
    """Return the bytes of weights, gradients and optimizer of a run with one of the models."""
    import peft

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
        config = TrainConfig(dataset="ds", model=name, out="run", **settings)
        if config.lora_rank:
            lora = peft.LoraConfig(r=config.lora_rank, target_modules=linear_layers(model))
            peft.inject_adapter_in_model(lora, model)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(state_bytes(parameters, trained, parameters, config))


def table() -> list[str]:
    """Return the lines of the table, in GiB."""
    lines = [f"| model | {' | '.join(SETTINGS)} |", "|---|" + "---|" * len(SETTINGS)]
    for name in MODELS:
        sizes = [f"{held_bytes(name, settings) / 2**30:.1f}" for settings in SETTINGS.values()]
        lines.append(f"| {name} | {' | '.join(sizes)} |")
    return lines
