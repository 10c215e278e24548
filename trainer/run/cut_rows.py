"""Rows that `max_row_tokens` truncates or leaves without a token to train on."""

from __future__ import annotations

import numpy as np
import polars as pl

from schemas.errors import InvariantError, count
from trainer.config.sections import BatchConfig
from trainer.config.train_config import TrainConfig

KEPT_SHARES = (0.75, 0.9, 1)
"""Minimum fraction of rows that each suggested value of `max_row_tokens` keeps."""
_MULTIPLE = 256  # suggested values are multiples of this, or the model's limit


def truncated(rows: pl.DataFrame, config: BatchConfig) -> str | None:
    """Describe the rows that lose trained tokens to `max_row_tokens`; None if there are none.

    Args:
        rows: See `without_tokens`.
        config: Section `[batch]`.

    Example:
        >>> config = BatchConfig(max_row_tokens=512)
        >>> truncated(pl.DataFrame({"num_forwarded_tokens": [400, 511, 512, 1199]}), config)
        '2 of 4 rows are truncated at 512 tokens (max_row_tokens); the longest has 1,200 up to its last trained token'
    """
    most = config.max_row_tokens
    # The last trained token is at the position `num_forwarded_tokens`, counted from 0.
    last = rows["num_forwarded_tokens"]
    if most is None or not (num_cut := int((last >= most).sum())):
        return None
    cut_off = (
        f"{num_cut:,} of {count(len(rows), 'row')} {'is' if num_cut == 1 else 'are'} truncated"
    )
    longest = int(last.to_numpy().max()) + 1
    return (
        f"{cut_off} at {count(most, 'token')} (max_row_tokens); the longest has {longest:,} up to its"
        " last trained token"
    )


def without_tokens(rows: pl.DataFrame, config: BatchConfig) -> str | None:
    """Describe the rows without trainable tokens within `max_row_tokens`; None if there are none.

    Args:
        rows: Rows to train on, as indexed by `trainer.batches.data.index_rows`.
        config: Section `[batch]`.
    """
    most = config.max_row_tokens
    if most is None or not (num_lost := int((rows["num_untrained_at_start"] >= most).sum())):
        return None
    num, held = count(len(rows), "row"), "has" if num_lost == 1 else "have"
    longest = int(rows["num_prompt_tokens"].to_numpy().max())
    return (
        f"{num_lost:,} of {num} {held} no token to train on within max_row_tokens ({most:,}); the"
        f" longest prompt has {longest:,} tokens"
    )


def larger_limits(rows: pl.DataFrame, most: int, limit: int) -> str:
    """Suggest larger values of `max_row_tokens` that leave most rows some tokens to train on.

    Args:
        rows: See `without_tokens`; not empty.
        most: The current value of `max_row_tokens`.
        limit: Maximum row length of the model, in tokens.

    Example:
        >>> rows = pl.DataFrame({"num_untrained_at_start": [300, 500, 500, 1200]})
        >>> larger_limits(rows, 100, 8192)
        'batch.max_row_tokens=512 leaves tokens to train on in 3 of 4 rows, 1280 in 4 of 4'
    """
    at_start = np.sort(rows["num_untrained_at_start"].to_numpy())
    kept = {}
    for share in KEPT_SHARES:
        needed = int(at_start[int(np.ceil(share * len(at_start))) - 1]) + 1
        value = min(-(-needed // _MULTIPLE) * _MULTIPLE, limit)
        if value > most:
            kept[value] = int((at_start < value).sum())
    if not kept:
        return f"filter out these rows: this model supports at most {limit:,} tokens per row"
    (first, num), *more = list(kept.items())[:2]
    text = f"batch.max_row_tokens={first} leaves tokens to train on in {num:,} of"
    text += f" {count(len(at_start), 'row')}"
    return ", ".join([text, *(f"{value} in {num:,} of {len(at_start):,}" for value, num in more)])


def refuse_all_cut(rows: pl.DataFrame, config: TrainConfig, limit: int) -> None:
    """Reject a run in which `max_row_tokens` leaves no row with a token to train on.

    Raises:
        InvariantError: `mask_trains_something`: no row has a token to train on.
    """
    most = config.batch.max_row_tokens
    if most is not None and bool((rows["num_untrained_at_start"] >= most).all()):
        got = without_tokens(rows, config.batch) or ""
        hint = larger_limits(rows, most, limit)
        raise InvariantError("mask_trains_something", config.data.dataset, got, hint=hint)
