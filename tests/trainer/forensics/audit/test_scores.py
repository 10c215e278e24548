"""Scores from one forward pass equal those that plain forward passes and the sampler give."""

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelines.generation.engines.base import Sampling
from schemas.errors import RolloutError
from tests.helpers.audit_helpers import Request, prompt_of, row, sample, tiny_models
from tests.helpers.trainer_helpers import VOCAB, plain_logprobs, tiny_llama
from trainer.config.sections import ModelConfig
from trainer.engine.batching import sampled_distribution
from trainer.forensics.audit.hypotheses import CAUTION, Noise, Residuals, Span, fit_noise
from trainer.forensics.audit.rows import to_audit_rows
from trainer.forensics.audit.scores import (
    TRUNCATIONS,
    score_tokens,
)
from trainer.forensics.audit.weights import (
    Candidate,
    Weights,
    find_candidates,
    load_candidate,
    num_distinct_tokens,
)
from trainer.models.lora import add_adapter, save_model
from trainer.models.policy import Policy, load_policy

CPU = torch.device("cpu")


@pytest.mark.slow
@given(
    st.integers(2, 300),
    st.floats(0.5, 8),
    st.floats(0.3, 2.4),
    st.sampled_from([(1.0, 0, 0.0), (0.8, 0, 0.0), (1.0, 3, 0.0), (0.9, 20, 0.05)]),
    st.integers(0, 99),
)
def test_scores_are_those_of_the_sampled_distribution(vocab, spread, temperature, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(3, vocab, generator=generator)
    top_p, top_k, min_p = cut
    settings = torch.tensor([[1 / temperature, top_p, top_k, min_p]] * 3)
    token = logits.argmax(-1)  # the one token that no truncation excludes
    scores = score_tokens(logits, token, settings)
    usual = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert np.abs(scores.at(1.0) - usual.numpy()).max() < 1e-4
    scaled = (logits / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0].numpy()
    assert np.abs(scores.labelled - scaled).max() < 1e-4
    assert np.abs(scores.at(1 / temperature) - scaled).max() < 5e-3
    for i in range(3):
        own = Sampling(temperature=temperature, top_p=top_p, top_k=top_k or None, min_p=min_p)
        kept = scores.labelled[i] - scores.mass[i, 0]
        check_kept(kept, sampled_distribution(logits[i, None], [own])[0], token[i])
        for number, one in enumerate(TRUNCATIONS, start=1):
            other = Sampling(
                temperature=temperature, top_p=one.top_p, top_k=one.top_k or None, min_p=one.min_p
            )
            kept = scores.labelled[i] - scores.mass[i, number]
            check_kept(kept, sampled_distribution(logits[i, None], [other])[0], token[i])
            assert not scores.outside[i, number]


def check_kept(logprob, distribution, token):
    """Rounding may move one token, the least likely one, across the end of a nucleus."""
    last = float(distribution[distribution.isfinite()].min().exp())
    assert abs(logprob - float(distribution[token])) < 1e-3 + 2 * last


MODEL = tiny_llama().eval()
ROW = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
    st.integers(0, 1),
)


@pytest.mark.slow
@given(st.lists(ROW, min_size=1, max_size=6), st.sampled_from([4, 12, 100]), st.booleans())
def test_ragged_rows_are_scored_like_separate_ones(given_rows, budget, trees):
    """Few distinct tokens, so that rows of a group share prefixes."""
    rows = [
        row(group, number, prompt, (response, [-1.0] * len(response)))
        for number, (prompt, response, group) in enumerate(given_rows)
    ]
    rows = to_audit_rows(pl.DataFrame(rows).with_columns(EXTRA), "processed")
    policy = Policy(MODEL, logprob_chunk_tokens=3)
    weights = Weights([], loaded={0: policy}, trees=trees, budget=budget)
    found = weights.score(0, rows, np.arange(rows.num_rows))
    plain = [(p, r, [True] * len(r)) for p, r, _ in given_rows]
    with torch.no_grad():
        expected = plain_logprobs(MODEL, plain).numpy()
    begin = 0
    for number, (*_, length) in enumerate(rows.spans.tolist()):
        scores = found[number]
        assert length == len(given_rows[number][1])
        assert np.abs(scores.labelled - expected[begin : begin + length]).max() < 1e-4
        begin += length
    if trees and budget == 100:
        assert weights.num_tokens == num_distinct_tokens(rows)


EXTRA = [
    pl.lit(None, pl.Float32).alias("top_p"),
    pl.lit(None, pl.Int32).alias("top_k"),
    pl.lit(None, pl.String).alias("sampling_extra"),
]


def test_spans_are_the_sampled_ranges():
    table = pl.DataFrame(
        [
            row(
                0,
                0,
                [1],
                ([1, 2, 3, 4], [-1.0, -1.0, 0.0, 0.0]),
                loss_mask=[True] * 2 + [False] * 2,
            ),
            row(1, 0, [1], ([1, 2], [-1.0, -1.0]), token_source="retokenized"),
            row(2, 0, [1], ([5], [-1.0]), sampling_extra='{"repetition_penalty":1.1}'),
            row(3, 0, [1], ([5], [-1.0]), pictures=[{"start": 0, "length": 1}]),
        ]
    ).with_columns(EXTRA[:2])
    rows = to_audit_rows(table, "processed")
    assert rows.spans[:, 2].tolist() == [2, 2, 1, 1]
    assert [bool(reason) for reason in rows.reasons] == [False, True, True, True]
    raw = to_audit_rows(table, "raw").reasons
    assert [bool(reason) for reason in raw] == [False, True, False, True]


def test_observations_end_a_span_in_rows_that_train():
    """Neither sampled nor trained on; without segments, only the mask and log-probabilities tell."""
    stored = [-1.0, -1.0, 0.0, 0.0, -1.0]
    trains = row(0, 0, [1], ([1, 2, 3, 4, 5], stored), loss_mask=[True, True, False, False, True])
    masked = row(1, 0, [1], ([1, 2, 3, 4, 5], stored), loss_mask=[False] * 5)
    certain = row(2, 0, [1], ([1, 2, 3], [0.0, 0.0, 0.0]), loss_mask=[True] * 3)
    rows = to_audit_rows(pl.DataFrame([trains, masked, certain]).with_columns(EXTRA), "raw")
    assert rows.spans.tolist() == [[0, 0, 2], [0, 4, 1], [1, 5, 5], [2, 10, 3]]


def test_noise_is_not_estimated_from_rows_that_fit_in_part():
    """Six of ten tokens fit, in every row: their median is small, but it is no noise."""
    rng = np.random.default_rng(0)
    spans = []
    for _ in range(20):
        predicted = -rng.exponential(1.5, 50)
        wrong = np.arange(50) % 10 >= 6
        error = np.where(wrong, 2.0, 0.05) * -np.expm1(predicted) * rng.standard_normal(50)
        spans.append(Residuals(error, -np.expm1(predicted)))
    assert fit_noise(spans).num_tokens == 0


def test_noise_is_that_of_the_spans_that_fit():
    """Errors of 0.05 per logit, in most spans; a third of them fit nothing."""
    rng = np.random.default_rng(0)
    spans = []
    for number in range(30):
        predicted = -rng.exponential(1.5, 50)
        factor = 20.0 if number % 3 == 0 else 1.0
        error = factor * 0.05 * -np.expm1(predicted) * rng.standard_normal(50)
        spans.append(Residuals(error, -np.expm1(predicted)))
    noise = fit_noise(spans)
    assert noise.num_tokens == 20 * 50
    assert 0.7 < noise.kappa / 0.05 < 1.1
    foreign = [one._replace(difference=30 * one.difference) for one in spans]
    assert fit_noise(foreign).num_tokens == 0


def test_candidates_are_found(tmp_path):
    for name in ("weights/version_0", "weights/version_10", "weights/version_9", "other"):
        tiny_llama().save_pretrained(tmp_path / name)
    folder = find_candidates([str(tmp_path / "weights")])
    assert [one.version for one in folder] == [0, 9, 10]
    assert find_candidates([str(tmp_path)]) == folder
    named = find_candidates([f"4={tmp_path}/other", str(tmp_path / "weights" / "version_9")])
    assert [(one.version, one.path.name) for one in named] == [(4, "other"), (9, "version_9")]
    assert [one.version for one in find_candidates([str(tmp_path / "other")])] == [None]
    with pytest.raises(RolloutError, match=r"both .* are version 9\. \[weights\]"):
        find_candidates([str(tmp_path), f"9={tmp_path}/other"])
    with pytest.raises(RolloutError, match="there are no weights in this directory"):
        find_candidates([str(Path(__file__).parent)])
    with pytest.raises(RolloutError, match="no such directory"):
        find_candidates([str(tmp_path / "nowhere")])


def test_versions_of_a_run_are_those_of_its_checkpoints(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    for step in (2, 6):
        tiny_llama().save_pretrained(tmp_path / "run" / "checkpoints" / f"global_step_{step}")
    lines = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    text = [f'{{"iteration": {i}, "global_step": {step}, "loss": 0.1}}\n' for i, step in lines]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(text))
    (tmp_path / "run" / "config.json").write_text(f'{{"model": {{"path": "{tmp_path}/model"}}}}')
    found = find_candidates([str(tmp_path / "run")])
    assert [(one.version, one.path.name) for one in found] == [
        (0, "model"),
        (1, "global_step_2"),
        (3, "global_step_6"),
    ]
    alone = find_candidates([str(tmp_path / "run" / "checkpoints" / "global_step_6")])
    assert [one.version for one in alone] == [3]


def trained_adapter(path, *, alpha=8, targets=None):
    """A tiny model with an adapter that changes it, saved as `rollouts rl` saves checkpoints."""
    base = tiny_llama()
    base.save_pretrained(path / "base")
    policy = load_policy(str(path / "base"), logprob_chunk_tokens=64)
    settings = ModelConfig(
        lora_rank=4, lora_alpha=alpha, lora_target_modules=targets, path=str(path / "base")
    )
    add_adapter(policy, settings)
    torch.manual_seed(0)
    for name, weights in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.2)
    save_model(policy.model, path / "merged", policy.model.state_dict())
    return base, path / "merged"


def logits_of(candidate, ids):
    loaded = load_candidate(candidate, device=CPU, trees=True)
    with torch.no_grad():
        return loaded.model(ids).logits, loaded


@pytest.mark.parametrize(("alpha", "targets"), [(8, None), (3, ("q_proj", "down_proj"))])
def test_an_adapter_is_a_candidate(tmp_path, alpha, targets):
    """With its own scale and layers."""
    base, merged = trained_adapter(tmp_path, alpha=alpha, targets=targets)
    found = find_candidates([f"0={tmp_path}/base", f"1={merged}/adapter"])
    assert found[1] == Candidate(version=1, path=merged / "adapter", base=tmp_path / "base")
    ids = torch.tensor([prompt_of(np.random.default_rng(0), 12)])
    got, loaded = logits_of(found[1], ids)
    expected, _ = logits_of(Candidate(version=1, path=merged), ids)
    with torch.no_grad():
        usual = base(ids).logits
    assert (got - expected).abs().max() < 1e-4 < (got - usual).abs().max()
    adapted = {name.split(".")[-4] for name, _ in loaded.named_parameters() if "lora_A" in name}
    assert adapted == set(targets or adapted)


def test_an_adapter_with_more_weights_than_its_settings_say_is_refused(tmp_path):
    _, merged = trained_adapter(tmp_path)
    config = merged / "adapter" / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"target_modules": ["q_proj"]}))
    (found,) = find_candidates([f"1={merged}/adapter"])
    with pytest.raises(RolloutError, match=r"24 weights that the adapter lacks"):
        logits_of(found, torch.zeros(1, 3, dtype=torch.int64))


def test_a_run_with_adapters_gives_its_merged_models(tmp_path):
    """`rollouts rl` with LoRA writes the merged model, and the adapter inside of its directory."""
    _, merged = trained_adapter(tmp_path)
    run = tmp_path / "run"
    (run / "weights").mkdir(parents=True)
    shutil.copytree(merged, run / "weights" / "version_2")
    shutil.copytree(merged, run / "checkpoints" / "global_step_4")
    (run / "config.json").write_text(json.dumps({"model": {"path": f"{tmp_path}/base"}}))
    lines = [{"iteration": i, "global_step": 2 * i + 2, "loss": 0.1} for i in range(3)]
    metrics = "".join(f"{json.dumps(line)}\n" for line in lines[:2])
    (run / "metrics.jsonl").write_text(metrics)
    found = find_candidates([str(run)])
    assert [(one.version, one.path.name, one.base) for one in found] == [
        (0, "base", None),
        (2, "version_2", None),
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shutil.copytree(merged, run / "checkpoints" / "global_step_6")
    *_, last = find_candidates([str(run)])
    assert (last.version, last.path.name, last.base) == (3, "global_step_6", None)
    ids = torch.tensor([prompt_of(np.random.default_rng(0), 12)])
    expected, _ = logits_of(Candidate(version=None, path=merged), ids)
    assert torch.equal(logits_of(last, ids)[0], expected)


def test_a_checkpoint_within_an_iteration_is_no_version(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    for step, mini_batch in ((2, 0), (3, 1)):
        path = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
        tiny_llama().save_pretrained(path)
        (path / "state").mkdir()
        (path / "state" / "run.json").write_text(json.dumps({"mini_batch": mini_batch}))
    lines = [(0, 1), (0, 2), (1, 3)]
    text = [f'{{"iteration": {i}, "global_step": {step}, "loss": 0.1}}\n' for i, step in lines]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(text))
    (tmp_path / "run" / "config.json").write_text(f'{{"model": {{"path": "{tmp_path}/model"}}}}')
    found = find_candidates([str(tmp_path / "run")])
    assert [(one.version, one.path.name) for one in found] == [(0, "model"), (1, "global_step_2")]
    within = tmp_path / "run" / "checkpoints" / "global_step_3"
    assert [one.version for one in find_candidates([str(within)])] == [None]
    assert [one.version for one in find_candidates([f"2={within}"])] == [2]


def test_the_helper_samples_what_it_says():
    """The tokens of a request come from its version, and its log-probabilities are near exact."""
    models = tiny_models(2, 0.3)
    prompt = prompt_of(np.random.default_rng(1))
    (found,) = sample(models, [Request(prompt=prompt, length=30, versions=1, noise=0.0)])
    exact = [
        plain_logprobs(model, [(prompt, found[0], [True] * 30)]).detach().numpy()
        for model in models
    ]
    assert np.abs(exact[1] - found[1]).max() < 1e-4 < 0.1 < np.abs(exact[0] - found[1]).mean()
    assert max(found[0]) < VOCAB


def scores_of_versions(number, apart=0.0, length=60, seed=0):
    """Scores of a span that version 0 sampled, under versions whose logits are some way apart."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(length, 50, generator=generator)
    settings = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * length)
    token = logits.softmax(-1).multinomial(1, generator=generator)[:, 0]
    scores = [score_tokens(logits, token, settings)]
    for _ in range(1, number):
        logits = logits + apart * torch.randn(logits.shape, generator=generator)
        scores.append(score_tokens(logits, token, settings))
    return scores


def span_of(stored, *scores):
    return Span(stored=stored, scores=dict(enumerate(scores)), label=0)


@pytest.mark.parametrize(("bias", "expected"), [(1e-5, False), (6e-3, True)])
def test_a_common_sign_far_below_the_noise_is_not_suspicious(bias, expected):
    """In float32, nearly all differences of an engine may have the same sign."""
    (scores,) = scores_of_versions(1)
    span = span_of(scores.at(1.0) - np.float32(bias), scores)
    noise = Noise(kappa=2e-3, num_tokens=1000)
    assert noise.is_suspicious(span) == expected


def test_reduced_precision_needs_more_evidence_for_another_version():
    """Rounding leads half of the way to the next version, and the other half is noise."""
    label, other = scores_of_versions(2, apart=0.02)
    stored = (other.at(1.0) + 0.2 * (label.at(1.0) - other.at(1.0))).astype(np.float32)
    span = span_of(stored, label, other)
    kinds = [Noise(kappa=kappa).judge(span).kind for kappa in (0.009, 0.05)]
    assert kinds == ["version", "as_labelled"]
    assert Noise(kappa=0.05).caution == CAUTION
