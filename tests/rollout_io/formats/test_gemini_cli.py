import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.formats.gemini_cli import ADAPTER
from tests.helpers.adapter_helpers import planned, read_all
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_records
from tests.helpers.text_log_helpers import mutated, read_one, save


def response(**fields):
    return {"functionResponse": {"id": "a", "name": "ls", "response": fields}}


def call(id, result, **args):
    return {"id": id, "name": "ls", "args": args, "result": result, "status": "success"}


def gemini(content, **fields):
    return {"id": "2", "type": "gemini", "content": content} | fields


def session(*messages, **fields):
    user = {"id": "1", "type": "user", "content": "List both."}
    return {"sessionId": "s", "projectHash": "p", "messages": [user, *messages]} | fields


def test_parallel_calls_hold_their_results_and_thoughts_become_reasoning(tmp_path):
    thoughts = [{"subject": "Listing", "description": "Two calls.", "timestamp": "x"}]
    calls = [call("a", [response(output="x")], dir="a"), call("b", [response(error="none")])]
    calls.append(call("c", None))
    document = session(
        gemini("", thoughts=thoughts, toolCalls=calls, model="g-1"), gemini("Done.", model="g-2")
    )
    found = read_one(ADAPTER, save(tmp_path / "s.json", document))
    (step,) = found.steps
    prompt, reply, first, second, end = step.messages
    assert prompt == {"role": "user", "content": "List both."}
    assert reply["reasoning_content"] == "Listing\nTwo calls."
    assert [c["id"] for c in reply["tool_calls"]] == ["a", "b", "c"]
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {"dir": "a"}
    assert first == {"role": "tool", "tool_call_id": "a", "content": "x"}
    assert second == {"role": "tool", "tool_call_id": "b", "content": "none"}
    assert end == {"role": "assistant", "content": "Done."}
    assert found.user_values == {"model": "g-2"}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("x", "x"),
        ({"text": "x"}, "x"),
        ([{"text": "x"}, "y"], "x\ny"),
        ([response(rows=3)], '{"rows":3}'),
        ([{"inlineData": {}}], [{"type": "data"}]),
        (
            [{"inlineData": {"data": "AAAA", "mimeType": "image/png"}}],
            [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                }
            ],
        ),
        ([{"text": "x"}, {"fileData": {}}], [{"type": "text", "text": "x"}, {"type": "data"}]),
    ],
)
def test_the_result_of_a_tool_is_its_text_and_what_is_none_is_named(result, text, tmp_path):
    document = session(gemini("", toolCalls=[call("a", result)]))
    content = read_one(ADAPTER, save(tmp_path / "s", document)).steps[0].messages[2]["content"]
    assert (content.replace(" ", "") if isinstance(content, str) else content) == text


def test_messages_for_people_are_left_out_and_unknown_kinds_refused(tmp_path):
    notes = [{"type": kind, "content": "x"} for kind in ("info", "warning", "error")]
    found = read_one(ADAPTER, save(tmp_path / "a", session(*notes, gemini("Done."))))
    assert [m["role"] for m in found.steps[0].messages] == ["user", "assistant"]
    odd = save(tmp_path / "b", session({"type": "telepathy", "content": "x"}, gemini("Done.")))
    _, ((_, error, _),) = read_all(ADAPTER, odd)
    assert error.rule == "record_type"
    assert "`$.messages[1].type`" in error.got


def test_a_session_in_which_the_model_wrote_nothing_has_no_calls(tmp_path):
    _, ((_, error, _),) = read_all(ADAPTER, save(tmp_path / "s", session()))
    assert error.rule == "no_calls"


def test_a_session_is_its_own_instance_and_is_converted_once(tmp_path):
    files = [save(tmp_path / n, session(gemini(n))) for n in "ab"]
    plan = planned(ADAPTER, *files)
    assert [run.instance_id for run in plan.runs] == ["s"]
    assert plan.runs[0].labels == {"session": "s", "project": "p"}
    assert [r.error.rule for r in plan.rejected] == ["unique_trajectory"]
    assert plan.about["groups"].startswith("inferred: each session")


def test_messages_with_roles_are_no_session_of_gemini(tmp_path):
    document = {"sessionId": "s", "messages": [{"role": "user", "content": "x"}]}
    assert not ADAPTER.recognizes(save(tmp_path / "s", document))


def test_the_real_session_is_read(harness_logs):
    path = harness_logs / "gemini_cli" / "gemini-cli-trajectory.json"
    assert ADAPTER.recognizes(path)
    ((run, found),), rejected = read_all(ADAPTER, path)
    assert rejected == []
    assert run.instance_id == "cdd63974-c2a3-4f1c-931d-cce1db22ec03"
    assert [(m["role"], m["content"][:24]) for m in found.steps[0].messages] == [
        ("user", "Create a file called hel"),
        ("assistant", "Okay, I've created the f"),
    ]
    assert found.user_values == {"model": "gemini-2.0-flash"}


CALLS = [call("a", [response(output="x")], n=1), call("b", [{"text": "x"}])]
DOCUMENT = json.dumps(
    session(gemini("x", thoughts=[{"subject": "x"}], toolCalls=CALLS), gemini("y", model="g"))
).encode()


@given(mutated(DOCUMENT))
@settings(deadline=None, max_examples=examples(150))
def test_no_damage_loses_the_record_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.json"
        path.write_bytes(content)
        check_records(ADAPTER, path, 1)
