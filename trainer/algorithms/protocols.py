"""Arguments and results of user functions: a policy loss, an estimator, a reduction.

A configuration names such a function as `module:function`. It receives, by name, the
inputs for which it has parameters. Any other parameter is a key: it gets the value of that key in the
configuration, or in the table `[loss]` (`[train.loss]` for `rollouts rl`), or keeps its default.
`**keys` gets every key of that table.

Parameters, keys and the module are checked before a model is loaded; results at every call.
Built-in functions are called in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from trainer.algorithms.advantages.token import CriticAdvantages
    from trainer.algorithms.losses.policy import TokenLoss


class PolicyLoss(Protocol):
    """A policy loss: `policy_loss_type`. It is called once per micro-batch.

    A target is a response token that trains. Tensors are [M], an element per target, on the device
    of the policy. M is at least 1. All targets of a row are in one micro-batch; those of a
    trajectory or a group may not be.

    Args:
        logprobs: [M] float32 nats: log-probability of each target under the current policy, at
            the temperature it was sampled at; with gradient. Required.
        old_logprobs: [M] float32 nats under the policy at the start of the batch.
        rollout_logprobs: [M] float32 nats, the sampler's. A loss that takes them is refused for a
            dataset without them; `tis_ratio_type = "auto"` then adds no importance weights.
        advantages: [M] float32, as the estimator returned them, not normalised. A loss without them
            is supervised: it needs no rewards, and is not corrected for the sampler.
        row: [M] int64: row of each target, from 0. Rows depend on the layout.
        **keys: Every other parameter is a key.

    Returns:
        [M] losses with gradient, in the dtype of `logprobs`, finite; or a `TokenLoss`, which has the
        share of clipped targets and metrics of your own besides. They are not reduced: the run
        multiplies them by the importance weights and the weights of the reduction, and adds the KL
        and entropy terms. Inputs must not be changed in place.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | TokenLoss:
        """Compute the loss of each target."""


class AdvantageEstimator(Protocol):
    """An advantage estimator: `advantage_estimator`. It takes either `returns` or `rewards`.

    With `returns` it is called with all trajectories that train, of the whole dataset, and again for
    the groups of a batch with `kl_reward_coef`: an advantage may depend only on its group. It
    applies to every trained token of the trajectory. With `rewards` it is called for each batch
    (`groups_per_batch` groups) with its N trained tokens, in the order of their trajectories' steps,
    whatever rows they are in; the values are the same in every layout.

    Args:
        returns: [n] float64, finite: return of each trajectory (`outcome`).
        rewards: [N] float64, finite: reward of each trained token.
        group_index: [n] or [N] int64, from 0 without gaps: group of each trajectory or token. A
            group has the trajectories of one `instance_id`. `partial_groups` applies to estimators
            that take it.
        trajectory: [N] int64, from 0 without gaps, not decreasing: trajectory of each token. With
            `rewards` only.
        values: [N] float64: the critic's value of the context before each token. With `rewards` only;
            an estimator that takes them trains a critic.
        **keys: Every other parameter is a key.

    Returns:
        [n] or [N] finite numbers (a NumPy array, a CPU tensor or a list); with `values` a
        `CriticAdvantages`. Nothing is whitened unless the estimator does it;
        `advantage_batch_normalize` comes after it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> npt.ArrayLike | CriticAdvantages:
        """Compute the advantage of each trajectory, or of each trained token."""


class LossReduction(Protocol):
    """A reduction: `loss_reduction`. It is called once per mini-batch, with all of its M targets.

    The loss of an update is the sum over targets of weight times loss, over all micro-batches and
    processes. The weights apply to the KL and entropy terms too.

    Args:
        num_targets: M, at least 1.
        row: [M] int64: row of each target, numbered over the batch, so with gaps. Rows depend on the
            layout.
        num_rows: Rows of the mini-batch, including those without a target.
        trajectory: [M] int64: trajectory of each target, numbered like `row`.
        num_trajectories: Trajectories of the mini-batch, including those without a target.
        group: [M] int64: group of each target, numbered like `row`.
        num_groups: Groups of the mini-batch, including those without a target.
        micro_batch: [M] int64: micro-batch of each target, from 0 without gaps.
        num_micro_batches: Micro-batches of the mini-batch. A reduction that takes either depends on
            `tokens_per_micro_batch`.
        **keys: Every other parameter is a key.

    Returns:
        [M] weights, finite numbers (a NumPy array, a CPU tensor or a list).
    """

    def __call__(self, *args: Any, **kwargs: Any) -> npt.ArrayLike:
        """Compute the weight of each target."""
