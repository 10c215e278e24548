"""Gradients of single rows: their norms, and their inner products with a direction.

The gradient of an update is a sum over its targets. Let l_t and h_t be the policy's log-probability
and entropy at target t, and c_t and e_t the derivatives of the loss with respect to l_t and h_t.
Then

    G   = sum over all targets of (c_t grad l_t + e_t grad h_t)
    G_i = the same sum over the targets of row i,        so that the sum of all G_i is G

c_t and e_t contain everything else that the loss depends on: weights and denominators of the
reduction, advantages, ratios, clipping, corrections, divergence. The values of c_t and e_t come
from the update with all rows. Quantities that depend on several rows (denominators, the selection
of clip_cov and kl_cov) are constants: G_i does not contain their derivatives, and neither does the
update's gradient. A user's loss that compares rows is rejected: see `check_rows_are_separate`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from schemas.errors import InputError
from schemas.ragged import BoolArray, IntArray
from trainer.batches.data import Batch
from trainer.batches.forest import Chains, Forest, chain_forests, with_sets
from trainer.forensics.blame.ghost import GhostNorms, UnsupportedLayerError, check_layers
from trainer.models.attention import forward_mode_attention
from trainer.models.policy import Policy
from trainer.run.loss import objective, targets_of, with_weights
from trainer.run.messages import say
from trainer.run.run import Run

forward_ad: Any = torch.autograd.forward_ad
Direction = Mapping[str, Tensor]
"""A vector in parameter space: one tensor per trained parameter, by name."""
TOLERANCE = {"no": 1e-3, "bf16": 0.1}
"""Maximum relative difference between fast and exact norms, by mixed-precision mode."""
BUDGET = 4096
"""Tokens per micro-batch when rows are forwarded alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Derivatives of an update's loss with respect to the policy's outputs.

    Attributes:
        logprobs: [T] float32 c_t; 0 at response tokens that are not targets.
        entropies: [T] float32 e_t; 0 if the entropy has no gradient.
        outputs: [T] float32 log-probabilities of the targets, nats.
    """

    logprobs: Tensor
    entropies: Tensor
    outputs: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradients:
    """Gradient of an update, and the gradient norms of its R rows.

    Attributes:
        rows: [R] int64 rows of the batch that have targets in the update, ascending.
        norms: [R] float64 L2 norm of each row's gradient.
        gradient: G, the sum of the rows' gradients; not clipped.
        targets: [T] bool, response tokens that are targets of the update.
        coefficients: Derivatives of the loss, per response token of the batch.
        batch: The batch with the weights of the update's targets.
        is_fast: Whether the norms come from one backward pass per micro-batch.
    """

    rows: IntArray
    norms: np.ndarray[tuple[int], np.dtype[np.float64]]
    gradient: dict[str, Tensor]
    targets: BoolArray
    coefficients: Coefficients
    batch: Batch
    is_fast: bool


def row_gradients(
    learner: Run,
    batch: Batch,
    forests: Sequence[Forest],
    *,
    exact: bool = False,
) -> RowGradients:
    """Compute the gradient of an update and the norm of each row's gradient.

    By default, all norms of a micro-batch are computed in one backward pass (see `GhostNorms`), and
    the largest norm is checked against a backward pass of that row alone. If a layer of the model
    is not supported, or the check fails, there is a backward pass for each row.

    Rows of a tree share tokens, and therefore part of the backward pass. They are forwarded as
    separate chains here, which costs as much as the layout `step`.

    Args:
        learner: Policy and objective; neither the policy nor the optimizer is changed.
        batch: The batch; see `trainer.run.update.update` for the other arguments.
        forests: Micro-batches of the update.
        exact: Run a separate backward pass for every row.

    Raises:
        InputError: A user's loss fails, or its result is invalid.
    """
    batch = with_weights(learner, batch, forests)
    rows = _rows_of(batch, forests)
    if not exact:
        try:
            return _fast(learner, batch, forests, rows)
        except UnsupportedLayerError as error:
            say(f"note: {error}; running one backward pass per row")
    coefficients = _coefficients(learner, batch, forests)
    targets, total = _is_target(batch, forests), zeros(learner)
    norms = np.zeros(len(rows))
    for number in range(len(rows)):
        found = gradient_of(learner, batch, targets, coefficients, rows[number : number + 1])
        norms[number] = norm(found)
        add(total, found)
    return RowGradients(
        rows=rows,
        norms=norms,
        gradient=total,
        targets=targets,
        coefficients=coefficients,
        batch=batch,
        is_fast=False,
    )


def gradient_of(
    learner: Run,
    batch: Batch,
    targets: BoolArray,
    coefficients: Coefficients,
    rows: IntArray,
) -> dict[str, Tensor]:
    """Compute the sum of the gradients of the given rows by forwarding only these rows.

    Args:
        learner: Policy.
        batch: The batch.
        targets: [T] bool, the targets of the update.
        coefficients: c and e.
        rows: Rows of the batch with targets.

    Returns:
        The gradient by parameter.
    """
    device, total = learner.accelerator.device, zeros(learner)
    names, parameters = zip(*trained_parameters(learner), strict=True)
    tokens = batch.prompts, batch.responses
    forests = chain_forests(*tokens, targets, rows, BUDGET, routes=batch.routes)
    for forest in with_sets(forests, batch.support):
        slot = forest.target_slot
        outputs = learner.policy(forest.to(device), batch.temperature[slot].to(device))
        weighted = _weighted(outputs, coefficients, slot).sum()
        found = torch.autograd.grad(weighted, parameters, materialize_grads=True)
        add(total, dict(zip(names, found, strict=True)))
    return total


def loss_gradient(learner: Run, batch: Batch, forests: Sequence[Forest]) -> dict[str, Tensor]:
    """Compute the gradient of the loss of a mini-batch, with the current policy as the old one."""
    batch = with_weights(learner, batch, forests)
    coefficients = _coefficients(learner, batch, forests)
    targets = _is_target(batch, forests)
    return gradient_of(learner, batch, targets, coefficients, _rows_of(batch, forests))


@torch.no_grad()
def inner_products(
    learner: Run,
    batch: Batch,
    forests: Sequence[Forest],
    coefficients: Coefficients,
    direction: Direction,
) -> Tensor:
    """Compute each target's contribution to the inner product of the gradient with a direction.

        p_t = <c_t grad l_t + e_t grad h_t, v>,        so that <G_i, v> = sum of p_t over row i

    p_t is the derivative of c_t l_t + e_t h_t at theta + x v with respect to x, at x = 0: one
    forward pass in forward mode yields it for all targets of a micro-batch, for any kind of layer.
    Rows may share tokens.

    Args:
        learner: Its policy is the point theta.
        batch: The batch.
        forests: Micro-batches, in any layout.
        coefficients: c and e.
        direction: v.

    Returns:
        [T] float64; 0 at response tokens that are not targets.
    """
    accelerator = learner.accelerator
    device, products = accelerator.device, torch.zeros(len(batch.trains), dtype=torch.float64)
    trained = dict(trained_parameters(learner))
    for forest in forests:
        slot = forest.target_slot
        inputs = forest.to(device), batch.temperature[slot].to(device)
        with _plain_experts(learner), _quiet(), forward_ad.dual_level(), forward_mode_attention():
            duals = {
                name: forward_ad.make_dual(parameter.detach(), direction[name])
                for name, parameter in trained.items()
            }
            outputs = functional_call(learner.policy, duals, inputs)
            tangents = [forward_ad.unpack_dual(output).tangent for output in outputs]
        # Without a gradient, the entropy has no tangent.
        logprobs, entropies = (torch.zeros(len(slot)) if t is None else t for t in tangents)
        products[slot] = _weighted((logprobs, entropies), coefficients, slot).double().cpu()
    return products


@contextmanager
def _plain_experts(learner: Run) -> Iterator[None]:
    """Compute experts one by one: PyTorch's grouped kernels have no forward-mode derivatives."""
    model: Any = learner.accelerator.unwrap_model(learner.policy).model
    if not model._can_set_experts_implementation():
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's warnings about its own use of TorchScript in forward-mode derivatives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        yield


def zeros(learner: Run) -> dict[str, Tensor]:
    """Return the zero vector in the space of the trained parameters."""
    return {name: torch.zeros_like(p) for name, p in trained_parameters(learner)}


def add(total: Mapping[str, Tensor], other: Direction, factor: float = 1.0) -> None:
    """Add a multiple of a vector to `total`, in place."""
    for name, tensor in other.items():
        total[name].add_(tensor, alpha=factor)


def norm(direction: Direction) -> float:
    """Compute the L2 norm over all parameters."""
    norms = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in direction.values())
    return math.sqrt(sum(float(one) ** 2 for one in norms))


def inner(a: Direction, b: Direction) -> float:
    """Compute the inner product over all parameters."""
    return sum(float((a[name] * b[name]).sum(dtype=torch.float64)) for name in a)


def _fast(
    learner: Run,
    batch: Batch,
    forests: Sequence[Forest],
    rows: IntArray,
) -> RowGradients:
    """Compute the gradient and the norms in one backward pass per micro-batch."""
    accelerator = learner.accelerator
    policy: Policy = accelerator.unwrap_model(learner.policy)
    if batch.support is not None:
        raise UnsupportedLayerError("rows have sampling_support")
    check_layers(policy)
    known, targets = None, _is_target(batch, forests)
    if not all(_is_separate(batch, forest) for forest in forests):
        known = _coefficients(learner, batch, forests)
        budget = max(forest.num_tokens for forest in forests)
        tokens = batch.prompts, batch.responses
        forests = chain_forests(*tokens, targets, rows, budget, routes=batch.routes)
    found = known or _no_coefficients(batch)
    squares = torch.zeros(len(batch.names), dtype=torch.float64)
    learner.optimizer.zero_grad()
    with GhostNorms(policy) as ghost:
        for forest in forests:
            slot = forest.target_slot
            given = None if known is None else (known.logprobs[slot], known.entropies[slot])
            loss = partial(derivatives, learner, batch, slot)
            temperature = batch.temperature[slot]
            with accelerator.autocast():
                result = ghost.backward(forest, temperature, accelerator.device, given or loss)
            row = torch.from_numpy(batch.responses.row_of(result.first_slots.numpy()))
            squares[row] += result.squares
            found.logprobs[slot], found.entropies[slot] = result.coefficients
            found.outputs[slot] = result.logprobs
    gradient = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in trained_parameters(learner)
    }
    learner.optimizer.zero_grad()
    norms = squares[rows].clamp(min=0).sqrt().numpy()
    largest = int(np.argmax(norms)) if len(rows) else 0
    if len(rows):
        checked = rows[largest : largest + 1]
        expected = norm(gradient_of(learner, batch, targets, found, checked))
        difference = abs(norms[largest] - expected) / max(expected, 1e-30)
        if difference > TOLERANCE["no" if accelerator.mixed_precision == "no" else "bf16"]:
            raise UnsupportedLayerError(
                f"the fast norm of a row differs from the exact one by {difference:.2%}"
            )
    return RowGradients(
        rows=rows,
        norms=norms,
        gradient=gradient,
        targets=targets,
        coefficients=found,
        batch=batch,
        is_fast=True,
    )


def _is_separate(batch: Batch, forest: Forest) -> bool:
    """True if no two rows of a micro-batch share tokens."""
    lengths = Chains.of(forest.subtree_end).lengths
    rows = np.unique(batch.responses.row_of(forest.target_slot.numpy()))
    return lengths is not None and len(lengths) == len(rows)


def _coefficients(learner: Run, batch: Batch, forests: Sequence[Forest]) -> Coefficients:
    """Compute the derivatives of the loss by a forward pass of the update's micro-batches."""
    device, found = learner.accelerator.device, _no_coefficients(batch)
    for forest in forests:
        slot = forest.target_slot
        with torch.no_grad():
            outputs = learner.policy(forest.to(device), batch.temperature[slot].to(device))
        c, e = derivatives(learner, batch, slot, *outputs)
        found.logprobs[slot], found.entropies[slot] = c.cpu(), e.cpu()
        found.outputs[slot] = outputs[0].cpu()
    return found


def _no_coefficients(batch: Batch) -> Coefficients:
    zeros = (torch.zeros(len(batch.trains)) for _ in range(3))
    return Coefficients(**dict(zip(("logprobs", "entropies", "outputs"), zeros, strict=True)))


def derivatives(
    learner: Run,
    batch: Batch,
    slot: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the derivatives c and e of the loss of complete rows from the policy's outputs.

    Args:
        learner: Its objective is the loss.
        batch: The batch, with weights.
        slot: [M] targets, as indices into the batch's response tokens.
        logprobs: [M] nats.
        entropies: [M] nats.

    Returns:
        [M] c and [M] e, in the order of `slot`.
    """
    if learner.config.loss.policy_loss_type == "distill":
        got = "distill, whose loss does not follow from log-probabilities of single tokens"
        raise InputError("teacher_logprobs", "loss.policy_loss_type", got, "another loss")
    logprobs, entropies = (t.detach().requires_grad_() for t in (logprobs, entropies))
    with torch.enable_grad():
        targets = targets_of(batch, slot, (logprobs, entropies))
        loss, _ = objective(targets, learner.config.loss, corrects=learner.corrects)
        c, e = torch.autograd.grad(loss, (logprobs, entropies), materialize_grads=True)
    policy: Policy = learner.accelerator.unwrap_model(learner.policy)
    return c, e if policy.entropy_gradient else torch.zeros_like(e)


def _weighted(outputs: Sequence[Tensor], coefficients: Coefficients, slot: Tensor) -> Tensor:
    logprobs, entropies = outputs
    c, e = (t[slot].to(logprobs.device) for t in (coefficients.logprobs, coefficients.entropies))
    return c * logprobs + e * entropies.to(logprobs.device)


def trained_parameters(learner: Run) -> list[tuple[str, torch.nn.Parameter]]:
    """List the parameters that the optimizer changes, with their names."""
    return [(name, p) for name, p in learner.policy.named_parameters() if p.requires_grad]


def _is_target(batch: Batch, forests: Sequence[Forest]) -> BoolArray:
    found = np.zeros(len(batch.trains), np.bool_)
    for forest in forests:
        found[forest.target_slot.numpy()] = True
    return found


def _rows_of(batch: Batch, forests: Sequence[Forest]) -> IntArray:
    return np.unique(batch.responses.row_of(np.flatnonzero(_is_target(batch, forests))))
