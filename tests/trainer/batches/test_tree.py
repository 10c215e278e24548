"""Forests of shared prefixes: every target once per row, after the tokens of its own row."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rollout_io
from pipelines.statistics.savings import dataset_savings
from schemas.ragged import Ragged
from tests.helpers.examples import examples
from tests.helpers.trainer_helpers import make_batch
from tests.helpers.tree_helpers import (
    batch_of,
    families,
    mini_batch_of,
    parents,
    trie_of,
)
from trainer.batches.forest import attention_mask
from trainer.batches.tree import cut, make_trie, tree_forests


def test_a_shared_sampled_token_is_forwarded_once_and_a_target_of_each_row():
    rows = [
        ([5], [1, 2, 3], [True] * 3),
        ([5], [1, 2, 4], [True] * 3),
        ([5, 1], [2, 6], [True] * 2),
    ]
    batch = make_batch(rows, trajectories=[("a", "a_0"), ("a", "a_1"), ("a", "a_2")])
    (forest,) = mini_batch_of(batch).forests
    assert forest.token_ids.tolist() == [5, 1, 2]
    assert forest.position_ids.tolist() == [0, 1, 2]
    assert forest.subtree_end.tolist() == [3, 3, 3]
    targets = zip(
        forest.target_slot.tolist(),
        forest.target_parent.tolist(),
        forest.target_token.tolist(),
        strict=True,
    )
    expected = [(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 0, 1), (4, 1, 2), (5, 2, 4)]
    assert sorted(targets) == [*expected, (6, 1, 2), (7, 2, 6)]


def test_a_response_that_forks_has_two_subtrees():
    rows = [([5], [1, 2, 3], [True] * 3), ([5, 1, 8], [4, 4], [True] * 2)]
    (forest,) = mini_batch_of(make_batch(rows, trajectories=[("a", "a_0")] * 2)).forests
    assert forest.token_ids.tolist() == [5, 1, 2, 8, 4]
    assert forest.position_ids.tolist() == [0, 1, 2, 2, 3]
    assert forest.subtree_end.tolist() == [5, 5, 3, 5, 5]


@settings(max_examples=examples(60), deadline=None)
@given(families(), st.integers(24, 60), st.sampled_from(["trajectory", "group"]))
def test_micro_batches_hold_every_target_once_after_its_own_row_within_the_budget(
    family, budget, scope
):
    rows, _ = family
    batch = batch_of(family)
    found = mini_batch_of(batch, tree_scope=scope, tokens_per_micro_batch=budget)
    forests = found.forests
    slots = torch.cat([f.target_slot for f in forests])
    assert sorted(slots.tolist()) == np.flatnonzero(batch.trains).tolist()
    row_of = {row: n for n, f in enumerate(forests) for row in rows_in(batch, f)}
    assert len(row_of) == sum(len(rows_in(batch, f)) for f in forests)
    for forest in forests:
        assert forest.num_tokens <= budget
        depth_of_parent = np.append(forest.position_ids.numpy(), -1)[parents(forest)]
        assert (forest.position_ids.numpy() == depth_of_parent + 1).all()
        mask = attention_mask(forest.subtree_end)[0, 0]
        for parent, slot, token in zip(
            forest.target_parent, forest.target_slot.numpy(), forest.target_token, strict=True
        ):
            row = int(batch.responses.row_of(np.array([slot]))[0])
            offset = int(slot - batch.responses.offsets[row])
            seen = forest.token_ids[mask[parent]].tolist()
            assert seen == rows[row][0] + rows[row][1][:offset]
            assert int(token) == rows[row][1][offset]


def rows_in(batch, forest):
    return set(batch.responses.row_of(forest.target_slot.numpy()).tolist())


@settings(max_examples=examples(60), deadline=None)
@given(families(), st.sampled_from(["trajectory", "group"]))
def test_without_a_budget_each_distinct_prefix_of_a_scope_is_forwarded_once(family, scope):
    batch = batch_of(family)
    found = mini_batch_of(batch, tree_scope=scope, tokens_per_micro_batch=10_000)
    prefixes = set()
    for (prompt, response, mask), (group, trajectory) in zip(*family, strict=True):
        last = max((t for t, trains in enumerate(mask) if trains), default=None)
        tokens = [] if last is None else prompt + response[:last]
        name = group if scope == "group" else trajectory
        prefixes |= {(name, *tokens[: n + 1]) for n in range(len(tokens))}
    num_tokens = sum(forest.num_tokens for forest in found.forests)
    assert num_tokens == len(prefixes) == found.num_distinct_tokens
    assert found.metrics["repeated_share"] == 0


def test_no_rows_at_all_make_no_micro_batch():
    found = mini_batch_of(make_batch([([1, 2], [3], [False])]))
    assert found.forests == []
    assert found.metrics["repeated_share"] == 0


def test_documented_cuts():
    rows = [[1, 2, 3, 4], [1, 2, 3, 5, 5, 5], [1, 6, 6, 6, 6], [1, 6, 6, 6, 7]]
    trie = trie_of(rows)
    assert trie.shared.tolist() == [0, 3, 1, 4]
    assert [run.tolist() for run in cut(trie, 8)] == [[0, 1], [2, 3]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=7), st.integers(8, 16)
)
# The first and the last two rows fit together; a cut before the last row repeats fewer tokens.
@example([[1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0]], 8)
def test_no_other_way_to_cut_repeats_fewer_tokens(rows, budget):
    trie = trie_of(rows)
    runs = cut(trie, budget)
    assert [row for run in runs for row in run.tolist()] == list(range(len(rows)))
    costs = [trie.part(run).num_tokens for run in runs]
    assert max(costs, default=0) <= budget
    best = [0, *[10**9] * len(rows)]
    for end in range(1, len(rows) + 1):
        for begin in range(end):
            tokens = trie.part(np.arange(begin, end)).num_tokens
            if tokens <= budget:
                best[end] = min(best[end], best[begin] + tokens)
    assert sum(costs) == best[-1]


@pytest.mark.parametrize(("scope", "num_tokens"), [("trajectory", 16_075), ("group", 13_896)])
def test_distinct_tokens_of_the_shop_are_those_that_the_estimate_counts(
    scope, num_tokens, shop_dataset
):
    table = rollout_io.scan(str(shop_dataset)).collect().to_arrow()
    prompts, responses = (
        Ragged.from_arrow(table.column(name)) for name in ("prompt_token_ids", "response_ids")
    )
    name = "instance_id" if scope == "group" else "trajectory_id"
    scopes = np.unique(table.column(name).to_pylist(), return_inverse=True)[1]
    lengths, rows = prompts.lengths + responses.lengths, np.arange(table.num_rows)
    trie = make_trie(prompts, responses, lengths, scopes, rows)
    assert trie.num_tokens == num_tokens
    assert dataset_savings(shop_dataset)[f"tree_per_{scope}"].num_tokens == num_tokens
    is_target = np.ones(len(responses.values), dtype=np.bool_)
    forests = tree_forests(trie, prompts, responses, is_target, 2_048)
    assert sum(forest.num_tokens for forest in forests) < 1.05 * num_tokens
