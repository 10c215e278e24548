"""Rows longer than a micro-batch, and than the model's context."""

import json
import re

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import trainer
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.examples import examples
from tests.helpers.rl_helpers import config_of, save_model
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, step, write_dataset
from trainer import rl
from trainer.batches.forest import pack
from trainer.batches.tree import Trie, cut
from trainer.cli.train import plan_text
from trainer.models.policy import row_limit
from trainer.reports.dry_run import dry_run
from trainer.rl.learning import Learning
from trainer.run.checkpoint import latest_checkpoint
from trainer.run.dataset_checks import cut_rows


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "ds", group_rows(2, (1.0, 0.0)))


def config(dataset, model, out, **settings):
    return train_config(dataset=dataset, model=model, out=str(out), **settings)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 20))
def test_a_row_above_the_budget_has_a_micro_batch_of_its_own(lengths, budget):
    bins = pack(np.array(lengths, np.int64), budget)
    assert sorted(row for rows in bins for row in rows) == [i for i, n in enumerate(lengths) if n]
    for rows in bins:
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= budget


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1), st.integers(1, 20))
def test_a_tree_is_cut_around_rows_above_the_budget(rows, budget):
    lengths = np.array([length for length, _ in rows], np.int64)
    shared = np.array([0, *(min(s, *lengths[i : i + 2]) for i, (_, s) in enumerate(rows[1:]))])
    index = np.arange(len(rows))
    runs = cut(Trie(rows=index, tokens=[], lengths=lengths, shared=shared), budget)
    assert np.concatenate(runs).tolist() == index.tolist()
    for run in runs:
        tokens = lengths[run[0]] + (lengths - shared)[run[1:]].sum()
        assert len(run) == 1 or tokens <= budget


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["step", "merge", "tree"])
def test_long_rows_are_forwarded_alone_with_the_same_gradient_and_a_warning(
    dataset, model, tmp_path, layout, capsys
):
    found = []
    for budget in (6, 1000):
        settings = {"sequence_layout": layout, "tokens_per_micro_batch": budget}
        made = trainer.train(config(dataset, model, tmp_path / str(budget), **settings)).metrics
        found.append(made)
        warned = "rows longer than tokens_per_micro_batch (6)" in capsys.readouterr().err
        assert warned == (budget == 6)
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)
    assert found[0]["num_micro_batches"] > found[1]["num_micro_batches"]


@pytest.mark.slow
def test_tokens_beyond_the_longest_row_are_cut_off_and_counted(dataset, tmp_path):
    small = save_tiny_model(tmp_path / "small", max_position_embeddings=13)
    with pytest.raises(RolloutError, match=r"(?s)\[row_too_long\].*batch\.max_row_tokens"):
        trainer.train(config(dataset, small, tmp_path / "refused"))
    metrics = trainer.train(config(dataset, small, tmp_path / "cut", max_row_tokens=13)).metrics
    # Each trajectory: 5 prompt tokens, 4 that train, 3 observed, 4 that train, of which 1 is left.
    assert metrics["num_truncated_rows"] == metrics["num_rows"] == 4
    assert metrics["num_trained_tokens"] == 4 * 5


@pytest.mark.slow
def test_a_run_is_resumed_with_another_micro_batch_budget(dataset, model, tmp_path):
    settings = {"groups_per_batch": 1, "groups_per_mini_batch": 1}
    trainer.train(config(dataset, model, tmp_path, max_updates=1, **settings))
    resumed = config(dataset, model, tmp_path, tokens_per_micro_batch=64, **settings)
    assert trainer.train(resumed, resume=True).num_updates == 2


@pytest.mark.slow
def test_the_loop_has_a_checkpoint_of_its_first_iteration_and_of_where_it_failed(
    tmp_path, tokenizer, monkeypatch
):
    policy = save_model(tmp_path / "model", tokenizer)
    planned = config_of(tmp_path, policy, train={"tokens_per_micro_batch": 24})
    update = Learning.update

    def fails_in_the_third(self, *given):
        if self.iteration == 2:
            raise RolloutError("row_too_long", "a row", "300 tokens", "at most 256")
        return update(self, *given)

    monkeypatch.setattr(Learning, "update", fails_in_the_third)
    with pytest.raises(RolloutError, match="row_too_long"):
        rl.run(planned)
    steps = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("global_step_*"))
    assert steps == ["global_step_2", "global_step_4"]
    monkeypatch.undo()
    again = config_of(tmp_path, policy, train={"tokens_per_micro_batch": 512})
    assert rl.run(again, resume=True).num_updates == 6
    assert latest_checkpoint(tmp_path / "run") is not None
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["global_step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Ten trajectories with prompts of 10, 20, ..., 100 tokens and one masked response token."""
    masked = {"loss_mask": [False, True, True], "reward": 1.0, "is_last_step": True}
    rows = [step(f"g{n}", 0, 0, [1] * (10 * n), [3, 4, 5], **masked) for n in range(1, 11)]
    return write_dataset(tmp_path_factory.mktemp("uneven") / "ds", rows)


@pytest.mark.slow
def test_rows_whose_prompt_exceeds_the_limit_are_counted_with_a_limit_that_keeps_most(
    uneven, model, tmp_path, capsys
):
    imitates = {"policy_loss_type": "cross_entropy"}
    # Row n has 10 n prompt tokens and one masked token: 10 n + 1 tokens before the first target.
    for most, num_lost in ((22, 8), (21, 9), (102, 0)):
        settings = config(uneven, model, tmp_path / str(most), max_row_tokens=most, **imitates)
        planned = dry_run(settings)
        said = capsys.readouterr().err
        lost = f"warning: {num_lost} of 10 rows have no token to train on within {most} tokens"
        assert (lost in said) == bool(num_lost), said
        # The last token, at the position 10 n + 2, is trained on.
        cut_off = (
            "note: {} of 10 rows are truncated at {} tokens (max_row_tokens); the longest has 103"
        )
        num_cut = sum(10 * n + 2 >= most for n in range(1, 11))
        assert cut_off.format(num_cut, most) in said
        assert planned.layouts["step"].num_sequences == 10 - num_lost
        assert planned.max_row_tokens == most
        assert f"* the layout of this run; rows have at most {most:,} tokens." in plan_text(planned)
    assert trainer.train(config(uneven, model, tmp_path / "run", max_row_tokens=22, **imitates))
    said = capsys.readouterr().err
    assert "9 of 10 rows are truncated" in said
    assert "Hint: batch.max_row_tokens=128 leaves tokens to train on in 10 of 10 rows\n" in said


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 5000))
def test_the_suggested_limit_keeps_nine_of_ten_rows_unless_the_model_does_not(starts, most):
    rows = pl.DataFrame({"num_untrained_at_start": starts, "num_forwarded_tokens": starts})
    for limit in (1024, 100_000):
        cut, lost, hint = cut_rows(rows, most, limit)
        assert bool(cut) == bool(lost) == any(start >= most for start in starts)
        [(value, num)] = re.findall(r"=(\d+) leaves tokens to train on in (\d+) of", hint)
        assert int(num) == sum(start < int(value) for start in starts)
        assert int(value) == limit or int(num) >= 0.9 * len(starts)


def test_a_run_whose_every_row_is_cut_before_its_first_trained_token_is_rejected(
    uneven, model, tmp_path
):
    nothing = config(
        uneven, model, tmp_path / "run", max_row_tokens=11, policy_loss_type="cross_entropy"
    )
    with pytest.raises(
        RolloutError, match=r"10 of 10 rows have no token.*\[mask_trains_something\]"
    ):
        trainer.train(nothing)
    assert not (tmp_path / "run").exists()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("rope", "hint"),
    [(YARN, "yarn scaling reaches 32 positions"), ({"rope_type": "default"}, None)],
)
def test_the_refusal_of_a_long_row_names_the_positions_that_a_scaling_reaches(rope, hint):
    config = LlamaConfig(max_position_embeddings=8, rope_parameters={"rope_theta": 10000.0} | rope)
    limit = row_limit(config)
    assert limit.num_tokens == 8
    assert ("set max_position_embeddings to 32 in config.json" in limit.hint) is bool(hint)
    assert (hint or "") in limit.hint
    assert "max_row_tokens" in limit.hint
