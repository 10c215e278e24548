"""LoRA: low-rank adapters, by peft, train in a policy whose own weights stay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from schemas.errors import RolloutError
from trainer.config import TrainConfig
from trainer.forest import Forest
from trainer.policy import Policy, check_policy

NAME = "default"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def add_adapter(policy: Policy, config: TrainConfig, path: Path | None = None) -> None:
    """Put adapters into a policy's linear layers; from then on they alone have a gradient.

    At first the matrix B of each is 0, and the policy says what it said.

        W x + lora_alpha / lora_rank * B A x

    Args:
        policy: Of float32 weights, as the model directory has them.
        config: The run's configuration.
        path: Directory of an adapter to go on with, as `save_model` writes it.

    Raises:
        RolloutError: peft is not installed; `lora_target_modules` names no linear layers of the
            decoder; the adapter cannot be read, or is another's.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        got, hint = f"no package {error.name!r}", 'pip install "rollout-io[lora]"'
        raise RolloutError("extra_installed", "lora_rank", got, "peft", hint) from None
    assert config.lora_rank is not None
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=list(config.lora_target_modules or ()) or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model,
    )
    try:
        peft.inject_adapter_in_model(settings, policy.model, NAME)
    except ValueError as error:
        raise _no_targets(config, str(error).partition("\n")[0]) from error
    _check_targets(policy.model, config)
    if path is not None:
        _load(policy.model, path / WEIGHTS)
    policy.eval()
    check_policy(policy, config.model)


def _check_targets(model: Any, config: TrainConfig) -> None:
    head = model.get_output_embeddings()
    for name, layer in _layers(model):
        if layer is head or not isinstance(layer.base_layer, nn.Linear):
            raise _no_targets(config, f"{name}, a {type(layer.base_layer).__name__}")


def _no_targets(config: TrainConfig, got: str) -> RolloutError:
    hint = "leave it out, and every linear layer of the decoder has an adapter"
    expected, where = "linear layers of the decoder, not the head", config.model
    return RolloutError("lora_target_modules", where, got, expected, hint)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Those with an adapter."""
    from peft.tuners.lora import LoraLayer

    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))


def _load(model: nn.Module, path: Path) -> None:
    wanted = {name: p for name, p in model.state_dict().items() if ".lora_" in name}
    try:
        found = load_file(path)
        weights = {name: found.pop(_file_name(name)) for name in wanted}
        model.load_state_dict(weights, strict=False)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        expected = "the adapter of this model"
        raise RolloutError("model_load", str(path), got, expected) from error


def _file_name(name: str) -> str:
    """Name of an adapter's weight in peft's files.

    Example:
        >>> _file_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return "base_model.model." + name.replace(f".{NAME}.", ".")


def save_model(model: PreTrainedModel, path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model directory; of a model with adapters, with them merged and in `adapter/` too.

    The model itself stays as it is: adding and taking off what was added would round its weights.

    Args:
        model: With adapters or without.
        path: The directory.
        state: All its weights by name, adapters included.
    """
    adapter = {_file_name(name): tensor for name, tensor in state.items() if ".lora_" in name}
    if not adapter:
        model.save_pretrained(path, state_dict=dict(state))
        return
    settings: Any = model.peft_config[NAME]
    scaling = settings.lora_alpha / settings.r
    model.save_pretrained(path, state_dict=merged_weights(state, scaling))
    (path / "adapter").mkdir()
    save_file(adapter, path / "adapter" / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(settings.to_dict(), indent=2, sort_keys=True, default=sorted)
    (path / "adapter" / CONFIG).write_text(text + "\n", encoding="utf-8")


def merged_weights(state: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The weights of a model without adapters that says what one with them says.

    Example:
        >>> import torch
        >>> state = {
        ...     "q.base_layer.weight": torch.tensor([[1.0, 2.0]]),
        ...     "q.base_layer.bias": torch.tensor([5.0]),
        ...     "q.lora_A.default.weight": torch.tensor([[3.0, 4.0]]),
        ...     "q.lora_B.default.weight": torch.tensor([[10.0]]),
        ... }
        >>> {name: tensor.tolist() for name, tensor in merged_weights(state, 0.5).items()}
        {'q.weight': [[16.0, 22.0]], 'q.bias': [5.0]}
    """
    merged = {}
    for name, tensor in state.items():
        layer, inside, rest = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if not inside:
            merged[name] = tensor
        elif rest == "weight":
            low, high = (state[f"{layer}.lora_{part}.{NAME}.weight"] for part in "AB")
            merged[f"{layer}.weight"] = tensor + scaling * (high @ low)
        else:
            merged[f"{layer}.{rest}"] = tensor
    return merged


class WithoutAdapter(nn.Module):
    """The model a policy with adapters began as: a reference without weights of its own.

    Args:
        policy: The policy, prepared for training.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = (policy,)  # no submodule: its weights are not counted twice

    def forward(self, forest: Forest, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """See `Policy.forward`."""
        policy = self.policy[0]
        with _turned_off(policy):
            found: tuple[Tensor, Tensor] = policy(forest, temperature)
        return found


@contextmanager
def _turned_off(policy: nn.Module) -> Iterator[None]:
    layers = [layer for _, layer in _layers(policy)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
