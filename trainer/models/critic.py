"""The critic for gae: it predicts the value of the context before each trained token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from schemas.errors import InputError
from trainer.batches.forest import Forest
from trainer.distributed.accelerator import under
from trainer.models.layers import layer_classes, recompute_layers
from trainer.models.policy import hidden_before_targets, load_policy

VALUE_HEAD = "value_head.safetensors"


class Critic(nn.Module):
    """A linear value head on the last hidden states of a causal LM.

    The critic stays in evaluation mode, like the policy. The language-model head is kept for
    checkpoints, but not trained. The model must not be shared with the policy.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(
            model.config.get_text_config().hidden_size, 1, dtype=torch.float32
        )
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        trained = {id(parameter) for parameter in self.trained_parameters()}
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
        self.eval()

    @property
    def _no_split_modules(self) -> Any:
        """Classes of layers that FSDP shards one by one; Accelerate reads this attribute."""
        return layer_classes(self.model)

    def forward(self, forest: Forest) -> Tensor:
        """Compute the value of the prompt and response before each target ([M] float32)."""
        hidden = hidden_before_targets(self.model, forest)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]
        return values.float()

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers and of the value head."""
        yield from self.model.base_model.parameters()
        yield from self.value_head.parameters()

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the model and its value head, from `weights` if given, else from memory."""
        state = self.state_dict() if weights is None else weights
        self.model.save_pretrained(path, state_dict=under("model", state))
        save_file(under("value_head", state), path / VALUE_HEAD)


def load_critic(path: str, *, gradient_checkpointing: bool = False, trees: bool = False) -> Critic:
    """Load a critic from a model directory; a missing value head is initialised with zeros.

    In that case, all values are 0 at first, so the first advantages depend only on the rewards.

    Raises:
        InputError: The model cannot be loaded, or the value head belongs to a different model.
    """
    loaded = load_policy(path, logprob_chunk_tokens=1, trees=trees)
    if gradient_checkpointing:
        recompute_layers(loaded.model)
    critic = Critic(loaded.model)
    head = Path(path) / VALUE_HEAD
    if head.is_file():
        try:
            critic.value_head.load_state_dict(load_file(head))
        except (OSError, RuntimeError, SafetensorError) as error:
            finding = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            hint = "remove this file to start with a value head of zeros"
            finding = f"cannot be loaded as the value head of this model: {finding}"
            raise InputError("model_load", str(head), finding, hint=hint) from error
    return critic
