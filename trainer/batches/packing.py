"""Cut a batch into micro-batches, in the configured layout.

Rows are put together in `trainer.batches.forest` (`pack`, `spread`), trees in `trainer.batches.tree`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.batches.data import Batch
from trainer.batches.forest import Forest, chain_forests, chain_lengths, with_sets
from trainer.batches.tree import make_trie, tree_forests
from trainer.config.sections import BatchConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """Micro-batches of one optimizer step.

    Attributes:
        forests: Micro-batches, which together contain every target once; all targets of a row are
            in the same micro-batch.
        num_distinct_tokens: Tokens in all trees before trees are cut; None if rows are chains.
    """

    forests: list[Forest]
    num_distinct_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens to forward."""
        return sum(forest.num_tokens for forest in self.forests)

    @property
    def repeated_share(self) -> float | None:
        """Tokens repeated because trees were cut, per distinct token; None if rows are chains."""
        if self.num_distinct_tokens is None:
            return None
        return self.num_tokens / max(self.num_distinct_tokens, 1) - bool(self.forests)

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the packing, for `metrics.jsonl`."""
        share = self.repeated_share
        return {} if share is None else {"repeated_share": share}


def cut_batch(batch: Batch, config: BatchConfig, num_ranks: int = 1) -> list[MiniBatch]:
    """Split a batch into mini-batches, and each into micro-batches of `tokens_per_micro_batch`.

    With the layout `tree`, every row must be a single step. `num_ranks` processes share the
    micro-batches.
    """
    tokens = batch.prompts, batch.responses
    routes, budget = batch.routes, config.tokens_per_micro_batch
    lengths = chain_lengths(*tokens, batch.trains)
    scope = batch.group if config.tree_scope == "group" else batch.trajectory
    found = []
    for number in range(int(batch.mini_batch.max(initial=-1)) + 1):
        rows = np.flatnonzero(batch.mini_batch == number)
        if config.sequence_layout == "tree":
            trie = make_trie(*tokens, lengths, scope, rows, routes)
            forests = tree_forests(trie, *tokens, batch.trains, budget, num_ranks, routes)
            forests = with_sets(forests, batch.support)
            found.append(MiniBatch(forests=forests, num_distinct_tokens=trie.num_tokens))
        else:
            forests = chain_forests(*tokens, batch.trains, rows, budget, num_ranks, routes)
            found.append(MiniBatch(forests=with_sets(forests, batch.support)))
    return found
