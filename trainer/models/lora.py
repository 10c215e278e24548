"""LoRA: train low-rank adapters (from peft) while the policy's weights are frozen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from schemas.errors import ConfigError, InputError, count
from schemas.imports import requires_extra
from trainer.batches.forest import Forest
from trainer.config.sections import ModelConfig
from trainer.distributed.accelerator import gathered
from trainer.models.policy import Policy, has_shapes_only, save_weights
from trainer.models.self_check import check_policy

NAME = "default"
_LAYER = re.compile(r"(\.\d+\.)")
"""Number of a layer in the name of a weight."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def add_adapter(policy: Policy, config: ModelConfig, path: Path | None = None) -> None:
    """Add adapters to a policy's linear layers; afterwards only the adapters have a gradient.

    Each matrix B starts at 0, so the policy is unchanged at first:

        W x + lora_alpha / lora_rank * B A x

    The policy must have the float32 weights of the model directory. `path` is an adapter to resume
    from, as written by `save_model`. `config.lora_rank` must be set.

    Raises:
        MissingExtra: The package peft is not installed.
        ConfigError: `lora_target_modules` does not name linear layers of the decoder.
        InputError: The adapter cannot be read, or belongs to a different model.
    """
    with requires_extra("train", "model.lora_rank"):
        import peft
    assert config.lora_rank is not None
    names = linear_layers(policy.model)
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_without_frozen(policy.model, config.lora_target_modules or names),
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.path,
    )
    try:
        peft.inject_adapter_in_model(settings, policy.model, NAME)
    except ValueError as error:
        finding = f"peft cannot add adapters: {str(error).partition(chr(10))[0]}"
        raise _no_targets(config, finding, names) from error
    _check_targets(policy.model, config, names)
    if path is not None:
        _load(policy.model, path / WEIGHTS)
    policy.eval()
    if not has_shapes_only():
        check_policy(policy, config.path)


def linear_layers(model: Any) -> list[str]:
    """List the name suffixes of the linear layers that get adapters by default.

    These are all trained linear layers except the head (see `freeze_unused`); in a mixture-of-experts model, only the linear
    layers inside attention.

    In Transformers, experts and routers are not `nn.Linear` modules, but peft would match experts
    and routers whose names end like the name of a linear layer.
    """
    head, modules = model.get_output_embeddings(), list(model.named_modules())
    layers = [
        n.split(".")
        for n, m in modules
        if isinstance(m, nn.Linear) and m is not head and m.weight.requires_grad
    ]
    if any("experts" in name.split(".") for name, _ in modules):
        layers = [n for n in layers if any("att" in part for part in n[:-1]) and "router" not in n]
    return sorted({name[-1] for name in layers})


def _without_frozen(model: Any, names: Sequence[str]) -> list[str]:
    """Return names of layers that leave out frozen ones, such as those of a vision tower.

    A suffix that also matches a frozen layer is replaced by the full names of the others.
    """
    targets = []
    for name in names:
        matched = [(n, m) for n, m in model.named_modules() if n == name or n.endswith(f".{name}")]
        frozen = {n for n, m in matched if not any(p.requires_grad for p in m.parameters())}
        mixed = frozen and len(frozen) < len(matched)
        targets += [n for n, _ in matched if n not in frozen] if mixed else [name]
    return targets


def _check_targets(model: Any, config: ModelConfig, names: Sequence[str]) -> None:
    head = model.get_output_embeddings()
    for name, layer in _layers(model):
        if layer is head or not isinstance(layer.base_layer, nn.Linear):
            kind = "is the head" if layer is head else f"has type {type(layer.base_layer).__name__}"
            finding = f"{name} {kind}, but adapters need linear layers of the decoder"
            raise _no_targets(config, finding, names)


def _no_targets(config: ModelConfig, finding: str, names: Sequence[str]) -> ConfigError:
    hint = f"leave lora_target_modules out to add adapters to {', '.join(names)}"
    if config.lora_target_modules is None or not names:
        hint = "leave lora_rank out to train all weights"
    return ConfigError("lora_target_modules", config.path, finding, hint=hint)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))


def _load(model: nn.Module, path: Path) -> None:
    wanted = {name: p for name, p in model.state_dict().items() if ".lora_" in name}
    try:
        stored = load_file(path)
        weights = {name: stored.pop(_file_name(name)) for name in wanted}
        model.load_state_dict(weights, strict=False)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        finding = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finding = f"cannot be loaded as an adapter of this model: {finding}"
        raise InputError("model_load", str(path), finding) from error
    if stored:
        finding = f"the file has {count(len(stored), 'weight')} that the adapter lacks, such as {min(stored)}"
        raise InputError("model_load", str(path), finding, hint="merge the adapter into its model")


def _file_name(name: str) -> str:
    """Return the name of an adapter's weight in peft's files.

    Example:
        >>> _file_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return "base_model.model." + name.replace(f".{NAME}.", ".")


def adapter_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the adapter weights from a model's weights; keys are their names in peft's files."""
    return {_file_name(name): tensor for name, tensor in state.items() if ".lora_" in name}


def save_model(model: PreTrainedModel, path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model directory; adapters are merged, and also written to `adapter/`.

    The model in memory is left unchanged: adding adapters to its weights and subtracting them again
    would cause rounding errors. `state` contains all weights by name, including adapters.
    """
    save_weights(model, path, dict(merged_weights(state, _scaling(model))))
    save_adapter(model, path / "adapter", state)


def save_adapter(model: PreTrainedModel, path: Path, state: Mapping[str, Tensor]) -> None:
    """Write only the adapters of a model, in peft's format; `state` is as for `save_model`."""
    path.mkdir(parents=True)
    save_file(adapter_weights(state), path / WEIGHTS, metadata={"format": "pt"})
    settings: Any = model.peft_config[NAME]
    text = json.dumps(settings.to_dict(), indent=2, sort_keys=True, default=sorted)
    (path / CONFIG).write_text(text + "\n", encoding="utf-8")


def merged_weights(state: Mapping[str, Tensor], scaling: float) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with the adapters merged into it; the model's outputs stay the same.

    Sharded weights are gathered one by one: all processes must iterate together.

    Example:
        >>> import torch
        >>> state = {
        ...     "q.base_layer.weight": torch.tensor([[1.0, 2.0]]),
        ...     "q.base_layer.bias": torch.tensor([5.0]),
        ...     "q.lora_A.default.weight": torch.tensor([[3.0, 4.0]]),
        ...     "q.lora_B.default.weight": torch.tensor([[10.0]]),
        ... }
        >>> {name: tensor.tolist() for name, tensor in merged_weights(state, 0.5)}
        {'q.weight': [[16.0, 22.0]], 'q.bias': [5.0]}
    """
    for name, tensor in state.items():
        layer, inside, rest = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if not inside:
            yield name, gathered(tensor)
        elif rest == "weight":
            low, high = (gathered(state[f"{layer}.lora_{part}.{NAME}.weight"]) for part in "AB")
            # In place, because allocating memory takes longer than the arithmetic.
            yield f"{layer}.weight", (high @ low).mul_(scaling).add_(gathered(tensor))
        else:
            yield f"{layer}.{rest}", gathered(tensor)


def checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the names that `save_model` writes, with merged adapters.

    Sharded weights are gathered, and renamed or split, one layer at a time: all processes must
    iterate together.
    """
    merged = merged_weights(model.state_dict(), _scaling(model))
    for _, layer in groupby(merged, key=lambda named: _LAYER.split(named[0], 1)[:2]):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _scaling(model: PreTrainedModel) -> float:
    settings = getattr(model, "peft_config", {}).get(NAME)
    return settings.lora_alpha / settings.r if settings else 1.0


class WithoutAdapter(nn.Module):
    """The reference of a policy with adapters: the same model with its adapters disabled."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = (policy,)  # in a tuple: as a submodule, its weights would be counted twice

    def forward(self, forest: Forest, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """See `Policy.forward`."""
        policy = self.policy[0]
        layers = [layer for _, layer in _layers(policy)]
        for layer in layers:
            layer.enable_adapters(enabled=False)
        try:
            outputs: tuple[Tensor, Tensor] = policy(forest, temperature)
        finally:
            for layer in layers:
                layer.enable_adapters(enabled=True)
        return outputs
