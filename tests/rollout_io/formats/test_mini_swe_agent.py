import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.swe_agent import MINI, UNREADABLE
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with
from tests.helpers.adapter_helpers import read_all as read_noted
from tests.helpers.text_log_helpers import (
    check_survives,
    found_in,
    mutated,
    read_one,
    roles,
    save,
)

BASH = {"name": "bash", "arguments": '{"command":"ls"}'}
TOOL_CALL = {"id": "c1", "type": "function", "function": BASH}


def response(ids=None, **fields):
    choice = {"index": 0, "finish_reason": "stop", "message": {"content": "a"}}
    if ids is not None:
        choice["provider_specific_fields"] = {"token_ids": ids}
    return {"id": "r", "choices": [choice], **fields}


def assistant(content="a", answer=None, **fields):
    extra = {} if answer is None else {"extra": {"response": answer}}
    return {"role": "assistant", "content": content, **extra, **fields}


def v2(*messages, instance_id="astropy__astropy-1", status="Submitted", **info):
    start = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    end = {"role": "exit", "content": "diff", "extra": {"exit_status": status}}
    stats = {"instance_cost": 0.5, "api_calls": len(messages)}
    config = {"model": {"model_name": "m", "model_kwargs": {"temperature": 0.7}}}
    info = {"exit_status": status, "model_stats": stats, "config": config, **info}
    found = {"info": info, "messages": [*start, *messages, end]}
    named = {} if instance_id is None else {"instance_id": instance_id}
    return {**found, "trajectory_format": "mini-swe-agent-1.1", **named}


@pytest.fixture
def logs(harness_logs):
    return harness_logs / "mini_swe_agent"


def test_a_real_run_of_the_first_version_is_one_conversation_without_a_reward(logs):
    path = logs / "hello-world.v1.13.4.traj.json"
    runs, _, about = found_in(MINI, path)
    assert runs[0].labels["file"] == "hello-world.v1.13.4"
    assert about["groups"].startswith("inferred: ")
    found = read_one(MINI, path)
    (conversation,) = found.steps
    assert roles(conversation) == "suauaua"
    assert conversation.messages[3]["content"] == "<returncode>0</returncode>\n<output>\n</output>"
    assert (conversation.stop_reason, conversation.temperature) == ("Submitted", 0.0)
    assert (found.reward, found.error) == (None, None)
    assert found.metrics == {"instance_cost": 0.010520999999999999, "api_calls": 3.0}
    assert found.user_values["exit_status"] == "Submitted"


def unused(text="Use the tool.", **extra):
    """The error message in place of an answer that the program could not use."""
    extra = {"interrupt_type": "FormatError", "cost": 0.0, **extra}
    return {"role": "user", "content": text, "extra": extra}


ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}


@pytest.mark.parametrize(
    "extra",
    [
        {
            "response": response()
            | {"choices": [{"message": {"role": "assistant", "content": "a"}}]}
        },
        {"response": {"object": "response", "output": [ITEM], "id": "r"}},
        {"model_response": "a", "n_actions": 0},
        {"response": "ModelResponse(...)", "model_response": "a"},
    ],
)
def test_an_answer_with_a_format_error_trains_and_its_prompt_ends_before_the_error(extra, tmp_path):
    record = v2(assistant("first"), unused(**extra), unused(**extra), status="RepeatedFormatError")
    found = read_one(MINI, save(tmp_path / "a.traj.json", record))
    texts = [[m["content"] for m in step.messages] for step in found.steps]
    assert texts == [["s", "u", "first", "a"], ["s", "u", "first", "Use the tool.", "a"]]
    assert [step.num_given for step in found.steps] == [2, 4]
    assert [step.stop_reason for step in found.steps] == [None, "RepeatedFormatError"]


def test_an_answer_with_a_format_error_is_exact_where_the_engine_gave_its_ids(tmp_path):
    wrong = response([7, 8]) | {"prompt_token_ids": [1, 2, 3]}
    wrong["choices"][0]["message"]["role"] = "assistant"
    right = response([9]) | {"prompt_token_ids": [1, 2, 4]}
    record = v2(unused(response=wrong), assistant("a", right))
    found = read_one(MINI, save(tmp_path / "a.traj.json", record))
    assert [json.loads(bytes(step.response_ids)) for step in found.steps] == [[7, 8], [9]]


def test_an_answer_with_a_format_error_that_is_not_in_the_log_is_counted(tmp_path):
    record = v2(assistant("first"), unused(response="ModelResponse(...)"), assistant("last"))
    ((_, found),), _ = read_noted(MINI, save(tmp_path / "a.traj.json", record))
    assert (found.notes, roles(found.steps[0])) == ({UNREADABLE: 1}, "suaua")


def test_instances_are_stated_or_named_by_directory_and_file(tmp_path):
    stated = save(tmp_path / "x.traj.json", v2(assistant()))
    record = v2(assistant(), instance_id=None)
    named = save(tmp_path / "shop-1" / "shop-1.traj.json", record)
    marked = save(tmp_path / "runs" / "o__r-1.traj.json", v2(assistant("b"), instance_id=None))
    alone = save(tmp_path / "last_run.traj.json", v2(assistant("c"), instance_id=None))
    runs, _, about = found_in(MINI, stated, named, marked, alone)
    assert [run.instance_id for run in runs] == [
        "astropy__astropy-1",
        "shop-1",
        "o__r-1",
        str(alone),
    ]
    assert about["groups"].startswith("inferred")
    assert found_in(MINI, stated)[2] == {}


def test_what_changed_the_distribution_is_told_of_exact_calls(tmp_path):
    arguments = {"temperature": 0.7, "top_k": 20, "extra_body": {"repetition_penalty": 1.1}}
    config = {"model": {"model_name": "m", "model_kwargs": arguments}}
    run = v2(assistant("a", response([7], prompt_token_ids=[1])), config=config)
    (step,) = read_one(MINI, save(tmp_path / "a.traj.json", run)).steps
    assert (step.temperature, step.top_k) == (0.7, 20)
    assert step.sampling_extra == '{"repetition_penalty":1.1}'


def test_exact_ids_of_all_calls_are_steps_of_their_own(tmp_path):
    first = response([7, 8], prompt_token_ids=[1, 2])
    second = response([9], prompt_token_ids=[1, 2, 7, 8, 3])
    record = v2(assistant("a", first), {"role": "user", "content": "o"}, assistant("b", second))
    path = save(tmp_path / "a.traj.json", record)
    _, table = convert_with(MINI, [path], tmp_path)
    assert table.column("prompt_token_ids").to_pylist() == [[1, 2], [1, 2, 7, 8, 3]]
    assert table.column("response_ids").to_pylist() == [[7, 8], [9]]
    assert table.column("stop_reason").to_pylist() == ["stop", "Submitted"]
    assert table.column("token_source").to_pylist() == ["engine"] * 2
    assert [len(json.loads(text)) for text in table.column("messages").to_pylist()] == [2, 4]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "no API response"),
        (response(), "a response for which no ids were requested"),
        (response([], prompt_token_ids=[1]), "a response whose ids are null or empty"),
    ],
)
def test_ids_of_some_calls_alone_are_refused_by_the_call_without(tmp_path, answer, reason):
    whole = response([7], prompt_token_ids=[1])
    path = save(tmp_path / "a.traj.json", v2(assistant("a", whole), assistant("b", answer)))
    with pytest.raises(RolloutError, match=rf"messages\[3\].*1 of 2 calls.*{reason}") as found:
        read_one(MINI, path)
    assert found.value.rule == "no_token_ids"


def test_responses_objects_are_messages(tmp_path):
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"type": "message", "content": [{"type": "output_text", "text": "I look."}]}
    call = {"type": "function_call", "call_id": "c1", **BASH}
    answer = {"object": "response", "output": [thought, said, call], "extra": {"actions": []}}
    result = {"type": "function_call_output", "call_id": "c1", "output": "files"}
    found = read_one(MINI, save(tmp_path / "a.traj.json", v2(answer, result, assistant("done"))))
    messages = found.steps[0].messages
    assert messages[2]["reasoning_content"] == "hm"
    assert messages[2]["content"] == "I look."
    assert messages[2]["tool_calls"] == [TOOL_CALL]
    assert messages[3] == {"role": "tool", "content": "files", "tool_call_id": "c1"}


def test_a_limit_is_no_failure_and_an_exception_is_one(tmp_path):
    limited = v2(assistant(), status="LimitsExceeded")
    found = read_one(MINI, save(tmp_path / "a.traj.json", limited))
    assert (found.error, found.steps[0].stop_reason) == (None, "LimitsExceeded")
    crashed = v2(status="APIError", traceback="Traceback\nAPIError: down", exception_str="down")
    found = read_one(MINI, save(tmp_path / "b.traj.json", crashed))
    assert (found.error, list(found.steps)) == ("APIError: down", [])


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "json_document"),
        (b'{"messages": [', "json_document"),
        (b'{"messages": [NaN]}', "json_document"),
        (b'{"messages": "\xff"}', "json_document"),
        (b'{"messages": 1}', "record_type"),
        (b'{"messages": ' + b"[" * 10**5, "json_document"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "lfs_pointer"),
    ],
)
def test_a_damaged_document_is_refused_by_name(tmp_path, content, rule):
    path = tmp_path / "a.traj.json"
    path.write_bytes(content)
    runs, (rejected,), _ = found_in(MINI, path)
    assert not runs
    assert rejected.error.rule == rule


DOCUMENT = json.dumps(
    v2(
        assistant("a", response([7], prompt_token_ids=[1]), tool_calls=[TOOL_CALL]),
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "o"}]},
        assistant("b", response([8], prompt_token_ids=[1, 7, 2])),
    )
).encode()


@given(st.data())
def test_no_damage_gives_anything_but_rows_or_named_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "a.traj.json"
    path.write_bytes(data.draw(mutated(DOCUMENT)))
    check_survives(MINI, path)
