import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RolloutError
from schemas.ragged import Ragged
from tests.helpers.trainer_helpers import forests_of, make_batch, row_lists
from trainer.batches.forest import (
    ChainLayout,
    RowLimit,
    attention_mask,
    chain_forest,
    chain_lengths,
    pack,
)


def test_two_chains_side_by_side_keep_their_slots_and_positions():
    rows = [([7], [1, 2], [True, True]), ([5, 6], [3, 4], [False, True])]
    batch = make_batch(rows)
    forest = chain_forest(batch.prompts, batch.responses, batch.trains, np.array([1, 0]))
    assert forest.token_ids.tolist() == [5, 6, 3, 7, 1]
    assert forest.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert forest.subtree_end.tolist() == [3, 3, 3, 5, 5]
    assert forest.target_parent.tolist() == [2, 3, 4]
    assert forest.target_token.tolist() == [4, 1, 2]
    assert forest.target_slot.tolist() == [3, 0, 1]


def test_a_row_forwards_what_precedes_its_last_target_and_nothing_without_one():
    batch = make_batch([([7, 8], [1, 2], [True, False]), ([9], [3], [False])])
    forest = chain_forest(batch.prompts, batch.responses, batch.trains, np.array([0, 1]))
    assert forest.token_ids.tolist() == [7, 8]
    assert forest.target_parent.tolist() == [1]
    assert forest.target_token.tolist() == [1]


def test_attention_follows_ancestors_only():
    # 0 has children 1 (which has child 2) and 3; 4 is another root
    mask = attention_mask(torch.tensor([4, 3, 3, 4, 5]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_chains_are_laid_out_by_their_cumulative_lengths():
    layout = ChainLayout.of(torch.tensor([2, 2, 5, 5, 5]))
    assert layout.ends is not None
    assert (layout.lengths, layout.ends.tolist(), layout.longest) == ([2, 3], [0, 2, 5], 3)
    assert ChainLayout.of(torch.tensor([3, 2, 3])) == ChainLayout()


def test_rows_without_targets_cost_nothing():
    batch = make_batch([([7, 8, 9], [1], [False]), ([7], [1], [True])])
    assert chain_lengths(batch.prompts, batch.responses, batch.trains).tolist() == [0, 1]
    assert [f.num_tokens for f in forests_of(batch)] == [1]


def test_nothing_to_train_makes_no_micro_batch():
    assert forests_of(make_batch([([7], [1], [False])])) == []


@given(row_lists(), st.integers(12, 40))
def test_micro_batches_hold_every_target_once_within_the_budget(rows, budget):
    batch = make_batch(rows)
    forests = forests_of(batch, budget)
    slots = torch.cat([f.target_slot for f in forests])
    assert sorted(slots.tolist()) == np.flatnonzero(batch.trains).tolist()
    assert all(f.num_tokens <= budget for f in forests)
    for forest in forests:
        expected = batch.responses.values[forest.target_slot.numpy()]
        assert forest.target_token.tolist() == expected.tolist()


@given(row_lists())
def test_a_targets_ancestors_are_the_tokens_before_it_in_its_row(rows):
    batch = make_batch(rows)
    for forest in forests_of(batch):
        mask = attention_mask(forest.subtree_end)[0, 0]
        for parent, slot in zip(forest.target_parent, forest.target_slot.numpy(), strict=True):
            row = int(batch.responses.row_of(np.array([slot]))[0])
            offset = int(slot - batch.responses.offsets[row])
            seen = forest.token_ids[mask[parent]].tolist()
            assert seen == rows[row][0] + rows[row][1][:offset]
            assert forest.position_ids[mask[parent]].tolist() == list(range(len(seen)))


def test_row_above_the_limit_is_named_with_its_length_and_the_limit():
    limit = RowLimit(num_tokens=8, reason="tokens_per_micro_batch", hint="raise it")
    limit.check(np.array([8, 1]), ["a", "b"])
    with pytest.raises(RolloutError) as error:
        limit.check(np.array([3, 9]), ["a", "b"])
    assert str(error.value) == (
        "b: found 9 tokens to forward; expected at most 8 (tokens_per_micro_batch). [row_too_long]"
    )


def test_no_rows_at_all_is_an_empty_batch():
    empty = Ragged(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, bool))
    assert chain_lengths(empty, empty, np.zeros(0, bool)).tolist() == []
    assert pack(np.zeros(0, np.int64), 4) == []


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(20, 60))
def test_pack_gives_each_row_to_the_first_bin_with_room(lengths, budget):
    bins = []
    for row in sorted((r for r, n in enumerate(lengths) if n), key=lambda r: (-lengths[r], r)):
        loads = [sum(lengths[r] for r in rows) for rows in bins]
        fits = [i for i, load in enumerate(loads) if load + lengths[row] <= budget]
        if fits:
            bins[fits[0]].append(row)
        else:
            bins.append([row])
    packed = [rows.tolist() for rows in pack(np.array(lengths, dtype=np.int64), budget)]
    assert packed == sorted(sorted(rows) for rows in bins)
