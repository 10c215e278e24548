"""Arguments and results of user functions: policy losses, estimators and reductions.

A configuration names a user function as `module:function`. A parameter that has the name of an
input receives that input. All other parameters are keys: each gets its value from the function's
section of the configuration (`[loss]` or `[advantage]`) or from the table `own` of that section, or
keeps its default. `**keys` gets every key of that table.

Parameters, keys and the module are checked before a model is loaded, and results after every call.
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
    """Signature of a `loss.policy_loss_type` function, which is called once per micro-batch.

    A target is a trained response token. Tensors are [M], one element per target, on the device of
    the policy. M is at least 1. All targets of a row are in one micro-batch; the targets of a
    trajectory or a group may be spread over several.

    Args:
        logprobs: [M] float32 nats: log-probability of each target under the current policy, at
            the temperature at which it was sampled; with gradient. Required.
        old_logprobs: [M] float32 nats under the policy at the start of the batch.
        rollout_logprobs: [M] float32 nats from the sampler. If the loss has this parameter, the
            dataset must contain them, and `loss.tis_ratio_type = "auto"` adds no importance weights.
        advantages: [M] float32 from the estimator, not scaled for the reduction. A loss without
            them is supervised: it needs no rewards, and is not corrected for sampler mismatch.
        row: [M] int64: row of each target, from 0. Rows depend on the layout.
        **keys: All other parameters are configuration keys.

    Returns:
        [M] losses with gradient, in the dtype of `logprobs`, finite; or a `TokenLoss`, which also
        has the clipped targets and your own metrics. Return losses that are not reduced: the run
        multiplies them by the importance weights and the weights of the reduction, and adds the KL
        and entropy terms. Inputs must not be changed in place.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | TokenLoss:
        """Compute the loss of each target."""


class AdvantageEstimator(Protocol):
    """Signature of an `advantage.estimator` function, which takes `returns`, `separate_rewards` or `rewards`.

    An estimator that takes `returns` or `separate_rewards` is called with all trained trajectories of the dataset. With
    `loss.kl_reward_coef`, it is called again with the groups of each batch, so an advantage may depend
    only on the trajectory's group. The advantage applies to every trained token of the trajectory.
    An estimator that takes `rewards` is called for each batch (`groups_per_batch` groups) with its
    N trained tokens, ordered by trajectory and step; these arrays are the same in every layout.

    Args:
        returns: [n] float64, finite: return of each trajectory (`outcome`).
        separate_rewards: [n, K] float64, finite: the rewards that `advantage.reward_weights` names,
            of each trajectory.
        rewards: [N] float64, finite: reward of each trained token.
        group_index: [n] or [N] int64, from 0 without gaps: group of each trajectory or token. A
            group consists of the trajectories of one `instance_id`. `partial_groups` applies to
            estimators with this parameter.
        trajectory: [N] int64, from 0 without gaps, non-decreasing: trajectory of each token.
            Only with `rewards`.
        values: [N] float64: the critic's value of the context before each token. Only with
            `rewards`; an estimator with this parameter needs a critic, which the run trains.
        **keys: All other parameters are configuration keys.

    Returns:
        [n] or [N] finite numbers (a NumPy array, a CPU tensor or a list); with `values`, a
        `CriticAdvantages`. The run does not whiten them; `advantage.batch_normalize` is applied
        afterwards.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> npt.ArrayLike | CriticAdvantages:
        """Compute the advantage of each trajectory, or of each trained token."""


class LossReduction(Protocol):
    """Signature of a `loss.reduction` function.

    It is called once per mini-batch with all M targets. The loss of an update is the sum of weight
    times loss over all targets, in all micro-batches and processes. The weights apply to the KL and
    entropy terms too.

    Args:
        num_targets: M, at least 1.
        row: [M] int64: row of each target, numbered over the batch, so there may be gaps. Rows
            depend on the layout.
        num_rows: Rows of the mini-batch, including rows without a target.
        trajectory: [M] int64: trajectory of each target, numbered like `row`.
        num_trajectories: Trajectories of the mini-batch, including trajectories without a target.
        group: [M] int64: group of each target, numbered like `row`.
        num_groups: Groups of the mini-batch, including groups without a target.
        micro_batch: [M] int64: micro-batch of each target, from 0 without gaps.
        num_micro_batches: Micro-batches of the mini-batch. The result of a reduction that
            takes this or `micro_batch` depends on `tokens_per_micro_batch`.
        **keys: All other parameters are configuration keys.

    Returns:
        [M] finite weights (a NumPy array, a CPU tensor or a list).
    """

    def __call__(self, *args: Any, **kwargs: Any) -> npt.ArrayLike:
        """Compute the weight of each target."""
