"""The harness for Harbor's trials: its outcomes are those of SkyRL's Harbor generator."""

from types import SimpleNamespace

import pytest

from examples import harbor_trial as EXAMPLE
from pipelines.filters import RAN_OUT_OF_TOKENS
from pipelines.generation.tasks import read_tasks
from pipelines.harness.launchers import outcome_of as checked
from schemas.errors import RolloutError


def result(kind=None, rewards=None, turns=3):
    exception = None
    if kind is not None:
        exception = SimpleNamespace(exception_type=kind, exception_message="because")
    return SimpleNamespace(
        exception_info=exception,
        agent_result=SimpleNamespace(metadata={"n_episodes": turns}),
        verifier_result=None if rewards is None else SimpleNamespace(rewards=rewards),
    )


def test_a_trial_has_the_reward_of_its_verifier():
    found = checked(EXAMPLE.outcome_of(result(rewards={"reward": 0.5})), "t")
    assert (found.reward, found.error) == (0.5, None)
    assert found.metrics == {"num_turns": 3.0, "context_length_exceeded": 0.0}


def test_a_trial_that_exceeds_the_context_has_reward_0_whatever_its_verifier_says():
    for rewards in (None, {"reward": 1.0}):
        found = checked(EXAMPLE.outcome_of(result("ContextLengthExceededError", rewards)), "t")
        assert (found.reward, found.error) == (0.0, None)
        assert found.metrics["context_length_exceeded"] == 1.0
        assert found.stop_reason in RAN_OUT_OF_TOKENS


def test_an_error_of_the_agent_keeps_the_reward_of_the_verifier():
    found = checked(EXAMPLE.outcome_of(result("NonZeroAgentExitCodeError", {"reward": 1.0})), "t")
    assert (found.reward, found.error) == (1.0, None)


@pytest.mark.parametrize(
    ("kind", "rewards"),
    [
        ("AgentTimeoutError", {"reward": 1.0}),
        ("RewardFileNotFoundError", None),
        ("NonZeroAgentExitCodeError", {}),
    ],
)
def test_time_outs_and_failures_without_a_verdict_have_no_reward(kind, rewards):
    found = checked(EXAMPLE.outcome_of(result(kind, rewards)), "t")
    assert found.reward is None
    assert found.error == f"{kind}: because"


def test_a_trial_without_a_reward_has_failed():
    for rewards in (None, {}, {"other": 1.0}):
        found = checked(EXAMPLE.outcome_of(result(rewards=rewards)), "t")
        assert found.reward is None
        assert "verifier" in (found.error or "")


def test_a_trial_has_the_endpoint_and_the_other_settings_of_its_file():
    given = {"agent": {"kwargs": {"max_turns": 9}}, "environment": {"type": "docker"}}
    made = EXAMPLE.trial_settings(given, "/tasks/a", "http://h/v1", "models/policy")
    assert made["task"] == {"path": "/tasks/a"}
    assert made["environment"] == {"type": "docker"}
    assert made["agent"]["model_name"] == "hosted_vllm/policy"
    kwargs = {"enable_summarize": False, "max_turns": 9, "api_base": "http://h/v1"}
    assert made["agent"]["kwargs"] == kwargs
    assert given == {"agent": {"kwargs": {"max_turns": 9}}, "environment": {"type": "docker"}}


def test_task_directories_are_a_dataset(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "instruction.md").write_text(f"Do {name}.", encoding="utf-8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("x")
    tasks = read_tasks(str(tmp_path), 2)
    assert [task.trajectory_id for task in tasks] == ["a_0", "a_1", "b_0", "b_1"]
    assert tasks[0].prompt == [{"role": "user", "content": "Do a."}]
    assert tasks[0].extras == {"path": str(tmp_path.resolve() / "a")}
    (task,) = read_tasks(str(tmp_path / "b"), 1)
    assert task.instance_id == "b"
    with pytest.raises(RolloutError, match=r"instruction\.md"):
        read_tasks(str(tmp_path / "notes"), 1)
