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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call

from schemas.errors import InputError, RolloutError
from schemas.ragged import BoolArray, IntArray
from trainer.batch import Batch
from trainer.batches.forest import Forest
from trainer.batches.micro_batches import completed
from trainer.batches.packing import chain_forests
from trainer.config.functions import POLICY_LOSS
from trainer.loss import objective, targets_of, with_weights
from trainer.models.attention import forward_mode_attention
from trainer.models.policy import Policy
from trainer.run.run import Run

forward_ad: Any = torch.autograd.forward_ad
Direction = Mapping[str, Tensor]
"""A vector in parameter space: one tensor per trained parameter, by name."""
BUDGET = 4096
"""Tokens per micro-batch when rows are forwarded alone."""
SEPARATE = 1e-3
"""Rows count as separate if leaving out other rows changes the derivatives of their loss by at most
this much, relative to the largest derivative of the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Derivatives of an update's loss with respect to the policy's outputs; [T] float32 each."""

    logprobs: Tensor  # c_t; 0 at response tokens that are not targets
    entropies: Tensor  # e_t; 0 if the entropy has no gradient
    outputs: Tensor  # log-probabilities of the targets, nats


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradients:
    """Gradient of an update, and the gradient norms of its R rows."""

    rows: IntArray  # [R] rows of the batch that have targets in the update, ascending
    norms: npt.NDArray[np.float64]  # [R] L2 norm of each row's gradient
    gradient: dict[str, Tensor]  # G, the sum of the rows' gradients; not clipped
    targets: BoolArray  # [T] response tokens that are targets of the update
    coefficients: Coefficients
    batch: Batch  # with the weights of the update's targets


def row_gradients(learner: Run, batch: Batch, forests: Sequence[Forest]) -> RowGradients:
    """Compute the gradient of an update and the norm of each row's gradient.

    There is one backward pass for each row. Rows of a tree share tokens, and are forwarded as
    separate chains here.

    Raises:
        InputError: A user's loss fails, or its result is invalid.
    """
    batch = with_weights(learner, batch, forests)
    coefficients, targets = _coefficients(learner, batch, forests)
    rows, total = np.unique(batch.responses.row_of(np.flatnonzero(targets))), zeros(learner)
    norms = np.zeros(len(rows))
    for number in range(len(rows)):
        gradient = gradient_of(learner, batch, targets, coefficients, rows[number : number + 1])
        norms[number] = norm(gradient)
        add(total, gradient)
    return RowGradients(
        rows=rows,
        norms=norms,
        gradient=total,
        targets=targets,
        coefficients=coefficients,
        batch=batch,
    )


def gradient_of(
    learner: Run,
    batch: Batch,
    targets: BoolArray,
    coefficients: Coefficients,
    rows: IntArray,
) -> dict[str, Tensor]:
    """Compute the sum of the gradients of some rows with targets by forwarding only these rows."""
    device, total = learner.accelerator.device, zeros(learner)
    names, parameters = zip(*trained_parameters(learner), strict=True)
    tokens = batch.prompts, batch.responses
    forests = chain_forests(*tokens, targets, rows, BUDGET, routes=batch.routes)
    for forest in completed(forests, batch):
        slot = forest.target_slot
        outputs = learner.policy(forest.to(device), batch.temperature[slot].to(device))
        weighted = _weighted(outputs, coefficients, slot).sum()
        gradients = torch.autograd.grad(weighted, parameters, materialize_grads=True)
        add(total, dict(zip(names, gradients, strict=True)))
    return total


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
    Rows may share tokens. Returns [T] float64: 0 at response tokens that are not targets.
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


def add(total: Mapping[str, Tensor], other: Direction) -> None:
    """Add a vector to `total`, in place."""
    for name, tensor in other.items():
        total[name].add_(tensor)


def norm(direction: Direction) -> float:
    """Compute the L2 norm over all parameters."""
    norms = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in direction.values())
    return math.sqrt(sum(float(one) ** 2 for one in norms))


def _coefficients(
    learner: Run, batch: Batch, forests: Sequence[Forest]
) -> tuple[Coefficients, BoolArray]:
    """Compute the derivatives of the loss by a forward pass of the update's micro-batches.

    Also returns which response tokens are targets.
    """
    device, targets = learner.accelerator.device, np.zeros(len(batch.trains), np.bool_)
    logprobs, entropies, outputs = (torch.zeros(len(targets)) for _ in range(3))
    for forest in forests:
        slot = forest.target_slot
        targets[slot.numpy()] = True
        with torch.no_grad():
            inputs = forest.to(device), batch.temperature[slot].to(device)
            of_policy = learner.policy(*inputs)
        logprobs[slot], entropies[slot] = (
            t.cpu() for t in derivatives(learner, batch, slot, *of_policy)
        )
        outputs[slot] = of_policy[0].cpu()
    return Coefficients(logprobs=logprobs, entropies=entropies, outputs=outputs), targets


def derivatives(
    learner: Run,
    batch: Batch,
    slot: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the derivatives c and e ([M] each) of the loss of complete rows.

    `slot` are their M targets, as indices into the batch's response tokens; `logprobs` and
    `entropies` are the policy's outputs ([M], nats).
    """
    if learner.config.loss.policy_loss_type == "distill":
        finding = "distill, whose loss does not follow from log-probabilities of single tokens"
        raise InputError("teacher_logprobs", "loss.policy_loss_type", finding, "another loss")
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


def check_rows_are_separate(
    learner: Run, batch: Batch, forests: list[Forest], rows: RowGradients
) -> None:
    """Check that in a user's loss, each row is independent of the other rows of its micro-batch.

    Otherwise the gradient cannot be split into parts of single rows. In the losses of this package,
    rows are independent, apart from the selection of targets by clip_cov and kl_cov.

    Raises:
        InputError: `blame_rows`: the derivatives of a row depend on other rows.
    """
    if not learner.config.loss.has_own_loss:
        return
    c, outputs = rows.coefficients.logprobs, rows.coefficients.outputs
    for forest in forests:
        slot = forest.target_slot
        row = batch.responses.row_of(slot.numpy())
        limit = SEPARATE * float(c[slot].abs().max()) if len(slot) else 0.0
        for number in np.unique(row):
            at = slot[torch.from_numpy(row == number)]
            alone = _alone(learner, rows.batch, at, outputs[at])
            if alone is not None and float((alone - c[at]).abs().max()) <= limit:
                continue
            finding = (
                f"the loss of row {batch.names[int(number)]} depends on other rows of its"
                " micro-batch, so the update cannot be split into the contributions of its rows"
            )
            hint = "rollouts replay --without shows the effect of leaving a row out"
            raise InputError(
                "blame_rows",
                f"{POLICY_LOSS.path} {learner.config.loss.policy_loss_type}",
                finding,
                hint=hint,
            )


def _alone(learner: Run, batch: Batch, at: Tensor, logprobs: Tensor) -> Tensor | None:
    """Compute the derivatives of the loss for a row alone; None if the loss fails."""
    try:
        return derivatives(learner, batch, at, logprobs, torch.zeros_like(logprobs))[0].cpu()
    except RolloutError:
        return None
