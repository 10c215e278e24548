"""A batch as micro-batches, in the layout that is to be forwarded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.data import Batch
from trainer.forest import Forest, chain_forests, chain_lengths
from trainer.tree import make_trie, tree_forests


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """What one optimizer step forwards.

    Attributes:
        forests: Micro-batches that hold its every target once, all targets of a row in one.
        num_distinct_tokens: What trees forward before any is cut; None: rows are chains.
    """

    forests: list[Forest]
    num_distinct_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to forward."""
        return sum(forest.num_tokens for forest in self.forests)

    @property
    def repeated_share(self) -> float | None:
        """Tokens forwarded over distinct ones, less 1; None: rows are chains."""
        if self.num_distinct_tokens is None:
            return None
        return self.num_tokens / max(self.num_distinct_tokens, 1) - bool(self.forests)

    @property
    def metrics(self) -> dict[str, Any]:
        """What a line of `metrics.jsonl` says of it."""
        share = self.repeated_share
        return {} if share is None else {"repeated_share": share}


def cut_batch(batch: Batch, config: TrainConfig, num_ranks: int = 1) -> list[MiniBatch]:
    """The mini-batches of a batch, cut into micro-batches of `tokens_per_micro_batch`.

    Args:
        batch: Rows of at most that many tokens each; steps, where the layout is `tree`.
        config: The run's configuration.
        num_ranks: Processes that share the micro-batches.
    """
    tokens = batch.prompts, batch.responses
    lengths, budget = chain_lengths(*tokens, batch.trains), config.tokens_per_micro_batch
    scope = batch.group if config.tree_scope == "group" else batch.trajectory
    found = []
    for number in range(int(batch.mini_batch.max(initial=-1)) + 1):
        rows = np.flatnonzero(batch.mini_batch == number)
        if config.sequence_layout == "tree":
            trie = make_trie(*tokens, lengths, scope, rows)
            forests = tree_forests(trie, *tokens, batch.trains, budget, num_ranks)
            found.append(MiniBatch(forests=forests, num_distinct_tokens=trie.num_tokens))
        else:
            forests = chain_forests(*tokens, batch.trains, rows, budget, num_ranks)
            found.append(MiniBatch(forests=forests))
    return found
