"""The guides of loops lead from an empty folder to a checkpoint, with the code that they show."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

import rollout_io
from rollout_io.cli.main import run
from tests.conftest import EXAMPLES
from tests.helpers.guide_helpers import blocks_of, check_outputs, follow, served


def checkpoint_of(folder):
    """The number of parameters of the last checkpoint of a run."""
    last = max((folder / "checkpoints").glob("global_step_*"))
    return AutoModelForCausalLM.from_pretrained(last).num_parameters()


@pytest.mark.nightly  # tests/vllm/test_guides.py follows the guide with a vLLM server on every change
@pytest.mark.model
def test_a_loop_around_an_openai_server_becomes_a_checkpoint(smollm2_dir, tmp_path):
    with served(smollm2_dir) as url:
        printed = follow("vllm_loop.md", tmp_path, url=url)
    assert "fingerprints match" in printed
    check_outputs("vllm_loop.md", printed)
    rows = rollout_io.scan(tmp_path / "runs" / "sums").collect()
    assert len(rows) == 4 * 4 * 2
    assert set(rows["token_source"]) == {"engine"}
    assert rows["rollout_logprobs"].null_count() == 0
    assert checkpoint_of(tmp_path / "runs" / "loop") > 1e8


def test_calls_logged_from_generate_are_those_that_a_server_answers(tmp_path):
    """`log` of the guide, on what vLLM's `LLM.generate` returns."""
    (code,) = [code for _, _, code in blocks_of("vllm_loop.md") if "def log(" in code]
    lines = (EXAMPLES / "shop.calls.jsonl").read_text().splitlines()[:4]
    with (tmp_path / "own.jsonl").open("w") as calls:
        names = {"json": json, "calls": calls}
        exec(code, names)
        for line in map(json.loads, lines):
            sampling = SimpleNamespace(
                **dict.fromkeys(names["SETTINGS"]) | {"temperature": 1.0, "top_p": 0.5}
            )
            names["log"](line["session"], sampling, output_of(line))
    (tmp_path / "server.jsonl").write_text("\n".join(lines))
    columns = ["trajectory_id", "prompt_token_ids", "response_ids", "rollout_logprobs"]
    columns += ["temperature", "stop_reason"]
    found = []
    for name in ("own", "server"):
        given = [str(tmp_path / f"{name}.jsonl"), "--out", str(tmp_path / name)]
        assert run(["convert", *given]) == 0
        found.append(rollout_io.scan(tmp_path / name).select(columns).collect())
    assert found[0].equals(found[1])
    assert set(rollout_io.scan(tmp_path / "own").collect()["top_p"]) == {0.5}


def output_of(line):
    """A vLLM `RequestOutput` of a recorded response."""
    response = line["response"]
    (choice,) = response["choices"]
    tokens = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    output = SimpleNamespace(
        index=0,
        finish_reason=choice["finish_reason"],
        text=choice["message"]["content"],
        token_ids=tuple(choice["token_ids"]),
        logprobs=[{i: SimpleNamespace(logprob=entry["logprob"])} for i, entry in tokens],
    )
    prompt_ids = response["prompt_token_ids"]
    return SimpleNamespace(prompt="", prompt_token_ids=prompt_ids, outputs=[output])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    "model",
    ["narrow_smollm2", pytest.param("smollm2_dir", marks=pytest.mark.nightly)],
)
def test_a_task_of_ones_own_becomes_a_checkpoint_and_a_learning_curve(model, request, tmp_path):
    model = request.getfixturevalue(model)
    printed = follow("rl_loop.md", tmp_path, model=model)
    check_outputs("rl_loop.md", printed)
    out = tmp_path / "runs" / "capitals"
    whole = AutoModelForCausalLM.from_pretrained(model)
    assert checkpoint_of(out) == whole.num_parameters()
    assert (out / "curves.png").stat().st_size > 10_000
    rewards = [
        rollout_io.scan(out / "rollouts" / f"iteration_0000{i}").collect()["reward"].mean()
        for i in range(6)
    ]
    if whole.config.num_hidden_layers > 2:  # with two layers, it knows no capital
        assert max(rewards[3:]) > rewards[0]
