"""Files that peers wrote, converted, merged and exported, against what the peers' own code says."""

import json

import numpy as np
import polars as pl
import pytest

import rollout_io
from pipelines import merge, unmerge
from rollout_io import read_log
from schemas import check
from schemas.columns import metrics_dict
from tests.conftest import ROOT

PEERS = ROOT / "tests" / "data" / "peers"
JOB = PEERS / "harbor" / "jobs" / "hello"


def trial_results():
    found = [json.loads(path.read_text()) for path in JOB.glob("*/result.json")]
    return {result["trial_name"]: result for result in found}


def logged_calls(result):
    """(prompt ids, sampled ids, float32 log-probabilities) of every call, by agent."""
    for detail in result["agent_result"]["rollout_details"]:
        lists = (detail["prompt_token_ids"], detail["completion_token_ids"], detail["logprobs"])
        for prompt, response, logprobs in zip(*lists, strict=True):
            yield prompt, response, np.array(logprobs, np.float32).tolist()


def harbor_rows(**options):
    return read_log([JOB], **options).to_pylist()


def test_every_call_of_a_real_harbor_job_is_a_row_and_no_call_is_two():
    rows = harbor_rows()
    for name, result in trial_results().items():
        ours = [row for row in rows if row["trial_name"] == name]
        found = [(r["prompt_token_ids"], r["response_ids"], r["rollout_logprobs"]) for r in ours]
        assert sorted(found) == sorted(logged_calls(result))
    assert len(rows) == sum(len(list(logged_calls(r))) for r in trial_results().values()) == 8


def test_a_real_summarisation_lies_between_the_calls_of_the_main_agent():
    sizes = {name: len(list(logged_calls(r))) for name, r in trial_results().items()}
    longest = max(sizes, key=sizes.get)
    agents = [r["agent"] for r in harbor_rows() if r["trial_name"] == longest]
    assert agents[0] == agents[-1] == "main"
    assert len(set(agents)) == 4
    assert agents.count("main") == 2


def test_the_reward_of_a_real_trial_lies_on_its_last_call_and_a_timeout_is_the_users_choice():
    by_trial = {}
    for row in harbor_rows():
        by_trial.setdefault(row["trial_name"], []).append(row)
    results = trial_results()
    for name, rows in by_trial.items():
        reward = results[name]["verifier_result"]["rewards"]["reward"]
        if results[name]["exception_info"] is None:
            assert [r["reward"] for r in rows] == [0.0] * (len(rows) - 1) + [reward]
            assert rows[-1]["reward_valid"] == "true"
        else:
            assert rows[-1]["error"].startswith("AgentTimeoutError")
            assert [r["reward"] for r in rows] == [None] * len(rows)
            assert metrics_dict(rows[-1]["metrics"])["reward"] == reward
    kept = [row for row in harbor_rows(timeouts="keep") if row["is_last_step"]]
    assert sorted(row["reward"] for row in kept) == [0.0, 1.0, 1.0]
    assert all("error" not in row for row in kept)


FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "is_last_step")


def without_rounding(output):
    logprobs = [np.float32(row).tolist() for row in output["rollout_logprobs"]]
    return {name: output[name] for name in FIELDS} | {"rollout_logprobs": logprobs}


def test_a_real_generator_output_comes_back_from_the_table_field_by_field():
    path = PEERS / "skyrl" / "stepwise.json"
    given, back = json.loads(path.read_text()), rollout_io.to_generator_output(read_log([path]))
    assert without_rounding(back) == without_rounding(given)
    assert back["stop_reasons"] == given["stop_reasons"]
    assert back["rewards"] == given["rewards"]


def test_merging_a_real_generator_output_is_what_skyrls_own_merge_makes_of_it():
    merged = merge(read_log([PEERS / "skyrl" / "stepwise.json"])).collect()
    ours = rollout_io.to_generator_output(merged)
    theirs = json.loads((PEERS / "skyrl" / "expected.json").read_text())
    assert without_rounding(ours) == without_rounding(theirs)
    assert len(ours["response_ids"]) < len(
        json.loads((PEERS / "skyrl" / "stepwise.json").read_text())["response_ids"]
    )


@pytest.mark.parametrize(
    "path", ["verifiers/eval/traces.jsonl", "verifiers/train/traces.jsonl", "rllm/eval_results"]
)
def test_what_peers_wrote_breaks_no_invariant_and_merges_back_and_forth(path):
    table = read_log([PEERS / path], on_error="fail")
    assert check(table).filter(pl.col("severity") == "error").is_empty()
    back = unmerge(merge(table)).collect()
    for name in ("trajectory_id", "step_index", "prompt_token_ids", "response_ids"):
        assert back[name].to_list() == table.column(name).to_pylist()


def test_the_trajectories_of_a_trials_sub_agents_are_not_runs_of_their_own():
    longest = max(JOB.glob("*/agent"), key=lambda path: len(list(path.glob("*.json"))))
    files = sorted(longest.glob("*.json"))
    assert len(files) == 4
    rows = read_log(files).to_pylist()
    assert {row["trajectory_id"] for row in rows} == {rows[0]["trajectory_id"]}
    whole = [row for row in harbor_rows() if row["trial_name"] == rows[0]["trial_name"]]
    assert [row["response_ids"] for row in rows] == [row["response_ids"] for row in whole]
