"""Estimate the memory that a run needs on its device, and the time that a token takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batches.forest import ChainLayout, Forest
from trainer.config.train_config import TrainConfig
from trainer.models.layers import num_layers, plain_layers
from trainer.run.open_run import compiles
from trainer.run.run import Run

MOMENTS_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Bytes of optimizer state per parameter."""
COMPILED_SHARE = 0.5
"""Activations of a compiled layer as a share of those of an uncompiled one, which has a tensor for each
operation. Measured on an H200: 48 KB per token of a Qwen3-0.6B against 84."""
PROBE_TOKENS = 32
"""Length of the shortest of the three chains forwarded to measure activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory that one process needs on its device, in bytes, by purpose.

    Libraries, the CUDA context and fragmentation are not included.

    Attributes:
        weights: Policy and critic, and the copies in `dtype` that a forward pass makes.
        gradients: Gradients of trained parameters.
        optimizer: State of the optimizers.
        reference: Weights of the reference, if there is one.
        activations: Activations that the largest micro-batch keeps for its backward pass.
        logits: One chunk of logits, in float32.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """Sum of all fields: an upper bound, because gradients grow while activations are freed."""
        parts = (self.weights, self.gradients, self.optimizer, self.reference)
        return sum(parts) + self.activations + self.logits

    @property
    def still_needed(self) -> int:
        """Sum of the fields that are allocated after the models have been loaded."""
        return self.total - self.weights - self.reference


def estimate_memory(run: Run, num_tokens: int) -> Memory:
    """Estimate the memory of a run whose largest micro-batch has `num_tokens` tokens.

    Activations are measured: chains of 32, 64 and 96 tokens are forwarded, and a quadratic fit of
    the bytes that autograd saved is extrapolated to `num_tokens`. With `gradient_checkpointing`, the
    activations of one layer are added, which its backward pass computes again.
    """
    config, policy = run.config, run.policy
    held = [p for model, _ in run.optimizers.values() for p in model.parameters()]
    groups = [group for _, optimizer in run.optimizers.values() for group in optimizer.param_groups]
    trained = [parameter for group in groups for parameter in group["params"]]
    # Compiled layers that are recomputed have copies of one layer at a time.
    recomputes = compiles(config.model, run.whole_policy) and config.model.gradient_checkpointing
    parts = state_bytes(held, trained, [] if recomputes else policy.parameters(), config)
    vocab_size = run.whole_policy.model.config.get_text_config().vocab_size
    chunk = min(config.model.logprob_chunk_tokens, num_tokens)
    return replace(
        parts,
        reference=_num_bytes(run.reference.parameters()) if run.reference else 0,
        activations=_activations(run, num_tokens),
        logits=4 * chunk * vocab_size,
    )


def state_bytes(
    held: Iterable[Tensor],
    trained: Sequence[Tensor],
    copied: Iterable[Tensor],
    config: TrainConfig,
) -> Memory:
    """Compute the memory of policy and critic that does not depend on the forwarded tokens.

    Args:
        held: Parameters of policy and critic.
        trained: Parameters that the optimizers update.
        copied: Parameters of which a forward pass keeps copies with `dtype` bfloat16.
        config: Configuration of the run.
    """
    copies = 2 * sum(p.numel() for p in copied) if config.model.dtype == "bfloat16" else 0
    return Memory(
        weights=_num_bytes(held) + copies,
        gradients=_num_bytes(trained),
        optimizer=sum(p.numel() for p in trained) * MOMENTS_BYTES[config.optimizer.algorithm],
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _activations(run: Run, num_tokens: int) -> int:
    model, settings = run.whole_policy.model, run.config.model
    num_bytes = _extrapolated(run, num_tokens)
    if not settings.gradient_checkpointing:
        return num_bytes
    compiled = compiles(settings, run.whole_policy)
    with plain_layers():
        layer = _extrapolated(run, num_tokens) // num_layers(model)
    if not compiled:
        return num_bytes + layer
    if fake_mode(model):
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = 2 if settings.dtype == "bfloat16" else 4
        num_bytes += num_tokens * num_layers(model) * heads * size * width
    return num_bytes + round(COMPILED_SHARE * layer)


def _extrapolated(run: Run, num_tokens: int) -> int:
    shortest = max(2, min(PROBE_TOKENS, run.row_limit.num_tokens // 3))
    lengths = [shortest, 2 * shortest, 3 * shortest]
    with fake_mode(run.whole_policy.model) or nullcontext():
        sizes = [_kept_by_a_forward(run, length) for length in lengths]
    parabola = np.polynomial.Polynomial.fit(lengths, sizes, deg=2)
    return max(0, round(float(parabola(num_tokens))))


def fake_mode(model: Any) -> Any:
    """Return the `FakeTensorMode` of a model without weights; None for a model with weights."""
    return getattr(next(model.parameters()), "fake_mode", None)


def _kept_by_a_forward(run: Run, num_tokens: int) -> int:
    """Measure the bytes that autograd saves for a chain of `num_tokens` tokens.

    Parameters and logits are not counted: only one chunk of logits is in memory at a time, however
    long the chain is.
    """
    policy = run.policy
    # Fake tensors have storages, but no data.
    parameters = {p.untyped_storage()._cdata for p in policy.parameters()}
    vocab_size = run.whole_policy.model.config.get_text_config().vocab_size
    saved: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters and tensor.shape[-1:] != (vocab_size,):
            saved[storage._cdata] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _forward_chain(run, num_tokens)
    return sum(size for size, _ in saved.values())


def seconds_per_token(run: Run) -> float:
    """Measure the seconds that a forward pass takes per token, on a chain of 64 tokens."""
    num_tokens = max(2, min(2 * PROBE_TOKENS, run.row_limit.num_tokens))
    times = []
    with torch.no_grad():
        for _ in range(2):  # the first pass may compile and allocate
            began = time.perf_counter()
            _forward_chain(run, num_tokens)
            times.append(time.perf_counter() - began)
    return min(times) / num_tokens


def _forward_chain(run: Run, num_tokens: int) -> None:
    """Forward a chain of `num_tokens` tokens, all of which except the first are targets."""
    device = run.accelerator.device
    position = torch.arange(num_tokens, device=device)
    forest = Forest(
        token_ids=torch.zeros_like(position),
        position_ids=position,
        subtree_end=torch.full_like(position, num_tokens),
        target_parent=position[:-1],
        target_token=torch.zeros_like(position[1:]),
        target_slot=position[:-1],
        chains=ChainLayout(
            lengths=[num_tokens],
            ends=torch.arange(2, device=device) * num_tokens,
            longest=num_tokens,
        ),
    )
    run.policy(forest, torch.ones(num_tokens - 1, device=device))


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU, or of the machine and its control group on Linux."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / f"memory.{name}").read_text() for name in ("max", "current"))
    except OSError:
        return free
    return min(free, int(limit) - int(used)) if limit.strip().isdigit() else free
