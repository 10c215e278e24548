import json
from pathlib import Path

import pytest

from rollout_io.formats.engines.files import Start
from rollout_io.formats.harbor import recognizes
from schemas.metadata import DatasetMetadata
from tests.helpers.harbor_helpers import (
    GOLDEN,
    agent_step,
    atif,
    convert,
    element,
    failure,
    read_harbor,
    refers,
    refusal,
    write,
    write_trial,
)


def test_the_golden_run_yields_its_seven_main_calls_and_three_of_sub_agents_in_order(golden):
    rows = convert(golden / f"{GOLDEN}.json")
    summary = [f"terminus-2-summarization-{part}" for part in ("summary", "questions", "answers")]
    assert rows["agent"].to_list() == ["main"] * 3 + summary + ["main"] * 4
    assert rows["temperature"].to_list() == pytest.approx([0.7] * 3 + [None] * 3 + [0.7] * 4)


def test_the_golden_run_has_exactly_the_ids_and_log_probabilities_of_its_files(golden):
    rows = convert(golden / f"{GOLDEN}.json")
    assert len(rows) == 10
    for row in rows.iter_rows(named=True):
        path, _, place = row["source"].partition(", $.steps[")
        steps = json.loads(Path(path).read_text(encoding="utf-8"))["steps"]
        metrics = steps[int(place.rstrip("]"))]["metrics"]
        assert row["prompt_token_ids"] == metrics["prompt_token_ids"]
        assert row["response_ids"] == metrics["completion_token_ids"]
        assert row["rollout_logprobs"] == pytest.approx(metrics["logprobs"], rel=1e-6)


@pytest.mark.parametrize("main_first", [True, False])
def test_sub_agent_files_given_beside_their_run_are_read_once(golden, main_first):
    paths = sorted(golden.glob(f"{GOLDEN}*.json"), reverse=not main_first)
    assert len(paths) == 4
    alone = convert(golden / f"{GOLDEN}.json")
    assert convert(*paths).equals(alone)


def test_every_real_file_converts_or_is_refused_for_want_of_tokens_or_of_a_file(harness_logs):
    paths = sorted((harness_logs / "harbor").rglob("*.json"))
    refused = [path for path in paths if "trajectory" not in path.name or GOLDEN not in path.name]
    assert (len(paths), len(refused)) == (17, 13)
    errors = {path: refusal(path) for path in refused}
    rules = {path: error.rule for path, error in errors.items()}
    (main,) = (path for path, rule in rules.items() if rule == "dangling_reference")
    assert main.name == f"{GOLDEN.replace('.', '-linear-history.')}.json"
    assert "'trajectory.summarization-1-summary.json' does not exist" in errors[main].got
    exports = {path for path in refused if path.name.endswith(".traces.json")}
    assert {path for path, rule in rules.items() if rule == "harbor_export"} == exports
    others = errors.keys() - {main, *exports}
    assert {rules[path] for path in others} == {"no_token_ids"}
    trajectories = [path for path in others if "trajectory" in path.name]
    assert all("calls has token ids" in errors[path].got for path in trajectories)
    assert all(recognizes(Start(path)) for path in (*exports, *trajectories))


def test_json_lines_of_another_harness_are_not_taken_for_harbor(harness_logs):
    path = harness_logs / "harbor" / "nemo_gym_harbor_agent.example_output.jsonl"
    error = refusal(path)
    assert not recognizes(Start(path))
    assert (error.rule, error.got) == (
        "harbor_input",
        "the file has several JSON documents (JSON Lines)",
    )


def test_a_trial_gives_a_row_per_call_with_its_outcome_on_the_last(tmp_path, trial):
    details = element([[1, 2], [1, 2, 3, 4]], [[3], [5, 6]], logprobs=[[-0.25], [0.0, -1.0]])
    record = trial("t1", details, verifier_result={"rewards": {"reward": 1.0, "tests": 7}})
    path = write_trial(tmp_path, record)
    rows = convert(path)
    assert rows["instance_id"].to_list() == ["fix-git"] * 2
    assert rows["prompt_token_ids"].to_list() == [[1, 2], [1, 2, 3, 4]]
    assert rows["response_ids"].to_list() == [[3], [5, 6]]
    assert rows["rollout_logprobs"].to_list() == [[-0.25], [0.0, -1.0]]
    assert rows["reward"].to_list() == [0.0, 1.0]
    assert rows["metrics"].to_list() == [None, '{"reward": 1.0, "tests": 7.0}']
    assert rows["stop_reason"].to_list() == ["complete"] * 2
    place = f"{path}/result.json, $.agent_result.rollout_details[0].completion_token_ids"
    assert rows["source"].to_list() == [f"{place}[0]", f"{place}[1]"]
    assert rows["model_name"].unique().to_list() == ["nanov3"]


def test_job_trial_and_result_file_give_the_same_rows(tmp_path, trial):
    job = tmp_path / "job"
    directory = write_trial(job, trial("t1"))
    write(job / "result.json", {"id": "x", "n_total_trials": 1, "stats": {}})
    write(job / "config.json", {"job_name": "job"})
    write(directory / "agent" / "trajectory.json", atif(agent_step(1, [1, 2], [3])))
    rows = convert(job)
    for path in (directory, job / "result.json", directory / "agent" / "trajectory.json", tmp_path):
        assert convert(path).equals(rows)
    only = convert(directory / "result.json").drop("temperature")
    assert only.equals(rows.select(only.columns))


def test_a_group_is_a_task_and_checksum_of_one_job_in_the_order_of_trial_names(tmp_path, trial):
    for name, task in (("b", "x"), ("a", "x"), ("c", "y")):
        write_trial(tmp_path, trial(name, task=task))
    rows = convert(tmp_path)
    assert rows["trajectory_id"].to_list() == ["x_0", "x_1", "y_0"]
    assert rows["trial_name"].to_list() == ["x__a", "x__b", "y__c"]
    made = DatasetMetadata.decode(read_harbor([tmp_path]).schema.metadata).made_by
    assert made[-1]["groups"].startswith("inferred: the trials of one task")


def test_one_task_name_with_two_checksums_or_in_two_jobs_is_several_groups(tmp_path, trial):
    other_job = trial("c")
    other_job["config"] = {**other_job["config"], "job_id": "job-2"}
    for record in (trial("a"), trial("b", task_checksum="new"), other_job):
        write_trial(tmp_path, record)
    names = ["fix-git@job-2@sum-of-fix-git", "fix-git@job@new", "fix-git@job@sum-of-fix-git"]
    assert sorted(convert(tmp_path)["instance_id"]) == names


def test_a_timeout_is_failed_and_keeps_its_calls_and_numbers(tmp_path, trial):
    rewards = {"rewards": {"reward": 1.0}}
    record = trial("t", exception_info=failure("AgentTimeoutError"), verifier_result=rewards)
    row = convert(write_trial(tmp_path, record)).row(0, named=True)
    assert row["error"] == "AgentTimeoutError: it took too long"
    assert (row["reward"], row["response_ids"]) == (None, [3])
    assert (row["metrics"], row["stop_reason"]) == ('{"reward": 1.0}', "agent_timeout")
    assert (row["exception_type"], row["reward_valid"]) == ("AgentTimeoutError", "true")


def test_a_context_overflow_is_kept_with_reward_zero_whatever_the_verifier_says(tmp_path, trial):
    kind, rewards = "ContextLengthExceededError", {"rewards": {"reward": 1.0}}
    record = trial("t", exception_info=failure(kind), verifier_result=rewards)
    row = convert(write_trial(tmp_path, record)).row(0, named=True)
    assert (row["reward"], row["error"], row["stop_reason"]) == (0.0, None, "context_length")
    assert row["metrics"] == '{"reward": 1.0}'


@pytest.mark.parametrize("kind", ["RuntimeError", "VerifierTimeoutError", "CancelledError"])
def test_any_other_exception_is_failed_and_its_reward_is_not_valid(tmp_path, trial, kind):
    row = convert(write_trial(tmp_path, trial("t", exception_info=failure(kind, "")))).row(
        0, named=True
    )
    assert (row["error"], row["reward"], row["stop_reason"]) == (kind, None, "error")
    assert row["reward_valid"] == "false"


@pytest.mark.parametrize("kind", ["DaytonaError", "ContextLengthExceededError"])
def test_a_failed_trial_without_tokens_is_one_empty_row_that_says_so(tmp_path, trial, kind):
    record = trial("t", exception_info=failure(kind), agent_result=None)
    row = convert(write_trial(tmp_path, record)).row(0, named=True)
    assert (row["prompt_token_ids"], row["response_ids"], row["reward"]) == ([], [], None)
    assert row["error"].startswith(kind)
    assert row["error"].endswith("no tokens: there is no agent result")


@pytest.mark.parametrize(
    ("rewards", "reward"),
    [({"reward": 0.5, "other": 1}, 0.5), ({"score": 2}, 2.0), ({}, None), (None, None)],
)
def test_the_outcome_is_reward_or_the_only_key_and_none_is_unknown(
    tmp_path, trial, rewards, reward
):
    record = trial("t", verifier_result={"rewards": rewards})
    assert convert(write_trial(tmp_path, record))["reward"].to_list() == [reward]


def test_several_reward_keys_need_a_choice_which_a_rewards_file_is(tmp_path, trial):
    record = trial("t", verifier_result={"rewards": {"style": 0.5, "tests": 1.0}})
    path = write_trial(tmp_path / "job", record)
    assert refusal(path).rule == "reward_key"
    rewards = write(tmp_path / "rewards.jsonl", {"session": "fix-git/0", "reward": 0.75})
    row = convert(path, rewards=rewards).row(0, named=True)
    assert (row["reward"], row["metrics"]) == (0.75, '{"style": 0.5, "tests": 1.0}')


@pytest.mark.parametrize(
    ("details", "asked", "reason"),
    [
        (None, True, "the value is null although collect_rollout_details is true"),
        (None, False, "the value is null since collect_rollout_details is not true"),
        ([], True, "the value is an empty list although"),
        ([{}], True, "the value contains only empty elements although"),
        ([element([], [])], False, "the value contains only empty elements since"),
    ],
)
def test_each_reason_for_no_tokens_is_named(tmp_path, trial, details, asked, reason):
    record = trial("t")
    record["agent_result"]["rollout_details"] = details
    record["config"]["agent"]["kwargs"]["collect_rollout_details"] = asked
    error = refusal(write_trial(tmp_path, record))
    assert (error.rule, error.got[: len(reason)]) == ("no_token_ids", reason)


@pytest.mark.parametrize(
    "detail",
    [
        element([[1], [1, 2, 3]], [[2]]),
        element([[1]], [[2], [3]]),
        element([[1], [1, 2, 3]], [[2], [4]], logprobs=[[-1.0]]),
        element([[1], [1, 2, 3]], [[2], [4]], extra={"routed_experts": [[[[0]]]]}),
    ],
)
def test_an_element_with_lists_of_unequal_lengths_is_refused_by_name(tmp_path, trial, detail):
    error = refusal(write_trial(tmp_path, trial("t", element([[1]], [[2]]), detail)))
    assert error.rule == "no_token_ids"
    assert error.where.endswith("rollout_details[1]")
    assert "lists have unequal lengths" in error.got


def test_missing_log_probabilities_are_null_and_a_wrong_count_is_refused(tmp_path, trial):
    path = write_trial(tmp_path, trial("t", element([[1]], [[2]], logprobs=[])))
    assert convert(path)["rollout_logprobs"].to_list() == [None]
    path = write_trial(tmp_path, trial("t", element([[1]], [[2, 3]], logprobs=[[-1.0]])))
    assert refusal(path).rule == "lengths_align"


def test_routed_experts_of_the_details_are_kept(tmp_path, trial):
    detail = element([[1]], [[2]], extra={"routed_experts": [[[[0, 3]]]], "other": ["x", "y"]})
    rows = convert(write_trial(tmp_path, trial("t", detail)))
    assert rows["rollout_expert_indices"].to_list() == [[[[0, 3]]]]


def test_without_a_trajectory_sub_agents_come_before_the_main_agents_last_call(tmp_path, trial):
    main = element([[1], [1, 2, 3], [9]], [[2], [4], [8]])
    subs = [element([[1, 2, 3, 4, 5]], [[6]]), element([[7]], [[7]])]
    rows = convert(write_trial(tmp_path, trial("t", main, *subs)))
    assert rows["response_ids"].to_list() == [[2], [4], [6], [7], [8]]
    assert rows["agent"].to_list() == ["main", "main", "subagent-1", "subagent-2", "main"]


def test_a_compaction_inside_the_main_element_is_steps_and_never_one_sequence(tmp_path, trial):
    main = element([[1, 2], [1, 2, 3, 4], [90, 91]], [[3], [5], [6]])
    rows = convert(write_trial(tmp_path, trial("t", main)))
    assert rows["prompt_token_ids"].to_list() == [[1, 2], [1, 2, 3, 4], [90, 91]]


def test_a_trajectory_that_agrees_gives_order_agents_and_text(tmp_path, trial):
    sub = atif(agent_step(1, [7, 8], [9]), name="summary", trajectory_id="s")
    trajectory = atif(
        agent_step(1, [1], [2]),
        refers(2, {"trajectory_id": "s"}),
        agent_step(3, [5], [6]),
        agent_step(4, [5, 6, 7], [8], reasoning_content="<think>so</think>"),
        subagent_trajectories=[sub],
    )
    main = element([[1], [5], [5, 6, 7]], [[2], [6], [8]])
    record = trial("t", main, element([[7, 8]], [[9]]))
    rows = convert(write_trial(tmp_path, record, trajectory))
    assert rows["agent"].to_list() == ["main", "summary", "main", "main"]
    assert rows["response_ids"].to_list() == [[2], [9], [6], [8]]
    assert rows["response_text"].to_list()[-1] == "<think>so</think>\nstep 4"
    assert all("rollout_details" in source for source in rows["source"])
    record["agent_result"]["rollout_details"] = []
    from_atif = convert(write_trial(tmp_path, record, trajectory))
    assert from_atif.drop("source").equals(rows.drop("source"))
    assert from_atif["source"][1].endswith("$.subagent_trajectories[0].steps[0]")


@pytest.mark.parametrize(
    ("steps", "got"),
    [
        ([agent_step(1, [1, 2], [4])], "response_ids differ from those in"),
        ([agent_step(1, [1], [3])], "prompt_token_ids differ from those in"),
        ([agent_step(1, [1, 2], [3]), agent_step(2, [1], [3])], "1 call here, but 2 in"),
    ],
)
def test_a_trajectory_that_disagrees_is_refused(tmp_path, trial, steps, got):
    directory = write_trial(tmp_path, trial("t"), atif(*steps))
    error = refusal(directory)
    assert (error.rule, error.got[: len(got)]) == ("tokens_disagree", got)
    assert len(convert(directory / "result.json")) == 1


def test_a_trajectory_without_ids_does_not_hinder_the_details(tmp_path, trial):
    text = {"step_id": 1, "source": "agent", "message": "hi", "metrics": {"prompt_tokens": 2}}
    assert len(convert(write_trial(tmp_path, trial("t"), atif(text)))) == 1


def test_without_ids_in_either_record_both_reasons_are_named(tmp_path, trial):
    text = {"step_id": 1, "source": "agent", "message": "hi", "metrics": {"prompt_tokens": 2}}
    record = trial("t")
    record["agent_result"]["rollout_details"] = None
    error = refusal(write_trial(tmp_path, record, atif(text, version="1.2")))
    assert error.rule == "no_token_ids"
    assert "null although" in error.got
    assert "the only call has no token ids" in error.got
    assert "ATIF-v1.2 has no field for prompt ids" in error.got


def test_steps_of_a_trial_keep_each_ones_reward(tmp_path, trial):
    parts = [
        {
            "step_name": name,
            "agent_result": {"rollout_details": [element(prompts, [[9]] * len(prompts))]},
            "verifier_result": {"rewards": {"reward": reward}},
        }
        for name, prompts, reward in (("one", [[1], [2]], 0.25), ("two", [[3]], 0.5))
    ]
    record = trial("t", agent_result=None, verifier_result=None, step_results=parts)
    rows = convert(write_trial(tmp_path, record))
    assert rows["prompt_token_ids"].to_list() == [[1], [2], [3]]
    assert rows["reward"].to_list() == [0.0, 0.25, 0.5]
    record["verifier_result"] = {"rewards": {"reward": 0.75}}
    rows = convert(write_trial(tmp_path, record))
    assert rows["reward"].to_list() == [0.0, 0.25, 0.75]
    assert json.loads(rows["metrics"][-1]) == {
        "reward": 0.75,
        "one.reward": 0.25,
        "two.reward": 0.5,
    }


def test_an_empty_list_of_steps_is_a_trial_of_one_step(tmp_path, trial):
    assert len(convert(write_trial(tmp_path, trial("t", step_results=[])))) == 1


def test_a_temperature_of_zero_in_the_config_is_the_temperature(tmp_path, trial):
    record = trial("t")
    record["config"]["agent"]["kwargs"]["temperature"] = 0.0
    rows = convert(write_trial(tmp_path, record, atif(agent_step(1, [1, 2], [3]))))
    assert rows["temperature"].to_list() == [0.0]


def test_an_unfinished_trial_and_a_short_job_are_named(tmp_path, trial):
    job = tmp_path / "job"
    write_trial(job, trial("a"))
    write(job / "result.json", {"n_total_trials": 2, "stats": {}})
    error = refusal(job)
    assert (error.rule, error.got) == ("missing_trials", "1 of 2 trials are present")
    write(job / "fix-git__b" / "config.json", {"trial_name": "fix-git__b"})
    error = refusal(job)
    assert (error.rule, error.where) == ("no_trial_result", str(job / "fix-git__b"))


def test_a_trial_of_which_only_the_trajectory_is_left_is_not_passed_over(tmp_path, trial):
    write_trial(tmp_path, trial("a"))
    write(tmp_path / "b" / "agent" / "trajectory.json", atif(agent_step(1, [1], [2])))
    error = refusal(tmp_path)
    assert (error.rule, error.where) == ("harbor_input", str(tmp_path / "b"))


def test_linked_trials_are_read_and_a_link_back_up_is_not_followed(tmp_path, trial):
    path = write_trial(tmp_path / "elsewhere", trial("a"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "linked").symlink_to(path)
    write(tmp_path / "job" / "result.json", {"n_total_trials": 1, "stats": {}})
    (tmp_path / "job" / "up").symlink_to(tmp_path / "job")
    assert len(convert(tmp_path / "job")) == 1


def test_a_run_given_twice_is_refused(tmp_path, trial):
    path = write_trial(tmp_path, trial("a"))
    assert refusal(tmp_path, path / "result.json").rule == "duplicate_input"
    file = write(tmp_path / "x.json", atif(agent_step(1, [1], [2])))
    assert refusal(file, file).rule == "duplicate_input"
