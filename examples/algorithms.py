"""Algorithms of other trainers, as functions of your own.

    rollouts train DS --model DIR --out RUN --set loss.policy_loss_type=examples.algorithms:gmpo \
        --set loss.reduction=sequence_mean

docs/algorithms.md#algorithms-of-other-trainers lists them, with what is built in and what is missing.
Inputs: `logprobs`, `old_logprobs`, `advantages` [M] per trained token, `row` [M] its row from 0;
`returns`, `group_index` [n] per trajectory; `rewards`, `trajectory`, `group_index` [N] per token of the
trajectories' chains.
"""

from math import comb

import numpy as np
import torch


def _row_sums(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(int(row.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, row, values)[row]


def _row_means(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return _row_sums(values, row) / _row_sums(torch.ones_like(values), row)


def gmpo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    row: torch.Tensor,
    gmpo_clip: float = 0.4,
) -> torch.Tensor:
    """GMPO (arXiv:2507.20673): the geometric mean of a row's clipped ratios; for `sequence_mean`.

    s = sign(A);  x_t = s (l_t - l_old_t);  r = exp(mean over the row of s min(x_t, gmpo_clip))
    loss = -r A
    """
    sign = advantages.sign()
    clipped = torch.clamp(sign * (logprobs - old_logprobs), max=gmpo_clip)
    return -_row_means(sign * clipped, row).exp() * advantages


def gpg(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """GPG (arXiv:2504.02546): the plain policy gradient, without a ratio: loss = -A l.

    Its A is R - mean of the group, and its factor alpha leaves groups of equal returns out of the
    mean: `advantage.normalize_by_std = false`, `data.drop_zero_variance_groups = true`.
    """
    return -advantages * logprobs


def dro(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, beta: float = 0.05
) -> torch.Tensor:
    """DRO (arXiv:2405.19107), with the penalty on the policy at the start (arXiv:2501.12599).

    loss = -(A l - beta / 2 (l - l_old)^2)
    """
    return -(advantages * logprobs - beta / 2 * (logprobs - old_logprobs) ** 2)


def off_policy_masked(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    row: torch.Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
    max_kl: float = 0.5,
) -> torch.Tensor:
    """PPO's clip without stale failures (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).

    loss = 0 in rows with A < 0 and mean over the row of (l_roll - l) > max_kl; else `regular`

    The report gives no value for max_kl. Add importance weights with `loss.tis_ratio_type = "token"`:
    a loss that takes `rollout_logprobs` has none by default.
    """
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    is_stale = _row_means((rollout_logprobs - logprobs).detach(), row) > max_kl
    return torch.where(is_stale & (advantages < 0), 0 * losses, losses)


def vespo(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    row: torch.Tensor,
    powers: tuple[float, float] = (2.0, 3.0),
    decays: tuple[float, float] = (3.0, 2.0),
) -> torch.Tensor:
    """VESPO (arXiv:2602.10693): a smooth weight of the row's ratio in place of a clip.

    W = exp(sum over the row of l - l_roll);  loss = -sg(W^k exp(decay (1 - W))) A l

    k and decay are the first of `powers` and `decays` where A >= 0, and the second where A < 0.
    """
    log_ratio = _row_sums((logprobs - rollout_logprobs).detach(), row).clamp(-20, 20)
    is_better = advantages >= 0
    k, decay = (torch.where(is_better, *map(logprobs.new_tensor, v)) for v in (powers, decays))
    return -(k * log_ratio + decay * (1 - log_ratio.exp())).exp() * advantages * logprobs


def length_weighted(row: np.ndarray, num_rows: int) -> np.ndarray:
    """LUSPO (arXiv:2602.05261): with `gspo`, each row's loss times its length: weight = 1 / rows."""
    return np.full(len(row), 1 / num_rows)


def pass_at_k(returns: np.ndarray, group_index: np.ndarray, k: int = 4) -> np.ndarray:
    """Advantages of pass@k (arXiv:2508.10751), with a success where the return is above 0.

    n attempts, m failures:  P = 1 - C(m, k) / C(n, k);  sd = sqrt(P (1 - P))
    success: A = (1 - P) / sd;  failure: A = (1 - P - C(m - 1, k - 1) / C(n - 1, k - 1)) / sd
    """
    advantages = np.zeros(len(returns))
    for group in np.unique(group_index):
        own = group_index == group
        success = returns[own] > 0
        n, m = len(success), int((~success).sum())
        some = 1 - comb(m, k) / comb(n, k) if n >= k else 0.0
        if not 0 < some < 1:
            continue  # all sets of k pass, or none
        failure = 1 - some - comb(m - 1, k - 1) / comb(n - 1, k - 1)
        advantages[own] = np.where(success, 1 - some, failure) / np.sqrt(some * (1 - some))
    return advantages


def opo(rewards: np.ndarray, trajectory: np.ndarray, group_index: np.ndarray) -> np.ndarray:
    """OPO (arXiv:2505.23585): the baseline weighs the returns of a group by their lengths.

    A = R - sum of (length R) / sum of lengths
    """
    returns = np.bincount(trajectory, rewards)[trajectory]
    # Each token has its trajectory's return, so a mean over tokens weighs by length.
    baseline = np.bincount(group_index, returns) / np.maximum(np.bincount(group_index), 1)
    return returns - baseline[group_index]
