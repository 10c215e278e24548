"""Distillation: divergences from a teacher's stored log-probabilities, against float64."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainer
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    metrics_of,
    tiny_llama,
    write_dataset,
)
from trainer.models.logprob_head import teacher_divergence

NUM_IDS, TOPK = 11, 5
KINDS = ("reverse_kl", "cross_entropy")


@st.composite
def teachers(draw):
    """Ids of up to six targets; a target may have none."""
    ids = st.lists(st.integers(0, NUM_IDS - 1), max_size=TOPK, unique=True)
    return draw(st.lists(ids, min_size=1, max_size=6))


@pytest.mark.parametrize("kind", KINDS)
@given(teachers(), st.integers(0, 99), st.sampled_from([None, 3.0]))
def test_values_and_gradients_are_those_of_the_formula_in_float64(kind, sets, seed, cap):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(len(sets), NUM_IDS, generator=generator)
    logprobs = (3 * torch.randn(len(sets), NUM_IDS, generator=generator)).log_softmax(-1)
    temperature = torch.linspace(0.5, 2.0, len(sets))
    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    expected = []
    for row, ids in enumerate(sets):
        z = exact[row] if cap is None else cap * torch.tanh(exact[row] / cap)
        log_p = (z[ids] / temperature[row].double()).log_softmax(-1)
        log_q = logprobs[row, ids].double().log_softmax(-1)
        own = log_p.exp() * (log_p - log_q) if kind == "reverse_kl" else -log_q.exp() * log_p
        expected.append(own.sum())
    found = teacher_divergence(
        leaf,
        temperature,
        torch.tensor([i for ids in sets for i in ids], dtype=torch.int64),
        torch.cat([logprobs[row, ids] for row, ids in enumerate(sets)]),
        torch.tensor([len(ids) for ids in sets]),
        is_reverse=kind == "reverse_kl",
        softcap=cap,
    )
    theirs = torch.stack(expected)
    torch.testing.assert_close(found.double(), theirs, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 2, len(sets))
    (ours,) = torch.autograd.grad((weights * found).sum(), leaf)
    (wanted,) = torch.autograd.grad((weights * theirs).sum(), exact)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5)


def taught_rows():
    """Rows with the most likely ids of another tiny model."""
    teacher, rows = tiny_llama(seed=5), group_rows(2, (1.0, 0.0))
    for row in rows:
        with torch.no_grad():
            ids = torch.tensor([row["prompt_token_ids"] + row["response_ids"]])
            logprobs = teacher(input_ids=ids).logits[0].log_softmax(-1)
        own = logprobs[len(row["prompt_token_ids"]) - 1 : -1].topk(TOPK)
        row["teacher_token_ids"] = own.indices.tolist()
        row["teacher_logprobs"] = own.values.tolist()
    return rows


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_divergence_alike_in_every_layout(model, tmp_path, kind):
    dataset, found = write_dataset(tmp_path / "ds", taught_rows()), {}
    for layout, budget in (("step", 2048), ("merge" if kind == "cross_entropy" else "tree", 40)):
        config = train_config(
            dataset=dataset,
            model=model,
            out=str(tmp_path / layout),
            sequence_layout=layout,
            tokens_per_micro_batch=budget,
            logprob_chunk_tokens=7,
            policy_loss_type="distill",
            distill_type=kind,
            learning_rate=1e-2,
            num_epochs=4,
        )
        trainer.train(config)
        found[layout] = losses(tmp_path / layout)
    first, second = found.values()
    assert second == pytest.approx(first, rel=1e-3)
    assert first[-1] < 0.95 * first[0]


def test_rows_without_a_teacher_are_refused(model, tmp_path):
    rows = taught_rows()
    rows[1]["teacher_token_ids"] = rows[1]["teacher_logprobs"] = None
    config = train_config(
        dataset=write_dataset(tmp_path / "ds", rows),
        model=model,
        out=str(tmp_path / "run"),
        policy_loss_type="distill",
    )
    with pytest.raises(RolloutError, match="teacher_logprobs"):
        trainer.train(config)


def test_sets_of_the_sampler_change_nothing(model, tmp_path, capsys):
    found = []
    for name in ("without", "with"):
        rows = taught_rows()
        for row in rows:
            row["rollout_logprobs"] = [-0.5] * len(row["response_ids"])
            if name == "with":
                row["sampling_support"] = [[i, (i + 1) % NUM_IDS] for i in row["response_ids"]]
        config = train_config(
            dataset=write_dataset(tmp_path / f"{name}-ds", rows, "processed"),
            model=model,
            out=str(tmp_path / name),
            policy_loss_type="distill",
            kl_loss_coef=0.1,
        )
        capsys.readouterr()
        trainer.train(config)
        line = metrics_of(tmp_path / name)[0]
        found.append({key: line[key] for key in ("loss", "policy_kl", "policy_entropy")})
    assert found[0] == found[1]
    assert found[0]["policy_kl"] == 0  # the policy is still the reference
    # Log-probabilities over a set are not compared with those over the vocabulary.
    assert "rollout_logprobs_diff_mean" not in line
    assert "differ from the policy" not in capsys.readouterr().err


@pytest.mark.parametrize("num_ids", [0, 1])
def test_teachers_without_a_distribution_are_refused(model, tmp_path, num_ids):
    rows = taught_rows()
    for row in rows:
        for name in ("teacher_token_ids", "teacher_logprobs"):
            row[name] = [own[:num_ids] for own in row[name]]
    config = train_config(
        dataset=write_dataset(tmp_path / "ds", rows),
        model=model,
        out=str(tmp_path / "run"),
        policy_loss_type="distill",
    )
    with pytest.raises(RolloutError, match="no token has more than one teacher id"):
        trainer.train(config)


@pytest.mark.parametrize("loss", ["distill", "cross_entropy"])
def test_importance_weights_are_refused_where_they_have_no_effect(loss):
    with pytest.raises(RolloutError, match="has no importance ratios"):
        train_config(
            dataset="ds", model="m", out="o", policy_loss_type=loss, tis_ratio_type="token"
        )


@pytest.mark.parametrize("loss", ["distill", "cross_entropy"])
def test_greedy_rows_are_trained_as_at_temperature_1(model, tmp_path, loss):
    found = []
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        rows = taught_rows()
        for row in rows[:4]:
            row["temperature"] = temperature
        config = train_config(
            dataset=write_dataset(tmp_path / f"{name}-ds", rows),
            model=model,
            out=str(tmp_path / name),
            policy_loss_type=loss,
        )
        assert trainer.train(config).num_greedy_rows == 0
        line = metrics_of(tmp_path / name)[0]
        found.append((line["loss"], line["num_trained_tokens"]))
    assert found[0] == found[1]
    assert found[0][1] == sum(len(row["response_ids"]) for row in rows)
