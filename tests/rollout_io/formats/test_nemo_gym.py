import base64
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io import read_log
from rollout_io.dataset.prefix_layout import encode_prefixes
from rollout_io.formats.engines.files import Start
from rollout_io.formats.nemo_gym import ADAPTER
from schemas import check
from schemas.columns import metrics_dict
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from tests.helpers.examples import examples

FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
ROUND_TRIP = "nemo_gym/round_trip_test_data.json"
CODING = "nemo_gym/competitive_coding_challenges.example_rollouts.jsonl"


def tokens(prompt, response):
    return dict(zip(FIELDS, (prompt, response, [-0.5] * len(response)), strict=True))


def message(text="hi", **fields):
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content} | fields


def function_call(name, **fields):
    return {"type": "function_call", "name": name, "arguments": "{}", "call_id": name} | fields


def answer(name):
    return {"type": "function_call_output", "call_id": name, "output": "7"}


def run(*output, task=0, rollout=0, **fields):
    response = {"id": "resp_1", "object": "response", "output": list(output)}
    response |= fields.pop("response", {})
    params = {"input": [{"role": "user", "content": "go"}], "temperature": 0.7}
    numbers = {"_ng_task_index": task, "_ng_rollout_index": rollout, "reward": 1.0}
    return {"responses_create_params": params, "response": response} | numbers | fields


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def read_rollouts(paths, rewards=None):
    return read_log(paths, format="nemo_gym", rewards=rewards and str(rewards))


def read(*paths, rewards=None):
    table = read_rollouts(paths, rewards)
    assert check(table).is_empty()
    return table


def rows_of(tmp_path, *records, **outcome):
    rewards = write(tmp_path / "rewards.jsonl", [outcome]) if outcome else None
    rows = read(write(tmp_path / "a.jsonl", list(records)), rewards=rewards).to_pylist()
    return rows


def refusal(*paths):
    with pytest.raises(RolloutError) as caught:
        read_rollouts(paths)
    return caught.value


def refused(tmp_path, *records):
    return refusal(write(tmp_path / "a.jsonl", list(records)))


def test_the_real_group_gives_exactly_the_ids_and_log_probabilities_of_its_lines(harness_logs):
    path = harness_logs / CODING
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = read(path).to_pylist()
    assert [r["repetition_id"] for r in rows] == [0, 1, 2, 3, 4]
    assert {r["instance_id"] for r in rows} == {"0"}
    assert [line["_ng_rollout_index"] for line in lines] == [1, 3, 4, 0, 2]
    for number, line in enumerate(lines, 1):
        row, item = rows[line["_ng_rollout_index"]], line["response"]["output"][-1]
        assert row["prompt_token_ids"] == item["prompt_token_ids"]
        assert row["response_ids"] == item["generation_token_ids"]
        logprobs = np.array(item["generation_log_probs"], np.float32)
        assert np.array_equal(np.array(row["rollout_logprobs"], np.float32), logprobs)
        assert row["source"] == f"{path}:{number}, response.output[1]"
        assert row["reward"] == line["reward"] == 0.0
        assert metrics_dict(row["metrics"])["subtask_score"] == line["subtask_score"]
        assert row["agent"] == "simple_agent"
        reasoning, text = line["response"]["output"]
        assert reasoning["summary"][0]["text"] in row["response_text"]
        assert text["content"][0]["text"] in row["response_text"]
    assert any(0.0 in r["rollout_logprobs"] for r in rows)


def test_a_real_run_whose_template_drops_reasoning_is_two_steps_that_share_3089_tokens(
    harness_logs,
):
    path = harness_logs / ROUND_TRIP
    output = json.loads(path.read_text(encoding="utf-8"))["input"]["output"]
    items = [item for item in output if "prompt_token_ids" in item]
    table = read(path)
    rows = table.to_pylist()
    assert [r["prompt_token_ids"] for r in rows] == [i["prompt_token_ids"] for i in items]
    assert [r["response_ids"] for r in rows] == [i["generation_token_ids"] for i in items]
    assert [r["source"] for r in rows] == [f"{path}, input.output[{i}]" for i in (3, 7)]
    assert len(items[0]["prompt_token_ids"]) + len(items[0]["generation_token_ids"]) == 3583
    encoded = encode_prefixes(table)
    assert encoded["parent_step_index"].to_pylist() == [None, 0]
    assert encoded["prefix_length"].to_pylist() == [0, 3089]
    assert table["reward"].null_count == 2
    made = DatasetMetadata.decode(table.schema.metadata).made_by[-1]
    assert made["groups"].startswith("inferred: each response without a task")


@pytest.mark.parametrize(
    ("name", "rule", "why", "num_runs"),
    [
        ("nemo_gym/anyterminal_agent.example_rollouts_hermes.jsonl", "no_token_ids", "empty", 5),
        (
            "nemo_gym/tau2.example_rollouts.jsonl",
            "no_token_ids",
            "its items lack the token fields",
            5,
        ),
        (
            "harbor/nemo_gym_harbor_agent.example_output.jsonl",
            "no_token_ids",
            "its items lack the token fields",
            3,
        ),
        ("nemo_gym/nemo_rl.test_nemo_gym_sanity.json", "no_response", "has no `response`", 0),
        (
            "nemo_gym/nemo_rl.maybe_correct_merged_tokens_test_data.json",
            *("no_response", "seen_token_ids", 0),
        ),
    ],
)
def test_a_real_file_without_calls_tokens_is_refused_for_its_reason(
    harness_logs, name, rule, why, num_runs
):
    error = refusal(harness_logs / name)
    assert error.rule == rule
    assert why in error.got
    counted = f"{num_runs} of {num_runs} runs have text but no token ids."
    assert (counted in str(error)) == (num_runs > 0)


def test_a_real_rollouts_file_is_recognized_and_other_harnesses_are_not(harness_logs):
    found = {
        str(path.relative_to(harness_logs))
        for path in harness_logs.rglob("*")
        if path.is_file() and ADAPTER.recognizes(Start(path))
    }
    assert found >= {CODING, ROUND_TRIP, "nemo_gym/tau2.example_rollouts.jsonl"}
    assert all("nemo_gym" in name for name in found)


def test_a_call_of_several_items_has_its_ids_on_the_last(tmp_path):
    first = [function_call("f"), function_call("g", **tokens([1, 2], [3, 4]))]
    second = [message("done", **tokens([1, 2, 3, 4, 7], [5]))]
    rows = rows_of(tmp_path, run(*first, answer("f"), answer("g"), *second))
    assert [r["prompt_token_ids"] for r in rows] == [[1, 2], [1, 2, 3, 4, 7]]
    assert [r["response_ids"] for r in rows] == [[3, 4], [5]]
    assert [r["reward"] for r in rows] == [0.0, 1.0]
    assert '"name":"f"' in rows[0]["response_text"]
    assert '"name":"g"' in rows[0]["response_text"]
    assert rows[1]["response_text"] == "done"


def test_messages_are_what_was_sent_before_each_call_without_tokens(tmp_path):
    output = [function_call("f", **tokens([1], [2])), answer("f"), message(**tokens([1], [3]))]
    rows = rows_of(tmp_path, run(*output))
    user = {"role": "user", "content": "go"}
    assert json.loads(rows[0]["messages"]) == [user]
    assert json.loads(rows[1]["messages"]) == [user, function_call("f"), answer("f")]


def test_two_calls_without_an_answer_between_them_are_two_steps(tmp_path):
    rows = rows_of(tmp_path, run(message(**tokens([1], [2])), message(**tokens([9], [3]))))
    assert [r["prompt_token_ids"] for r in rows] == [[1], [9]]


def test_masked_runs_have_failed_and_have_no_reward(tmp_path):
    output = message(**tokens([1], [2, 3]))
    why = {"mask_sample": True, "error_kind": "sandbox", "reward": 0.0}
    rows = rows_of(tmp_path, run(output, **why), run(output, rollout=1, mask_sample=False))
    assert [r["error"] for r in rows] == ["mask_sample: sandbox", None]
    assert rows[0]["reward"] is None
    assert [r["response_ids"] for r in rows] == [[2, 3], [2, 3]]
    assert [metrics_dict(r["metrics"])["mask_sample"] for r in rows] == [1.0, 0.0]


def test_every_number_of_a_run_is_a_metric_and_its_indices_are_not(tmp_path):
    numbers = {"reward": 0.5, "passed": True, "rewards": {"style": 1, "tests": 0.25}}
    others = {"details": {"log": "x", "n": 1}, "name": "A", "none": None, "list": [1]}
    row = rows_of(tmp_path, run(message(**tokens([1], [2])), **numbers, **others))[0]
    wanted = {"reward": 0.5, "passed": 1.0, "rewards.style": 1.0, "rewards.tests": 0.25}
    assert metrics_dict(row["metrics"]) == wanted
    assert (row["reward"], row["temperature"]) == (0.5, pytest.approx(0.7))


@pytest.mark.parametrize("usage", [(3, 3), (2, 1)])
def test_usage_may_count_all_calls_or_the_last(tmp_path, usage):
    counts = dict(zip(("input_tokens", "output_tokens"), usage, strict=True))
    output = [message(**tokens([1], [2, 3])), message(**tokens([1, 2], [3]))]
    assert len(rows_of(tmp_path, run(*output, response={"usage": counts}))) == 2


def test_usage_that_counts_other_tokens_is_refused(tmp_path):
    counts = {"input_tokens": 2, "output_tokens": 2}
    error = refused(tmp_path, run(message(**tokens([1], [2, 3])), response={"usage": counts}))
    assert (error.rule, error.got) == (
        "usage_counts",
        "`usage` reports 2 + 2 tokens, but the log has 1 + 2 ids",
    )


ROUTES = [[[0, 1]], [[2, 3]]]
ENVELOPE = "nrlre1:int16:2x1x2:" + base64.b64encode(np.array(ROUTES, "<i2").tobytes()).decode()


@pytest.mark.parametrize("routed", [ROUTES, ENVELOPE])
def test_routed_experts_are_read_as_lists_and_as_text(tmp_path, routed):
    row = rows_of(tmp_path, run(message(**tokens([1], [2]), routed_experts=routed)))[0]
    assert row["rollout_expert_indices"] == ROUTES


@pytest.mark.parametrize("routed", ["nrlre1:int16:3x1x2:AAABAAIAAwA=", "x", [[[-1]]], [[0]]])
def test_routed_experts_of_another_shape_are_refused(tmp_path, routed):
    error = refused(tmp_path, run(message(**tokens([1], [2]), routed_experts=routed)))
    assert error.rule == "routing_shape"
    assert error.where.endswith("a.jsonl:1, response.output[0].routed_experts")


@pytest.mark.parametrize(
    ("item", "rule", "got"),
    [
        (message(), "no_token_ids", "the ids were not requested"),
        (message(**dict.fromkeys(FIELDS)), "no_token_ids", "its token fields are null"),
        (message(**tokens([], [])), "no_token_ids", "its token fields are empty lists"),
        (message(**tokens([1], [])), "nonempty_response", "the response has no tokens"),
        (message(**tokens([], [1])), "nonempty_prompt", "the prompt has no tokens"),
        (
            message(**tokens([1], [2]) | {"generation_log_probs": [-1.0, -1.0]}),
            *("lengths_align", "2 logprobs"),
        ),
        (
            message(prompt_token_ids=[1], generation_token_ids=[2]),
            *("token_fields", "lacks generation_log_probs"),
        ),
        (message(**tokens([1], [-100])), "token_range", "id -100 in the response"),
        (
            message(**tokens([1], [2]) | {"role": "user"}),
            "sampled_item",
            "an input item has token ids",
        ),
        (answer("f"), "no_calls", "no model call"),
    ],
)
def test_a_call_that_cannot_be_used_is_refused_for_its_reason(tmp_path, item, rule, got):
    good = run(message(**tokens([1], [2])))
    error = refused(tmp_path, good, run(item, rollout=1), run(item, rollout=2))
    assert error.rule == rule
    assert got in error.got
    assert f"{tmp_path / 'a.jsonl'}:2, response.output" in error.where
    counted = "2 of 3 runs have text but no token ids. ["
    assert (counted if rule == "no_token_ids" else "(and 1 more record rejected: ") in str(error)


def test_one_call_of_several_without_ids_is_refused_with_its_number(tmp_path):
    first = [function_call("f", **tokens([1], [2])), answer("f")]
    error = refused(tmp_path, run(*first, function_call("g"), answer("g")))
    assert error.got.startswith("call 2 of 2 has no token ids")
    assert error.where.endswith("response.output[2]")


def test_a_task_without_its_rollout_is_refused(tmp_path):
    broken = run(message(**tokens([1], [2])))
    del broken["_ng_rollout_index"]
    assert refused(tmp_path, broken).rule == "group"


def test_an_error_in_the_response_makes_a_failed_trajectory_that_keeps_its_numbers(tmp_path):
    failed = run(rollout=1, response={"error": {"code": "server_error", "message": "no answer"}})
    rows = rows_of(tmp_path, failed, run(message(**tokens([1], [2]))))
    assert [r["error"] for r in rows] == [None, "no answer"]
    assert [r["reward"] for r in rows] == [1.0, None]
    assert rows[1]["source"].endswith("a.jsonl:1")
    assert (rows[1]["response_ids"], metrics_dict(rows[1]["metrics"])) == ([], {"reward": 1.0})


def test_an_incomplete_response_says_why_its_last_call_stopped(tmp_path):
    reason = {"incomplete_details": {"reason": "max_output_tokens"}}
    output = [message(**tokens([1], [2])), message(**tokens([3], [4]))]
    rows = rows_of(tmp_path, run(*output, response=reason))
    assert [r["stop_reason"] for r in rows] == [None, "max_output_tokens"]


def test_an_error_in_the_rewards_file_lets_a_run_without_tokens_pass(tmp_path):
    row = rows_of(tmp_path, run(message()), session="0/0", error="lost")[0]
    assert (row["error"], row["reward"], row["response_ids"]) == ("lost", None, [])


IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(st.lists(st.tuples(IDS, IDS, st.integers(0, 2)), min_size=1, max_size=4), max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_order_of_lines_gives_each_call_as_a_step_in_order_of_tasks(runs, rng):
    records = []
    for number, calls in enumerate(runs):
        output = []
        for prompt, response, num_parallel in calls:
            output += [function_call(f"f{i}") for i in range(num_parallel)]
            output += [function_call("last", **tokens(prompt, response)), answer("last")]
        records.append(run(*output, task=number // 2, rollout=number % 2))
    rng.shuffle(records)
    with tempfile.TemporaryDirectory() as folder:
        path = write(
            Path(folder) / "a.jsonl", [*records, run(message(**tokens([1], [2])), task=99)]
        )
        rows = read(path).to_pylist()
    wanted = [(p, r) for calls in runs for p, r, _ in calls] + [([1], [2])]
    assert [(r["prompt_token_ids"], r["response_ids"]) for r in rows] == wanted
    names = [f"{n // 2}_{n % 2}" for n, calls in enumerate(runs) for _ in calls]
    assert [r["trajectory_id"] for r in rows] == [*names, "99_0"]


def test_tasks_of_one_index_with_different_inputs_are_groups_of_their_own(tmp_path):
    def task(question, rollout):
        record = run(message(**tokens([1], [2])), _ng_rollout_index=rollout)
        record["responses_create_params"] = {"input": question}
        return record

    files = [
        write(tmp_path / "a.jsonl", [task("1+1?", 0), task("1+1?", 1)]),
        write(tmp_path / "b.jsonl", [task("2+2?", 0)]),
    ]
    rows = read(*files).to_pylist()
    names = [row["instance_id"] for row in rows]
    assert names.count(names[0]) + names.count(names[-1]) == 3
    assert len(set(names)) == 2
    assert all(name.startswith("0@") for name in names)
    assert {row["instance_id"] for row in read(files[0]).to_pylist()} == {"0"}
