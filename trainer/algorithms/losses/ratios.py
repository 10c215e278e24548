"""Probability ratios of targets, and sums over the targets of a row."""

from __future__ import annotations

from torch import Tensor

# exp(20) is about 5e8: far beyond any useful ratio, and far below float32's overflow at exp(88).
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Compute exp(log_ratio), with the exponent clamped to +-20 so that it stays finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def probability_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """Compute exp(logprobs - base_logprobs), with the exponent clamped to +-20."""
    return bounded_exp(logprobs - base_logprobs)


def row_sums(values: Tensor, row: Tensor) -> Tensor:
    """Sum the targets of each row.

    Args:
        values: [M] one per target.
        row: [M] int64 row of each target, 0..R-1.

    Returns:
        [R], where R - 1 is the largest row index; rows without targets sum to 0.

    Example:
        >>> row_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])).tolist()
        [5.0, 2.0]
    """
    num_rows = int(row.max()) + 1 if len(row) else 0
    return values.new_zeros(num_rows).index_add(0, row, values)
