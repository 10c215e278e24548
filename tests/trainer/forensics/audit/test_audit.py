"""Planted faults in rows of tiny models are named, and clean rows are not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import rollout_io
from pipelines.generation.engines.base import Sampling
from rollout_io.cli.main import run
from rollout_io.dataset.trajectory_facts import with_stored_digest
from schemas.errors import RolloutError
from schemas.records import NO_FAULT
from tests.helpers.audit_helpers import Request, prompt_of, row, sample, save_versions, tiny_models
from tests.helpers.trainer_helpers import write_dataset
from tests.helpers.view_helpers import Asked
from trainer.forensics.audit.audit import run_audit
from trainer.forensics.audit.rows import read_audit_rows
from trainer.forensics.audit.weights import Weights, find_candidates

TEMPERATURE, LENGTH = 0.7, 40
USUAL = Sampling(temperature=TEMPERATURE)
FOREIGN = 3
"""The last model is no candidate."""


def planted(rng, kind, number):
    """What is sampled for a row labelled version 1 at temperature 0.7, and what the audit finds."""
    usual = Request(prompt=prompt_of(rng), length=LENGTH, sampling=USUAL)
    position = int(rng.integers(10, 30))
    changes = {
        "as_labelled": {},
        "version": {"versions": 0 if number % 2 else 2},
        "swap": {"versions": lambda p: 1 if p < position else 2},
        "temperature": {"sampling": Sampling(temperature=1.2 if number % 2 else 0.45)},
        "truncation": {"sampling": Sampling(temperature=TEMPERATURE, top_p=0.8)},
        "raw_logprobs": {"raw": True},
        "offset": {},
        "noise": {"noise": 0.3},
        "unknown_model": {"versions": FOREIGN},
    }
    return dataclasses.replace(usual, **changes[kind]), position


def shifted(sampled, by):
    tokens, logprobs = sampled
    return tokens, [*logprobs[1:], -1.0] if by > 0 else [-1.0, *logprobs[:-1]]


KINDS = (
    *("version", "swap", "temperature", "truncation", "raw_logprobs"),
    *("offset", "noise", "unknown_model"),
)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A dataset of 24 clean rows and 4 of each fault, its weights, and the truth."""
    path = tmp_path_factory.mktemp("audit")
    models = [*tiny_models(3, 0.1, initializer_range=0.3), *tiny_models(1, seed=9)]
    rng = np.random.default_rng(0)
    kinds = [*["as_labelled"] * 24, *np.repeat(KINDS, 4)]
    rng.shuffle(kinds)
    asked = [planted(rng, kind, number) for number, kind in enumerate(kinds)]
    sampled = sample(models, [request for request, _ in asked])
    rows, truth = [], []
    for number, (kind, (request, position), one) in enumerate(
        zip(kinds, asked, sampled, strict=True)
    ):
        by = 1 if number % 2 else -1
        one = shifted(one, by) if kind == "offset" else one
        rows.append(row(number, 0, request.prompt, one, version=1, temperature=TEMPERATURE))
        truth.append((f"g{number}_0", kind, position, by))
    dataset = write_dataset(path / "ds", rows, logprobs_mode="processed")
    weights = save_versions(path / "weights", models[:FOREIGN])
    names = ["trajectory_id", "truth", "position", "by"]
    return dataset, weights, pl.DataFrame(truth, schema=names, orient="row")


def audited(dataset, weights, **settings):
    rows = read_audit_rows(rollout_io.scan(dataset), rollout_io.read_metadata(dataset))
    found = Weights(find_candidates([weights]), device=torch.device("cpu"))
    return run_audit(rows, found, dataset=str(dataset), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"explains": False}])
def test_faults_are_named(faulty, settings):
    dataset, weights, truth = faulty
    result = audited(dataset, weights, **settings)
    found = result.verdicts.join(truth, on="trajectory_id")
    wrong = found.filter(pl.col("kind") != pl.col("truth"))
    assert wrong.is_empty(), wrong.select("truth", "kind", "log_likelihood_ratio", "noise_scale")
    by_kind = {kind: found.filter(pl.col("kind") == kind) for kind in KINDS}
    version = by_kind["version"]
    assert (version["best_version"] == 1 - version["by"]).all()
    assert (by_kind["swap"]["best_version"] == 1).all()
    assert (by_kind["swap"]["second_version"] == 2).all()
    assert ((by_kind["swap"]["swap_position"] - by_kind["swap"]["position"]).abs() <= 2).all()
    assert (by_kind["offset"]["offset"] == by_kind["offset"]["by"]).all()
    fitted = by_kind["temperature"]["best_temperature"].to_numpy()
    assert (np.minimum(np.abs(fitted - 1.2), np.abs(fitted - 0.45)) < 0.08).all()
    if not settings.get("explains", True):
        assert result.share <= 1


@pytest.mark.slow
def test_without_labels_the_version_is_found(faulty, tmp_path):
    dataset, weights, truth = faulty
    rows = rollout_io.scan(dataset).with_columns(policy_version=pl.lit(None, pl.Int32)).collect()
    hidden = write_dataset(tmp_path / "hidden", rows.to_dicts(), logprobs_mode="processed")
    found = audited(hidden, weights).verdicts.join(truth, on="trajectory_id")
    clean = found.filter(pl.col("truth") == "as_labelled")
    assert (clean["kind"] == "as_labelled").all()
    assert (clean["best_version"] == 1).all()
    assert (clean["labelled_version"].is_null()).all()


@pytest.mark.slow
def test_verb_writes_verdicts_and_fails(faulty, tmp_path, capsys):
    dataset, weights, truth = faulty
    out = tmp_path / "new" / "verdicts.parquet"
    code = run(["audit", dataset, "--weights", weights, "--out", str(out), "--json"])
    printed = capsys.readouterr()
    assert code == 1
    found = json.loads(printed.out)
    assert found["num_faulty_spans"] == 4 * len(KINDS)
    assert found["verdicts"]["as_labelled"] == {"spans": 24, "rows": 24, "tokens": 24 * LENGTH}
    joined = (
        with_stored_digest(rollout_io.scan(dataset))
        .collect()
        .join(pl.read_parquet(out), on=["instance_id", "trajectory_id", "step_index"])
    )
    assert len(joined) == len(truth)
    assert (joined["row_digest"] == joined["row_digest_right"]).all()
    assert (joined["num_response_tokens"] == joined["response_ids"].list.len()).all()
    assert set(joined["dataset"]) == {str(dataset)}
    assert (joined["reason"].is_not_null() == ~joined["kind"].is_in(NO_FAULT)).all()
    viewed = Asked(dataset, out)("/api/datasets/d0/trajectories").join(truth, on="trajectory_id")
    named = pl.col("truth").replace({"as_labelled": "none"})
    assert (viewed.select(pl.col("faults") == named).to_series()).all()
    assert "3 candidates, " in printed.err


@pytest.mark.parametrize("verb", ["audit", "blame"])
def test_an_existing_file_is_not_overwritten(faulty, tmp_path, capsys, verb):
    dataset, weights, _ = faulty
    out = tmp_path / "mine.parquet"
    out.write_text("mine")
    asked = [dataset, "--weights", weights] if verb == "audit" else [weights, "--update", "1"]
    assert run([verb, *asked, "--out", str(out)]) == 1
    assert "already exists. [out_is_free]" in capsys.readouterr().err
    assert out.read_text() == "mine"


GREEDY = Sampling(temperature=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "label", "kind", "best"), [
    (GREEDY, 0.0, "as_labelled", 0.0),
    (Sampling(), 0.0, "temperature", 1.0),
    (Sampling(temperature=0.5), None, "as_labelled", 0.5),
])  # fmt: skip
def test_raw_logprobs_of_greedy_and_unlabelled_rows(faulty, tmp_path, sampling, label, kind, best):
    """Raw log-probabilities are the same at any temperature: only the tokens tell it."""
    _, weights, _ = faulty
    models = tiny_models(2, 0.1, initializer_range=0.3)
    rng = np.random.default_rng(1)
    asked = [Request(prompt=prompt_of(rng), sampling=sampling, raw=True) for _ in range(12)]
    rows = [
        row(number, 0, request.prompt, one, temperature=label)
        for number, (request, one) in enumerate(zip(asked, sample(models, asked), strict=True))
    ]
    found = audited(write_dataset(tmp_path / "ds", rows, logprobs_mode="raw"), weights).verdicts
    assert found["kind"].to_list() == [kind] * 12
    assert found["labelled_temperature"].unique().to_list() == [label]
    assert abs(found["best_temperature"].median() - best) < 0.15


@pytest.mark.slow
def test_equal_candidates_are_not_told_apart(faulty, tmp_path):
    """Without a label, naming one of them would be a guess."""
    dataset, weights, _ = faulty
    rows = rollout_io.scan(dataset).with_columns(policy_version=pl.lit(None, pl.Int32)).collect()
    hidden = write_dataset(tmp_path / "hidden", rows.to_dicts(), logprobs_mode="processed")
    read = read_audit_rows(rollout_io.scan(hidden), rollout_io.read_metadata(hidden))
    twice = [f"{number}={weights}/version_1" for number in (1, 2)]
    both = Weights(find_candidates(twice), device=torch.device("cpu"))
    found = run_audit(read, both, dataset=hidden).verdicts
    assert "as_labelled" not in found["kind"].to_list()
    assert found["kind"].to_list().count("too_short") >= 24


def unwrapped(screen):
    """The text of a screen, whose lines wrap at a width that long paths use up."""
    return " ".join(screen.split())


@pytest.mark.slow
def test_the_screen_says_which_candidates_are_not_told_apart(faulty, capsys):
    dataset, weights, _ = faulty
    twice = [f"--weights={number}={weights}/version_1" for number in (1, 2)]
    run(["audit", dataset, *twice, f"--weights=0={weights}/version_0"])
    said = unwrapped(capsys.readouterr().out)
    assert "version 1 and version 2: a row that fits one also fits the other" in said
    assert "version 0 and" not in said


def test_a_dataset_of_which_nothing_is_audited_does_not_pass(faulty, tmp_path, capsys):
    dataset, weights, _ = faulty
    rows = rollout_io.scan(dataset).with_columns(policy_version=pl.lit(7, pl.Int32)).collect()
    other = write_dataset(tmp_path / "other", rows.to_dicts(), logprobs_mode="processed")
    assert run(["audit", other, "--weights", weights]) == 1
    said = capsys.readouterr().err
    assert "no row can be audited" in said
    assert "the labelled weights are not among the candidates" in said
    assert "[audit_rows]" in said


@pytest.mark.slow
def test_a_smaller_vocabulary_is_refused(faulty, tmp_path, capsys):
    dataset, weights, _ = faulty
    tiny_models(1, vocab_size=8)[0].save_pretrained(tmp_path / "small")
    given = ["--weights", weights, "--weights", f"9={tmp_path}/small"]
    assert run(["audit", dataset, *given]) == 1
    said = capsys.readouterr().err
    assert "has 8 tokens" in said
    assert "[audit_rows]" in said


ADAPTER = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(("text", "rule"), [
    ("", "model_directory"),
    ("[]", "model_directory"),
    ("{}", "model_load"),
    (json.dumps(ADAPTER | {"target_modules": "all-linear"}), "model_load"),
    (json.dumps(ADAPTER | {"use_rslora": True}), "model_load"),
    (json.dumps(ADAPTER | {"layers_to_transform": [1]}), "model_load"),
    (json.dumps(ADAPTER | {"bias": "all"}), "model_load"),
])  # fmt: skip
def test_adapters_that_cannot_be_applied_are_refused(tmp_path, text, rule):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(RolloutError, match=rule):
        find_candidates([str(tmp_path)])


def test_metrics_that_a_run_is_writing_are_read(faulty, tmp_path):
    _, weights, _ = faulty
    done = {"loss": 0.0, "iteration": 0, "global_step": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": f"{weights}/version_0"}}))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps(done) + '\n{"loss": 0.')
    checkpoint = tmp_path / "checkpoints" / "global_step_4"
    tiny_models(1)[0].save_pretrained(checkpoint)
    assert [one.version for one in find_candidates([str(tmp_path)])] == [0, 1]
    metrics.write_text('{"loss": 0.\n')
    with pytest.raises(RolloutError, match="metrics_file"):
        find_candidates([str(tmp_path)])


@pytest.mark.slow
def test_clean_dataset_passes(faulty, tmp_path, capsys):
    dataset, weights, truth = faulty
    clean = truth.filter(pl.col("truth") == "as_labelled")["trajectory_id"]
    rows = rollout_io.scan(dataset).filter(pl.col("trajectory_id").is_in(clean.to_list())).collect()
    path = write_dataset(tmp_path / "clean", rows.to_dicts(), logprobs_mode="processed")
    assert run(["audit", path, "--weights", weights]) == 0
    assert "24 rows audited" in unwrapped(capsys.readouterr().out)


DEFAULTS = Sampling(temperature=0.6, top_p=0.95, top_k=20)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    ("used", "expected"),
    [(DEFAULTS, "temperature"), (Sampling(), "as_labelled"), (Sampling(top_k=5), "truncation")],
)
def test_rows_that_record_no_settings_are_compared_with_the_models(
    used: Sampling, expected: str, tmp_path: Path, capsys: Any, *, raw: bool
) -> None:
    models = tiny_models(1, initializer_range=0.5)
    rng = np.random.default_rng(0)
    usual = Request(prompt=[], length=3 * LENGTH, sampling=used, raw=raw, versions=0)
    asked = [dataclasses.replace(usual, prompt=prompt_of(rng)) for _ in range(4)]
    sampled = sample(models, asked)
    weights = save_versions(tmp_path / "weights", models)
    defaults = {"temperature": used.temperature} if used.top_k else {"temperature": 0.6}
    defaults |= {"top_p": used.top_p, "top_k": used.top_k} if used.top_k else {}
    (tmp_path / "weights" / "version_0" / "generation_config.json").write_text(json.dumps(defaults))
    rows = [
        row(i, 0, one.prompt, tokens, version=0, temperature=None)
        for i, (one, tokens) in enumerate(zip(asked, sampled, strict=True))
    ]
    dataset = write_dataset(tmp_path / "ds", rows, logprobs_mode="raw" if raw else "processed")
    code = run(["audit", dataset, "--weights", weights, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["verdicts"]) == [expected]
    assert code == (expected != "as_labelled")
    if expected == "temperature":
        assert "do not record how they were sampled" in str(printed)
