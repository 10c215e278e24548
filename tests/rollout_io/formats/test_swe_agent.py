import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.swe_agent import ADAPTER
from schemas.errors import RolloutError
from tests.helpers.text_log_helpers import check_survives, found_in, mutated, read_one, roles, save

CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


def message(role, content, agent="main", **fields):
    return {"role": role, "content": content, "agent": agent, **fields}


def step(response, query, **fields):
    return {"response": response, "query": query, "action": "ls", "observation": "o", **fields}


def trajectory(steps, history, status="submitted", **fields):
    info = {"exit_status": status, "model_stats": {"api_calls": len(steps), "instance_cost": None}}
    return {"trajectory": steps, "history": history, "info": info, "environment": "e", **fields}


SYSTEM = message("system", "s", message_type="system_prompt")
TASK = message("user", "t", message_type="observation")
ONE = message("assistant", "one", message_type="action", tool_calls=[CALL])
SEEN = message("tool", "long output", message_type="observation", tool_call_ids=["c1"])
TWO = message("assistant", "two", message_type="action")
CUT = message("tool", "Old output: (1 line omitted)", tool_call_ids=["c1"])
THREE = message("assistant", "three", message_type="action")
HISTORY = [SYSTEM, TASK, ONE, SEEN, TWO, TASK, THREE]


@pytest.fixture
def logs(harness_logs):
    return harness_logs / "swe_agent"


def read(tmp_path, document):
    return read_one(ADAPTER, save(tmp_path / "a.traj", document))


@pytest.mark.parametrize(
    ("name", "instance", "expected", "agent", "status"),
    [
        ("function_calling_simple", None, "su" + "at" * 4 + "a", "main", None),
        (
            "marshmallow-1867.default",
            "marshmallow-code__marshmallow-1867",
            "su" + "au" * 10 + "a",
            "primary",
            "submitted",
        ),
        (
            "swe-agent__test-repo-i1",
            "swe-agent__test-repo-i1",
            "suu" + "au" * 4 + "a",
            "primary",
            "submitted",
        ),
    ],
)
def test_real_runs_without_prompts_are_their_history(logs, name, instance, expected, agent, status):
    path = logs / f"{name}.traj"
    (run,), _, _ = found_in(ADAPTER, path)
    assert run.instance_id == (instance or str(path))
    found = read_one(ADAPTER, path)
    (conversation,) = found.steps
    assert (roles(conversation), conversation.agent) == (expected, agent)
    assert (conversation.stop_reason, found.user_values.get("exit_status")) == (status, status)
    assert found.reward is None


def test_prompts_that_extend_each_other_are_one_context(tmp_path):
    steps = [step("one", HISTORY[:2]), step("two", HISTORY[:4]), step("three", HISTORY[:6])]
    (conversation,) = read(tmp_path, trajectory(steps, HISTORY)).steps
    assert roles(conversation) == "suataua"
    assert conversation.messages[2]["tool_calls"] == [CALL]


def test_messages_recorded_after_the_step_are_cut_before_its_response(tmp_path):
    ends = {"one": 4, "two": 6, "three": 7}
    before = [step(text, HISTORY[:n]) for text, n in zip(ends, (2, 4, 6), strict=True)]
    after = [step(text, None, messages=HISTORY[:n]) for text, n in ends.items()]
    (expected,) = read(tmp_path, trajectory(before, HISTORY)).steps
    assert read(tmp_path, trajectory(after, HISTORY)).steps == [expected]


def test_a_response_that_the_model_gave_before_stays_in_the_prompt(tmp_path):
    history = [SYSTEM, TASK, TWO, TASK, TWO, TASK, TWO]
    steps = [step("two", history[:n]) for n in (2, 4, 6)]
    (conversation,) = read(tmp_path, trajectory(steps, history)).steps
    assert roles(conversation) == "suauaua"


def test_marks_for_the_cache_do_not_break_a_context(tmp_path):
    marked = [{"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}]
    steps = [step("one", [SYSTEM, TASK | {"content": marked}]), step("two", HISTORY[:4])]
    assert len(read(tmp_path, trajectory(steps, HISTORY)).steps) == 1


def test_a_history_that_was_cut_is_a_new_context(tmp_path):
    cut = [SYSTEM, TASK, ONE, CUT, TWO, TASK]
    steps = [step("one", HISTORY[:2]), step("two", HISTORY[:4]), step("three", cut)]
    first, second = read(tmp_path, trajectory(steps, HISTORY)).steps
    assert (roles(first), roles(second)) == ("suata", "suataua")
    assert second.messages[3]["content"].startswith("Old output")
    assert [first.stop_reason, second.stop_reason] == [None, "submitted"]
    assert [first.num_given, second.num_given] == [2, 6]
    first, second = read(tmp_path, trajectory(steps[::2], HISTORY)).steps
    assert (roles(first), roles(second), second.num_given) == ("sua", "suataua", 6)


def test_a_step_that_called_no_model_is_no_call(tmp_path):
    steps = [step("one", HISTORY[:2]), step("", [{}], action="submit")]
    (conversation,) = read(tmp_path, trajectory(steps, HISTORY)).steps
    assert roles(conversation) == "sua"


def test_a_response_without_its_prompt_is_refused(tmp_path):
    steps = [step("one", HISTORY[:2]), step("two", [])]
    with pytest.raises(RolloutError, match=r".*trajectory\[1\].*\[no_prompt\]"):
        read(tmp_path, trajectory(steps, HISTORY))


def test_each_agent_of_a_history_is_a_context(tmp_path):
    other = [message("user", "help", "sub"), message("assistant", "done", "sub")]
    record = trajectory([], [SYSTEM, TASK, ONE, *other, SEEN, TWO])
    main, sub = read(tmp_path, record).steps
    assert (main.agent, roles(main)) == ("main", "suata")
    assert (sub.agent, roles(sub)) == ("sub", "ua")


def test_what_a_demonstration_says_is_no_call(tmp_path):
    demo = [message("user", "d", is_demo=True), message("assistant", "d", is_demo=True)]
    record = trajectory([], [SYSTEM, *demo, TASK, ONE])
    found = read(tmp_path, record)
    assert len(found.steps) == 1
    with pytest.raises(RolloutError, match="no_calls"):
        read(tmp_path, trajectory([], [SYSTEM, *demo]))


def test_a_crash_is_a_failure_and_a_used_up_budget_is_not(tmp_path):
    crashed = read(tmp_path, trajectory([], [], "exit_environment_error"))
    assert (crashed.error, list(crashed.steps)) == ("exit_environment_error", [])
    limited = read(tmp_path, trajectory([], HISTORY, "submitted (exit_cost)"))
    assert (limited.error, limited.user_values["exit_status"]) == (None, "submitted (exit_cost)")


def test_a_replay_configuration_may_be_a_text(tmp_path):
    config = json.dumps({"problem_statement": {"id": "o__r-7"}})
    path = save(tmp_path / "a.traj", trajectory([], HISTORY, replay_config=config))
    assert found_in(ADAPTER, path)[0][0].instance_id == "o__r-7"


STEPS = [step("one", HISTORY[:2]), step("two", HISTORY[:4]), step("three", HISTORY[:6])]
DOCUMENT = json.dumps(trajectory(STEPS, HISTORY)).encode()


@given(st.data())
def test_no_damage_gives_anything_but_rows_or_named_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "a.traj"
    path.write_bytes(data.draw(mutated(DOCUMENT)))
    check_survives(ADAPTER, path)


def test_an_answer_that_says_the_same_as_an_earlier_one_is_its_own(tmp_path):
    again = message("assistant", "one", agent="reviewer", message_type="action")
    history = [SYSTEM, TASK, ONE, SEEN, again, TASK]
    steps = [step("one", [SYSTEM, TASK]), step("one", [SYSTEM, TASK, ONE, SEEN])]
    contexts = read(tmp_path, trajectory(steps, history)).steps
    answers = [context.messages[-1] for context in contexts]
    assert [answer["content"] for answer in answers] == ["one", "one"]
    assert ["tool_calls" in answer for answer in answers] == [True, False]
