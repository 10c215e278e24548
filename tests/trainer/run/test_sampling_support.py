"""Rows with the sets that they were sampled from: log-probabilities are normalised over these."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines
import rollout_io
import trainer
from pipelines.generation import Sampling
from schemas.errors import RolloutError
from schemas.ragged import Ragged, offsets_of
from tests.helpers.configs import train_config
from tests.helpers.examples import examples
from tests.helpers.trainer_helpers import (
    VOCAB,
    group_rows,
    make_batch,
    metrics_of,
    relative_difference,
    run_of,
    tiny_policy,
    write_dataset,
)
from tests.helpers.tree_helpers import (
    batch_of,
    check_same,
    families,
    mini_batch_of,
    updated,
)
from trainer.engine.embedded import TransformersEngine
from trainer.loss import policy_logprobs
from trainer.models.logprob_head import set_logprobs

NUM_IDS = 11


def literal(logits, token, temperature, sets, cap):
    """The formula in float64, set by set."""
    logprobs, entropies = [], []
    for row, ids in enumerate(sets):
        z = logits[row] if cap is None else cap * torch.tanh(logits[row] / cap)
        log_p = (z[ids] / temperature[row].double()).log_softmax(-1)
        logprobs.append(log_p[ids.index(int(token[row]))])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def ids_of(sets):
    return torch.tensor([i for ids in sets for i in ids]), torch.tensor([len(s) for s in sets])


@st.composite
def sets_of_targets(draw):
    """Tokens with sets that hold them, of any size up to the vocabulary."""
    tokens = draw(st.lists(st.integers(0, NUM_IDS - 1), min_size=1, max_size=6))
    others = st.sets(st.integers(0, NUM_IDS - 1))
    return tokens, [draw(st.permutations(sorted({t, *draw(others)}))) for t in tokens]


@given(
    sets_of_targets(),
    st.integers(0, 99),
    st.sampled_from([None, 3.0]),
    st.sampled_from([0.1, 4.0, 40.0]),
)
def test_values_and_gradients_are_those_of_the_formula_in_float64(drawn, seed, cap, size):
    tokens, sets = drawn
    generator = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(len(tokens), NUM_IDS, generator=generator)
    token, temperature = torch.tensor(tokens), torch.linspace(0.5, 2.0, len(tokens))
    exact = logits.double().requires_grad_()
    leaf = logits.clone().requires_grad_()
    expected = literal(exact, token, temperature, sets, cap)
    given_sets = ids_of(sets)
    found = set_logprobs(leaf, token, temperature, *given_sets, softcap=cap, entropy_gradient=True)
    weights = torch.linspace(-1, 2, len(tokens))
    gradients = []
    for (logprobs, entropies), variable in ((found, leaf), (expected, exact)):
        total = (weights * logprobs).sum() + (weights.flip(0) * entropies).sum()
        gradients.append(torch.autograd.grad(total, variable)[0].double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    outside = torch.ones_like(logits, dtype=torch.bool)
    for row, ids in enumerate(sets):
        outside[row, ids] = False
    assert not gradients[0][outside].any()


def with_support(batch, seed):
    """Sets for about half of the batch's tokens; the same tokens after the same ones share them."""
    rows, ids = [], batch.responses.values
    row_of = batch.responses.row_of(np.arange(len(ids)))
    for slot, token in enumerate(ids.tolist()):
        row = row_of[slot]
        before = [*batch.prompts.row(row), *ids[batch.responses.offsets[row] : slot + 1]]
        rng = np.random.default_rng([seed, *map(int, before)])
        others = rng.choice(VOCAB, rng.integers(1, 9), replace=False)
        rows.append(sorted({token, *others.tolist()}) if rng.random() < 0.5 else [])
    sizes = np.array([len(row) for row in rows], np.int64)
    flat = np.array([i for row in rows for i in row], np.int32)
    support = Ragged(flat, offsets_of(sizes), np.ones(len(rows), np.bool_))
    return dataclasses.replace(batch, support=support)


@settings(max_examples=examples(15))
@given(families(), st.integers(0, 99), st.sampled_from([12, 40]), st.sampled_from([1, 3, 99]))
def test_layouts_micro_batches_and_chunks_agree(family, seed, budget, chunk):
    policy = tiny_policy(chunk=chunk)
    policy.entropy_gradient = True
    batch = with_support(batch_of(family), seed)
    expected = None
    for layout, tokens in (("step", 4096), ("step", budget), ("tree", budget)):
        how = {"sequence_layout": layout, "tokens_per_micro_batch": tokens}
        forests = mini_batch_of(batch, **how).forests
        found = updated(policy, batch, forests, None, None, entropy_loss_coef=0.1)
        if expected is None:
            expected = found
            slots = np.flatnonzero(batch.trains)
            ours = policy_logprobs(run_of(policy), batch, forests)[slots]
            assert (ours - reference(policy, batch, family[0])[slots]).abs().max() < 1e-4
        check_same(found, expected)


def reference(policy, batch, rows):
    """[T] log-probabilities from one plain forward per row, normalised over the sets in float64."""
    assert batch.support is not None
    parts, slot = [], 0
    for prompt, response, _ in rows:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0].double()
        for at, token in enumerate(response):
            own = batch.support.row(slot).tolist() or list(range(VOCAB))
            z = logits[len(prompt) + at - 1][own].log_softmax(-1)
            parts.append(z[own.index(token)])
            slot += 1
    return torch.stack(parts).float()


def sampled_rows(model, sampling, num_groups=2):
    """Rows as the embedded engine samples them."""

    async def sample():
        engine = TransformersEngine(trainer_model(model), tokenizer_of())
        async with engine:
            prompts = [[5 + group, 9, 3] for group in range(num_groups) for _ in range(2)]
            calls = (
                engine.sample(prompt, dataclasses.replace(sampling, seed=seed))
                for seed, prompt in enumerate(prompts)
            )
            return await asyncio.gather(*calls)

    rows = []
    for number, sampled in enumerate(asyncio.run(sample())):
        rows += [
            row
            | {
                "prompt_token_ids": sampled.prompt_token_ids,
                "response_ids": sampled.response_ids,
                "loss_mask": [True] * len(sampled.response_ids),
                "rollout_logprobs": sampled.rollout_logprobs,
                "sampling_support": sampled.sampling_support,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or 0,
                "step_index": 0,
                "is_last_step": True,
                "reward": float(number % 2),
            }
            for row in group_rows(num_groups, (1.0, 0.0))[2 * number : 2 * number + 1]
        ]
    return rows


def trainer_model(path):
    from trainer.models.policy import load_policy

    return load_policy(path, logprob_chunk_tokens=64).model


class tokenizer_of:
    """What the engine asks of a tokenizer."""

    eos_token_id = None
    special_tokens: dict[int, str] = {}  # noqa: RUF012
    template_kwargs: dict[str, Any] = {}  # noqa: RUF012

    class backend:
        @staticmethod
        def decode(ids, **_):
            return " ".join(map(str, ids))


SAMPLINGS = {
    "step": Sampling(temperature=0.7, top_p=0.9, max_tokens=12),
    "merge": Sampling(top_k=3, max_tokens=12),
    "tree": Sampling(temperature=1.3, top_k=9, top_p=0.8, min_p=0.1, max_tokens=12),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "sampling"), SAMPLINGS.items())
def test_the_ratio_is_1_at_the_weights_that_sampled_truncated_rows(
    model, tmp_path, sampling, layout
):
    rows = sampled_rows(model, sampling)
    dataset = write_dataset(tmp_path / "ds", rows)  # of unknown logprobs_mode
    config = train_config(
        dataset=dataset, model=model, out=str(tmp_path / "run"), sequence_layout=layout
    )
    trainer.train(config)
    line = metrics_of(tmp_path / "run")[0]
    assert line["rollout_logprobs_abs_diff_max"] < 1e-4
    assert line["is_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert line["is_ratio_max"] < 1 + 1e-4
    longest = max(len(ids) for row in rows for ids in row["sampling_support"])
    assert line["policy_entropy"] <= np.log(longest) + 1e-5

    without = write_dataset(
        tmp_path / "without",
        [{k: v for k, v in row.items() if k != "sampling_support"} for row in rows],
        "processed",
    )
    config = {"dataset": without, "model": model, "out": str(tmp_path / "b")}
    with pytest.raises(RolloutError, match="sampling_support does not record them"):
        trainer.train(train_config(**config, sequence_layout=layout))
    trainer.train(train_config(**config, sequence_layout=layout, allow_mismatched_logprobs=True))
    assert metrics_of(tmp_path / "b")[0]["rollout_logprobs_diff_mean"] < -0.05


def drop_sets(row):
    row["sampling_support"] = None


def drop_a_set(row):
    row["sampling_support"][2] = []


def certain_token(row):
    row["sampling_support"][2] = [row["response_ids"][2]]
    row["rollout_logprobs"][2] = -0.5


@pytest.mark.parametrize("change", [drop_sets, drop_a_set, certain_token])
def test_rows_without_sets_at_trained_tokens_are_refused_as_before(model, tmp_path, change):
    rows = sampled_rows(model, SAMPLINGS["step"])
    change(rows[1])
    dataset = write_dataset(tmp_path / "ds", rows)
    with pytest.raises(RolloutError, match="not from the sampled distribution") as caught:
        trainer.train(train_config(dataset=dataset, model=model, out=str(tmp_path / "run")))
    assert "row 0" in caught.value.where
    rows[1]["loss_mask"] = [False] * len(rows[1]["loss_mask"])
    dataset = write_dataset(tmp_path / "untrained", rows)
    with pytest.raises(RolloutError, match="not from the sampled distribution"):
        trainer.train(
            train_config(
                dataset=write_dataset(tmp_path / "raw", rows, "raw"),
                model=model,
                out=str(tmp_path / "run"),
            )
        )


def test_sets_survive_merging_a_rewrite_and_unmerging(tmp_path):
    rows = group_rows(1, (1.0, 0.0), rollout_logprobs=[-0.5] * 4)
    for row in rows:
        row["sampling_support"] = [[token, (token + 1) % VOCAB] for token in row["response_ids"]]
    dataset = write_dataset(tmp_path / "ds", rows)
    table = rollout_io.read(dataset)
    merged = pipelines.merge(table).collect()
    first = merged.row(0, named=True)
    sizes = [len(ids) for ids in first["sampling_support"]]
    assert sizes == [2 if trains else 0 for trains in first["loss_mask"]]
    with rollout_io.RolloutWriter(tmp_path / "merged") as writer:
        writer.write(merged.to_arrow())
    again = pipelines.unmerge(rollout_io.read(tmp_path / "merged")).collect()
    assert again["sampling_support"].to_list() == table["sampling_support"].to_pylist()


def test_gradients_of_single_rows_use_the_sets():
    """What blame computes row by row adds up to the gradient of the update."""
    from trainer.forensics.row_gradients import linearize

    batch = with_support(
        make_batch([([1, 2], [3, 4, 5], [True] * 3), ([7], [8, 9], [True] * 2)]), 0
    )
    policy = tiny_policy()
    forests = mini_batch_of(batch, sequence_layout="step").forests
    _, kept = updated(policy, batch, forests, None, None)
    _, found = linearize(run_of(policy), batch, forests).gradients()
    ours = torch.cat([part.flatten() for part in found])
    theirs = torch.cat([kept[name].flatten() for name in kept])
    assert relative_difference(ours, theirs) < 1e-5
