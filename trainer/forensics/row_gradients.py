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
update's gradient. A user's loss that compares rows is rejected: see `Linearized.check_separate`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call

from schemas.errors import InputError, RolloutError
from schemas.ragged import BoolArray, FloatArray, IntArray
from trainer.batch import Batch, completed
from trainer.batches.forest import Forest, chain_forest
from trainer.config.functions import POLICY_LOSS
from trainer.loss import objective, targets_of, with_target_weights
from trainer.models.attention import forward_mode_attention
from trainer.run.run import Run

forward_ad: Any = torch.autograd.forward_ad
SEPARATE = 1e-3
"""Rows count as separate if leaving out other rows changes the derivatives of their loss by at most
this much, relative to the largest derivative of the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linearized:
    """An update's loss as a linear function of the policy's outputs at T response tokens.

    Vectors in parameter space are lists with one tensor for each parameter that the optimizer changes.
    """

    learner: Run
    batch: Batch  # with the weights of the update's targets
    forests: Sequence[Forest]
    targets: BoolArray  # [T] response tokens that are targets of the update
    c: Tensor  # [T] float32; 0 at response tokens that are not targets
    e: Tensor  # [T] float32; 0 if the entropy has no gradient
    outputs: Tensor  # [T] log-probabilities of the targets, nats

    @property
    def slots(self) -> IntArray:
        """[M] targets of the update, as indices into the batch's response tokens."""
        return np.flatnonzero(self.targets)

    @property
    def row(self) -> IntArray:
        """[M] row of each target."""
        return self.batch.responses.row_of(self.slots)

    @property
    def rows(self) -> IntArray:
        """[R] rows of the batch that have targets in the update, ascending."""
        return np.unique(self.row)

    def sums(self, values: npt.NDArray[Any]) -> FloatArray:
        """Sum values of the T response tokens over the targets of each row ([R])."""
        sums = np.bincount(self.row, values[self.slots])[self.rows]
        return sums.astype(np.float64)

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        named = self.learner.policy.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _weighted(self, slot: Tensor, logprobs: Tensor, entropies: Tensor) -> Tensor:
        c, e = (t[slot].to(logprobs.device) for t in (self.c, self.e))
        return c * logprobs + e * entropies.to(logprobs.device)

    def gradient(self, row: int) -> list[Tensor]:
        """Compute the gradient of a row by forwarding only this row."""
        batch, device = self.batch, self.learner.accelerator.device
        tokens, rows = (batch.prompts, batch.responses), np.array([row])
        alone = chain_forest(*tokens, self.targets, rows, batch.routes)
        (forest,) = completed([alone], batch)
        slot = forest.target_slot
        outputs = self.learner.policy(forest.to(device), batch.temperature[slot].to(device))
        weighted = self._weighted(slot, *outputs).sum()
        parameters = list(self._parameters.values())
        return list(torch.autograd.grad(weighted, parameters, materialize_grads=True))

    def gradients(self) -> tuple[FloatArray, list[Tensor]]:
        """Compute the norm of each row's gradient ([R]) and their sum, the update's gradient.

        There is one backward pass for each row. Rows of a tree share tokens, and are forwarded as
        separate chains here. The gradient is not clipped.
        """
        total = [torch.zeros_like(parameter) for parameter in self._parameters.values()]
        norms = np.zeros(len(self.rows))
        for number, row in enumerate(self.rows.tolist()):
            gradient = self.gradient(row)
            norms[number] = norm(gradient)
            for sum_, part in zip(total, gradient, strict=True):
                sum_ += part
        return norms, total

    @torch.no_grad()
    def products(self, direction: Sequence[Tensor]) -> FloatArray:
        """Compute each target's contribution to the inner product of the gradient with a direction.

            p_t = <c_t grad l_t + e_t grad h_t, v>,        so that <G_i, v> = sum of p_t over row i

        p_t is the derivative of c_t l_t + e_t h_t at theta + x v with respect to x, at x = 0: one
        forward pass in forward mode yields it for all targets of a micro-batch, for any kind of layer.
        Rows may share tokens. Returns [T]: 0 at response tokens that are not targets.
        """
        learner, batch = self.learner, self.batch
        device, products = learner.accelerator.device, np.zeros(len(self.targets))
        for forest in self.forests:
            slot = forest.target_slot
            inputs = forest.to(device), batch.temperature[slot].to(device)
            with _forward_mode(learner.whole_policy.model):
                pairs = zip(self._parameters.items(), direction, strict=True)
                duals = {n: forward_ad.make_dual(p.detach(), tangent) for (n, p), tangent in pairs}
                outputs = functional_call(learner.policy, duals, inputs)
                tangents = [forward_ad.unpack_dual(output).tangent for output in outputs]
            # Without a gradient, the entropy has no tangent.
            tangents = [torch.zeros(len(slot)) if t is None else t for t in tangents]
            products[slot.numpy()] = self._weighted(slot, *tangents).double().cpu().numpy()
        return products

    def check_separate(self) -> None:
        """Check that in a user's loss, each row is independent of the other rows of its micro-batch.

        Otherwise the gradient cannot be split into parts of single rows. In the losses of this package,
        rows are independent, apart from the selection of targets by clip_cov and kl_cov.

        Raises:
            InputError: `blame_rows`: the derivatives of a row depend on other rows.
        """
        loss = self.learner.config.loss
        for forest in self.forests if loss.has_own_loss else ():
            slot = forest.target_slot
            row = self.batch.responses.row_of(slot.numpy())
            for number in np.unique(row):
                at = slot[torch.from_numpy(row == number)]
                try:
                    alone, _ = derivatives(self.learner, self.batch, at, self.outputs[at])
                    change = float((alone.cpu() - self.c[at]).abs().max())
                except RolloutError:
                    change = math.inf
                if change <= SEPARATE * self.c[slot].abs().max():
                    continue
                where = f"{POLICY_LOSS.path} {loss.policy_loss_type}"
                finding = (
                    f"the loss of row {self.batch.names[int(number)]} depends on other rows of its"
                    " micro-batch, so the update cannot be split into the contributions of its rows"
                )
                hint = "rollouts replay --without shows the effect of leaving a row out"
                raise InputError("blame_rows", where, finding, hint=hint)


def linearize(learner: Run, batch: Batch, forests: Sequence[Forest]) -> Linearized:
    """Compute the derivatives of an update's loss by a forward pass of its micro-batches.

    Raises:
        InputError: A user's loss fails, or its result is invalid.
    """
    batch = with_target_weights(learner, batch, forests)
    device, targets = learner.accelerator.device, np.zeros(len(batch.trains), np.bool_)
    c, e, outputs = (torch.zeros(len(targets)) for _ in range(3))
    for forest in forests:
        slot = forest.target_slot
        targets[slot.numpy()] = True
        with torch.no_grad():
            of_policy = learner.policy(forest.to(device), batch.temperature[slot].to(device))
        c[slot], e[slot] = (t.cpu() for t in derivatives(learner, batch, slot, *of_policy))
        outputs[slot] = of_policy[0].cpu()
    return Linearized(
        learner=learner, batch=batch, forests=forests, targets=targets, c=c, e=e, outputs=outputs
    )


def derivatives(
    learner: Run, batch: Batch, slot: Tensor, logprobs: Tensor, entropies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the derivatives c and e ([M] each) of the loss of complete rows.

    `slot` are their M targets, as indices into the batch's response tokens; `logprobs` and
    `entropies` (None: 0) are the policy's outputs ([M], nats).
    """
    if learner.config.loss.policy_loss_type == "distill":
        finding = "distill, whose loss does not follow from log-probabilities of single tokens"
        raise InputError("teacher_logprobs", "loss.policy_loss_type", finding, "another loss")
    entropies = torch.zeros_like(logprobs) if entropies is None else entropies
    logprobs, entropies = (t.detach().requires_grad_() for t in (logprobs, entropies))
    with torch.enable_grad():
        targets = targets_of(batch, slot, (logprobs, entropies))
        loss, _ = objective(targets, learner.config.loss, corrects=learner.corrects_for_sampler)
        c, e = torch.autograd.grad(loss, (logprobs, entropies), materialize_grads=True)
    return c, e if learner.whole_policy.entropy_gradient else torch.zeros_like(e)


def norm(vector: Sequence[Tensor]) -> float:
    """Compute the L2 norm over all parameters."""
    norms = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in vector)
    return math.sqrt(sum(float(one) ** 2 for one in norms))


@contextmanager
def _forward_mode(model: Any) -> Iterator[None]:
    """Prepare a model for derivatives in forward mode.

    Its experts are computed one by one, because PyTorch's grouped kernels have no such derivatives.
    """
    changes = model._can_set_experts_implementation()
    before = model.get_experts_implementation() if changes else ""
    try:
        if changes:
            model.set_experts_implementation("eager")
        with warnings.catch_warnings(), forward_ad.dual_level(), forward_mode_attention():
            # About PyTorch's own use of TorchScript.
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
            yield
    finally:
        if changes:
            model.set_experts_implementation(before)
