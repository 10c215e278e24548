from pathlib import Path

import pytest

from rollout_io.formats.engines.files import Start
from rollout_io.formats.harbor import ADAPTER
from tests.helpers.harbor_helpers import (
    agent_step,
    atif,
    convert,
    refers,
    refusal,
    write,
    write_trial,
)


def test_copied_context_is_skipped_even_where_it_has_ids(tmp_path):
    copied = agent_step(1, [1], [2], is_copied_context=True)
    path = write(tmp_path / "a.json", atif(copied, agent_step(2, [3], [4])))
    assert convert(path)["prompt_token_ids"].to_list() == [[3]]


def test_a_step_of_no_call_is_skipped_and_one_of_several_is_refused(tmp_path):
    no_call = {"step_id": 1, "source": "agent", "message": "echo", "llm_call_count": 0}
    path = write(tmp_path / "a.json", atif(no_call, agent_step(2, [3], [4], llm_call_count=1)))
    assert convert(path)["prompt_token_ids"].to_list() == [[3]]
    summed = agent_step(2, [3], [4], llm_call_count=3)
    error = refusal(write(path, atif(agent_step(1, [1], [2]), summed)))
    assert (error.rule, error.where) == ("no_token_ids", f"{path}, $.steps[1]")
    assert "summed over 3 calls" in error.got
    no_call = agent_step(1, [1], [2], llm_call_count=0)
    error = refusal(write(path, atif(no_call, agent_step(2, [3], [4]))))
    assert (error.rule, error.where) == ("atif_call_count", f"{path}, $.steps[0]")


@pytest.mark.parametrize(
    ("metrics", "got"),
    [
        (None, "no metrics"),
        ({"prompt_token_ids": [1]}, "metrics without completion_token_ids"),
        ({"prompt_token_ids": [], "completion_token_ids": [2]}, "an empty list of prompt_token"),
        ({"prompt_token_ids": None, "completion_token_ids": [2]}, "metrics without prompt_token"),
    ],
)
def test_one_call_without_ids_among_others_is_refused_with_its_place(tmp_path, metrics, got):
    steps = (agent_step(1, [1], [2]), agent_step(2, [1], [2]) | {"metrics": metrics})
    path = write(tmp_path / "a.json", atif(*steps))
    error = refusal(path)
    assert (error.rule, error.where) == ("no_token_ids", f"{path}, $.steps[1]")
    assert f"the call has {got}" in error.got


def test_a_continuation_goes_on_with_the_main_agent(tmp_path):
    first = atif(agent_step(1, [1], [2]), continued_trajectory_ref="trajectory.cont-1.json")
    copied = {"step_id": 1, "source": "user", "message": "hi", "is_copied_context": True}
    path = write(tmp_path / "trajectory.json", first)
    error = refusal(path)
    assert (error.rule, error.where) == (
        "dangling_reference",
        f"{path}, $.continued_trajectory_ref",
    )
    second = write(tmp_path / "trajectory.cont-1.json", atif(copied, agent_step(2, [9], [8])))
    rows = convert(path, second)
    assert rows["response_ids"].to_list() == [[2], [8]]
    assert rows["agent"].to_list() == ["main", "main"]


def test_a_dangling_reference_is_named_and_an_empty_sub_agent_is_not_one(tmp_path):
    ref = {"trajectory_path": "sub.json", "session_id": "s"}
    path = write(tmp_path / "a.json", atif(agent_step(1, [1], [2]), refers(2, ref)))
    error = refusal(path)
    assert (error.rule, error.where) == ("dangling_reference", f"{path}, $.steps[1]")
    assert "'sub.json' does not exist" in error.got
    sub = write(tmp_path / "sub.json", atif({"step_id": 1, "source": "user", "message": "hi"}))
    assert len(convert(path)) == 1
    assert len(convert(sub, path)) == 1


def test_embedded_sub_agents_are_read_once_nested_or_not_referred_to_at_all(tmp_path):
    inner = atif(agent_step(1, [5], [6]), name="inner", trajectory_id="i")
    ref = {"trajectory_id": "i"}
    sub = atif(refers(1, ref), name="sub", trajectory_id="s", subagent_trajectories=[inner])
    loose = atif(agent_step(1, [7], [8]), name="loose", trajectory_id="l")
    main = atif(
        refers(1, {"trajectory_id": "s"}, {"trajectory_id": "s"}),
        agent_step(2, [1], [2]),
        subagent_trajectories=[sub, loose],
    )
    rows = convert(write(tmp_path / "a.json", main))
    assert rows["agent"].to_list() == ["loose", "inner", "main"]
    place = "$.subagent_trajectories[0].subagent_trajectories[0].steps[0]"
    assert rows["source"][1].endswith(place)


@pytest.mark.parametrize("minor", range(9))
def test_every_version_is_read_and_an_unknown_one_refused(tmp_path, minor):
    path = write(tmp_path / "a.json", atif(agent_step(1, [1], [2]), version=f"1.{minor}"))
    assert len(convert(path)) == 1
    assert refusal(write(path, atif(version="1.9"))).rule == "atif_version"


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (atif(agent_step(1, [1], [2]), agent_step(3, [1], [2])), "atif_step_id"),
        (atif(agent_step(1, [1], [2]) | {"source": "robot"}), "record_type"),
        (atif(agent_step(1, [-1], [2])), "token_range"),
        (atif(agent_step(1, [2**31], [2])), "token_range"),
        (atif(subagent_trajectories=[atif(trajectory_id="a")] * 2), "atif_duplicate_id"),
        (atif(), "no_token_ids"),
        ({"schema_version": 3}, "harbor_input"),
        ({"hello": "world"}, "harbor_input"),
        ([1, 2], "harbor_input"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, record, rule):
    assert refusal(write(tmp_path / "a.json", record)).rule == rule


def test_recognizes_its_inputs_and_nothing_else(tmp_path, trial):
    directory = write_trial(tmp_path / "jobs" / "job", trial("t"), atif(agent_step(1, [1], [2])))
    known = (directory, directory.parent, directory.parent.parent, directory / "result.json")
    assert all(ADAPTER.recognizes(Start(path)) for path in known)
    other = write(tmp_path / "other" / "result.json", {"session": "a/0", "schema_version": "1"})
    unknown = (other, other.parent, tmp_path / "none", Path(__file__))
    assert not any(ADAPTER.recognizes(Start(path)) for path in unknown)
