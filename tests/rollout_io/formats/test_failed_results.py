"""A tool's result that a log marks as failed is a failed call in the messages, whatever its text says."""

import pytest

from rollout_io.dataset.trajectory_facts import has_failed
from rollout_io.formats.detect import load_formats
from tests.helpers.adapter_helpers import read_all
from tests.helpers.session_writers import SESSION_WRITERS

FORMATS = load_formats().adapters


def claude_code(log, failed):
    call = {"type": "tool_use", "id": "c", "name": "ls", "input": {}}
    log.answer("")
    log.lines[-1]["message"]["content"] = [call]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "nothing"}
    log.user([result | ({"is_error": True} if failed else {})])


def kimi_cli(log, failed):
    call = {"type": "tool.call", "stepUuid": "k", "toolCallId": "c", "name": "ls", "args": {}}
    log.line("append_loop_event", event={"type": "step.begin", "uuid": "k"})
    log.line("append_loop_event", event=call)
    result = {"output": "nothing"} | ({"isError": True} if failed else {})
    log.line(
        "append_loop_event", event={"type": "tool.result", "toolCallId": "c", "result": result}
    )


def copilot_cli(log, failed):
    call = {"toolCallId": "c", "name": "ls", "arguments": {}}
    log.line("assistant.message", content="", toolRequests=[call])
    result = {"error": {"message": "nothing"}} if failed else {"result": {"content": "nothing"}}
    log.line("tool.execution_complete", toolCallId="c", success=not failed, **result)


def pi(log, failed):
    call = {"type": "toolCall", "id": "c", "name": "ls", "arguments": {}}
    log.message("assistant", "", stopReason="toolUse")
    log.lines[-1]["message"]["content"] = [call]
    log.message("toolResult", "nothing", toolCallId="c", isError=failed)


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("calls", [claude_code, kimi_cli, copilot_cli, pi])
def test_the_mark_of_a_failed_call_is_kept(calls, failed, tmp_path):
    log = SESSION_WRITERS[calls.__name__](tmp_path)
    log.start()
    log.user("u1")
    calls(log, failed)
    log.answer("a2")
    runs, rejected = read_all(FORMATS[calls.__name__], *log.write())
    assert rejected == []
    results = [
        message
        for _, trajectory in runs
        for step in trajectory.steps[-1:]
        for message in step.messages
        if message["role"] == "tool"
    ]
    assert [result["content"].rpartition("\n")[2] for result in results] == ["nothing"]
    assert [has_failed(result) for result in results] == [failed]
