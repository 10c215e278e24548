"""Baseline for training benchmarks: padded rows, and logits at every position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.ragged import IntArray
from trainer.batch import Batch

CLIP = 0.2


def micro_batches(batch: Batch, budget: int) -> Iterator[IntArray]:
    """Sort rows by length, and yield groups whose size when padded is within the budget."""
    lengths = batch.prompts.lengths + batch.responses.lengths
    rows: list[int] = []
    for row in np.argsort(-lengths, kind="stable"):
        if rows and lengths[rows[0]] * (len(rows) + 1) > budget:
            yield np.array(rows)
            rows = []
        rows.append(int(row))
    yield np.array(rows)


def padded_step(model: Any, batch: Batch, budget: int) -> int:
    """Compute the gradient of the clipped loss; return the tokens forwarded, including padding.

    The loss is the mean over trained tokens. The step is the first after sampling, so the old
    log-probabilities equal the policy's.
    """
    num_forwarded, num_trained = 0, int(batch.trains.sum())
    device = next(model.parameters()).device
    for rows in micro_batches(batch, budget):
        ids, attended, trains, advantages = (t.to(device) for t in _padded(batch, rows))
        logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits
        logits = logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[:, :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses = -torch.minimum(ratio * advantages[:, 1:], clipped * advantages[:, 1:])
        (losses * trains[:, 1:]).sum().div(num_trained).backward()
        num_forwarded += ids.numel()
    return num_forwarded


def _padded(batch: Batch, rows: IntArray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token ids, attention mask, loss mask and advantages of B padded rows ([B, L] each)."""
    lengths = (batch.prompts.lengths + batch.responses.lengths)[rows]
    ids, attended, trains = (np.zeros((len(rows), lengths.max()), np.int64) for _ in range(3))
    advantages = np.zeros(ids.shape, np.float32)
    for i, row in enumerate(rows):
        prompt, response = batch.prompts.row(row), batch.responses.row(row)
        first = batch.responses.offsets[row]
        slots = slice(first, first + len(response))
        at = slice(len(prompt), lengths[i])
        ids[i, : lengths[i]] = np.concatenate([prompt, response])
        attended[i, : lengths[i]] = 1
        trains[i, at], advantages[i, at] = batch.trains[slots], batch.advantages[slots].numpy()
    found = (torch.from_numpy(a) for a in (ids, attended, trains, advantages))
    return next(found), next(found), next(found), next(found)
