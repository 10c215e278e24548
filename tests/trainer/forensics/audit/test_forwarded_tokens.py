"""Which tokens an audit forwards, and what its verdicts rest on."""

import json

import numpy as np
import polars as pl
import pytest
import torch

import rollout_io
from pipelines.generation.engines.base import Sampling
from rollout_io.cli.main import run
from schemas.records import NO_FAULT
from tests.helpers.audit_helpers import Request, prompt_of, row, sample, save_versions, tiny_models
from tests.helpers.trainer_helpers import write_dataset
from trainer.forensics.audit.audit import run_audit
from trainer.forensics.audit.rows import TOO_LONG, read_audit_rows
from trainer.forensics.audit.weights import Weights, find_candidates

MODELS = tiny_models(3, 0.2, initializer_range=0.3)
EXACT = 1e-5
"""Noise of an engine that computes in float32."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_versions(tmp_path_factory.mktemp("weights"), MODELS)


def audited(path, weights, *, explains=False):
    rows = read_audit_rows(rollout_io.scan(path), rollout_io.read_metadata(path))
    found = Weights(find_candidates([weights]), device=torch.device("cpu"))
    return run_audit(rows, found, dataset=str(path), explains=explains)


def rows_of_groups(*, prompt, response, labels, sampled_by, num_groups=8, size=8):
    """Groups of 8 rows that share a long prompt."""
    rng, rows = np.random.default_rng(1), []
    prompts = [prompt_of(rng, prompt) for _ in range(num_groups)]
    asked = [
        Request(prompt=prompts[i // size], length=response, noise=EXACT, versions=sampled_by(i))
        for i in range(num_groups * size)
    ]
    for i, one in enumerate(sample(MODELS, asked)):
        rows.append(row(i // size, i % size, asked[i].prompt, one, version=labels(i)))
    return rows


LABELS_AND_VERSIONS = {
    "no_fault": (lambda _: 1, lambda _: 1),
    "other_weights": (lambda _: 1, lambda _: 2),
    "several_labels": (lambda i: i % 2, lambda i: 1 + i % 2),  # in a group
}


@pytest.mark.slow
@pytest.mark.parametrize("faults", LABELS_AND_VERSIONS)
def test_long_prompts_of_groups_are_not_forwarded_twice(weights, tmp_path, faults):
    labels, sampled_by = LABELS_AND_VERSIONS[faults]
    rows = rows_of_groups(prompt=60, response=6, labels=labels, sampled_by=sampled_by)
    path = write_dataset(tmp_path / "ds", rows, logprobs_mode="processed")
    result = audited(path, weights)
    is_faulty = sampled_by(0) != labels(0)
    assert result.num_suspicious >= 0.6 * 64 if is_faulty else result.num_suspicious <= 2
    assert result.share < {"no_fault": 0.6, "other_weights": 1.1, "several_labels": 1.5}[faults]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "kind"), [(EXACT, "as_labelled"), (0.3, "too_short")])
def test_one_token_confirms_a_label_only_of_an_exact_engine(weights, tmp_path, noise, kind):
    rng = np.random.default_rng(3)
    lengths = [40] * 20 + [1] * 10
    asked = [Request(prompt=prompt_of(rng), noise=noise, length=length) for length in lengths]
    rows = [
        row(i, 0, asked[i].prompt, one, version=1) for i, one in enumerate(sample(MODELS, asked))
    ]
    result = audited(write_dataset(tmp_path / "ds", rows, logprobs_mode="processed"), weights)
    kinds = dict(result.verdicts.group_by("num_tokens").agg(pl.col("kind")).iter_rows())
    assert set(kinds[40]) == {"as_labelled"}
    assert kinds[1].count(kind) >= 8


def test_rows_beyond_the_context_are_reported(weights, tmp_path):
    rng = np.random.default_rng(4)
    rows = [
        row(i, 0, prompt_of(rng, 6 if i else 100), ([1] * 30, [-2.0] * 30), version=1)
        for i in range(6)
    ]
    found = audited(write_dataset(tmp_path / "ds", rows, logprobs_mode="processed"), weights)
    long = found.verdicts.filter(trajectory_id="g0_0")
    assert long.select("kind", "reason").rows() == [("not_checked", TOO_LONG)]
    assert found.num_rows == 5


@pytest.mark.slow
def test_versions_that_fit_equally_are_both_named(weights, tmp_path):
    rng = np.random.default_rng(5)
    asked = [Request(prompt=prompt_of(rng), noise=EXACT, versions=2) for _ in range(8)]
    rows = [
        row(i, 0, asked[i].prompt, one, version=1) for i, one in enumerate(sample(MODELS, asked))
    ]
    path = write_dataset(tmp_path / "ds", rows, logprobs_mode="processed")
    named = [f"1={weights}/version_1", f"2={weights}/version_2", f"3={weights}/version_2"]
    read = read_audit_rows(rollout_io.scan(path), rollout_io.read_metadata(path))
    found = run_audit(read, Weights(find_candidates(named)), dataset=path)
    assert set(found.verdicts["reason"]) == {
        "sampled by version 2 or 3, which fit equally well, labelled 1"
    }
    assert set(found.verdicts["next_version"]) == {3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "temperature", "mode"),
    [(False, 0.5, "processed"), (True, 0.5, "raw"), (False, 1.0, "raw")],
)
def test_the_kind_of_logprobs_is_inferred_at_an_unknown_temperature(
    weights, tmp_path, capsys, raw, temperature, mode
):
    rng = np.random.default_rng(6)
    sampling = Sampling(temperature=temperature)
    asked = [
        Request(prompt=prompt_of(rng), noise=EXACT, sampling=sampling, raw=raw) for _ in range(8)
    ]
    rows = [
        row(i, 0, asked[i].prompt, one, version=1, temperature=None)
        for i, one in enumerate(sample(MODELS, asked))
    ]
    path = write_dataset(tmp_path / "ds", rows)
    assert run(["audit", path, "--weights", weights, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["logprobs_mode"] == mode
    assert said["logprobs_mode_is_inferred"]
    assert (said["num_logprobs_mode_tokens"] > 0) == (mode == "processed")
    assert said["verdicts"]["as_labelled"]["spans"] == 8
    run(["audit", path, "--weights", weights])
    text = " ".join(capsys.readouterr().out.split())
    assert ("assumed: no row reveals the kind" in text) == (mode == "raw")


@pytest.mark.slow
def test_rounded_weights_are_not_taken_for_the_version_before(tmp_path):
    """Rounding reverts a part of a small update, if the weights before it were rounded too."""
    torch.manual_seed(1)
    states = [{n: one.bfloat16().float() for n, one in MODELS[0].state_dict().items()}]
    states.append({n: one * (1 + 0.0014 * torch.randn_like(one)) for n, one in states[0].items()})
    states.append({n: one.bfloat16().float() for n, one in states[1].items()})
    models = tiny_models(1) + tiny_models(1) + tiny_models(1)
    for model, state in zip(models, states, strict=True):
        model.load_state_dict(state)
    weights = save_versions(tmp_path / "weights", models[:2])
    rng = np.random.default_rng(7)
    asked = [
        Request(
            prompt=prompt_of(rng),
            noise=EXACT,
            length=8 if i % 2 else 40,
            versions=1 if i < 20 else 2,
        )
        for i in range(60)
    ]
    rows = [
        row(i, 0, asked[i].prompt, one, version=1) for i, one in enumerate(sample(models, asked))
    ]
    path = write_dataset(tmp_path / "ds", rows, logprobs_mode="processed")
    found = audited(path, weights, explains=True).verdicts
    kinds = dict(found.select("trajectory_id", "kind").rows())
    assert {kinds[f"g{i}_0"] for i in range(20)} <= {"as_labelled", "too_short"}
    faulty = found.filter(~pl.col("kind").is_in(NO_FAULT))
    assert set(faulty["kind"]) == {"noise"}
    assert faulty["reason"].str.contains("rounded to bfloat16").all()
    assert len(faulty) >= 36


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["noise", "unknown_model"])
def test_a_lower_precision_and_a_similar_model_are_told_apart(tmp_path, kind):
    """Both are as far from the labelled weights; only one of them comes closer to rounded weights."""
    labelled, similar = tiny_models(2, 0.003, initializer_range=0.3)
    other = (
        similar if kind == "unknown_model" else tiny_models(1, initializer_range=0.3)[0].bfloat16()
    )
    weights = save_versions(tmp_path / "weights", [labelled])
    rng = np.random.default_rng(8)
    asked = [Request(prompt=prompt_of(rng), noise=EXACT, versions=int(i >= 24)) for i in range(40)]
    sampled = sample([labelled, other], asked)
    rows = [row(i, 0, asked[i].prompt, one, version=0) for i, one in enumerate(sampled)]
    path = write_dataset(tmp_path / "ds", rows, logprobs_mode="processed")
    found = audited(path, weights, explains=True).verdicts
    kinds = dict(found.select("trajectory_id", "kind").rows())
    assert {kinds[f"g{i}_0"] for i in range(24)} == {"as_labelled"}
    assert {kinds[f"g{i}_0"] for i in range(24, 40)} == {kind}
    distances = found.filter(pl.col("kind") == kind)["mean_difference"]
    assert 0.01 < distances.median() < 0.1
