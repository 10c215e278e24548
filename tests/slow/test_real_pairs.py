"""Samples and pairs of real logs, counted."""

import pytest

from rollout_io.cli.main import run
from tests.helpers.pair_helpers import exported

pytestmark = [pytest.mark.model, pytest.mark.nightly]

TEXT = ("--chat-template", "chatml_tools_thinking", "--on-error", "skip")
# Rows, samples of sft, of the best attempts and of kto; forks, those of equal return, pairs.
LOGS = {
    "../vllm_calls/forks.calls.jsonl": (73, 73, 17, 117, 8, 3, 5),
    "../vllm_calls/long.calls.jsonl": (80, 80, 12, 91, 4, 2, 2),
    "prime_hosted_rl/h4y9hb6fjom4xfbclitb2938": (16, 16, 2, 41, 2, 0, 2),
}


@pytest.mark.parametrize("log", LOGS)
def test_real_logs_give_these_samples_and_pairs(log, harness_logs, smollm2_dir, tmp_path):
    path, out = harness_logs / log, tmp_path / "ds"
    options = ["--tokenizer", str(smollm2_dir), *TEXT]
    if log.endswith(".calls.jsonl"):
        options = ["--rewards", str(path).replace("calls.jsonl", "rewards.jsonl")]
    assert run(["convert", str(path), *options, "--out", str(out)]) == 0
    num_rows, num_all, num_best, num_labelled, num_forks, num_equal, num_pairs = LOGS[log]
    for name in ("sft", "sft_tokens", "openai_sft", "sharegpt"):
        done, _ = exported(out, name)
        assert (done.num_rows_read, done.num_samples) == (num_rows, num_all)
    for name, number in (("kto", num_labelled), ("kto_tokens", num_labelled)):
        assert exported(out, name)[0].num_samples == number
    assert exported(out, "sft", "best")[0].num_samples == num_best
    counts = {"num_forks": num_forks, "num_forks_of_equal_return": num_equal}
    for name in ("dpo", "dpo_tokens"):
        done, samples = exported(out, name)
        assert (done.counts, done.num_samples, len(samples)) == (counts, num_pairs, num_pairs)


@pytest.mark.parametrize(
    ("log", "num_rows"),
    [("verifiers/v0_eval_math_python", 15), ("nemo_gym/tau2.example_rollouts.jsonl", 5)],
)
def test_real_logs_of_equal_returns_give_samples_and_no_pairs(
    log, num_rows, harness_logs, smollm2_dir, tmp_path, capsys
):
    path, out = harness_logs / log, tmp_path / "ds"
    command = ["convert", str(path), "--tokenizer", str(smollm2_dir), *TEXT]
    assert run([*command, "--out", str(out)]) == 0
    assert exported(out, "sft_tokens")[0].num_samples == num_rows
    new = str(tmp_path / "pairs")
    assert run(["export", str(out), "--format", "dpo", "--out", new]) == 1
    assert f"{num_rows} at no fork of their group" in capsys.readouterr().err
