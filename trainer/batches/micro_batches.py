"""Cut a batch into micro-batches, in the configured layout.

Rows are put together in `trainer.batches.forest`, trees in `trainer.batches.tree`. Each process
packs the rows whose tokens it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.batch import Batch
from trainer.batches.forest import Forest, MiniBatch, chain_forests, chain_lengths, with_sets
from trainer.batches.pictures import with_pictures
from trainer.batches.tree import make_trie, tree_forests
from trainer.config.sections import BatchConfig


def cut_batch(batch: Batch, config: BatchConfig) -> list[MiniBatch]:
    """Split a batch into mini-batches, and each into micro-batches of `tokens_per_micro_batch`.

    With the layout `tree`, every row must be a single step.
    """
    tokens = batch.prompts, batch.responses
    routes, budget = batch.routes, config.tokens_per_micro_batch
    lengths = chain_lengths(*tokens, batch.trains)
    scope = batch.scope(config)
    mini_batches = []
    for number in range(int(batch.mini_batch.max(initial=-1)) + 1):
        rows = np.flatnonzero(batch.mini_batch == number)
        if config.sequence_layout == "tree":
            trie = make_trie(*tokens, lengths, scope, rows, routes)
            forests = tree_forests(trie, *tokens, batch.trains, budget, routes)
            forests = completed(forests, batch)
            num_distinct, num_tokens = trie.num_tokens, sum(forest.num_tokens for forest in forests)
            repeated_share = num_tokens / max(num_distinct, 1) - bool(forests)
            mini_batches.append(
                MiniBatch(
                    forests=forests,
                    num_distinct_tokens=num_distinct,
                    metrics={"repeated_share": repeated_share},
                )
            )
        else:
            forests = chain_forests(*tokens, batch.trains, rows, budget, routes)
            mini_batches.append(MiniBatch(forests=completed(forests, batch)))
    return mini_batches


def completed(forests: Sequence[Forest], batch: Batch) -> list[Forest]:
    """Add the sets of ids of a batch, and its pictures, to micro-batches of its rows."""
    return with_pictures(with_sets(forests, batch.support), batch.pictures)
