"""What counts as a failed tool call, in the words of tools and harnesses."""

import pytest

from rollout_io.dataset.trajectory_facts import has_failed


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("Exit code 1\n===== FAILURES =====", True),
        ("Exit code: 127\nWall time: 0.1 seconds\nOutput:\nsh: foo: not found", True),
        ("Exit code: 0\nWall time: 0.1 seconds\nOutput:\n0", False),
        ("Exit code 0\n1 failed", False),
        ('{"exit_code":2,"output":""}', True),
        ("<tool_use_error>File has not been read yet.</tool_use_error>", True),
        ("Traceback (most recent call last):", True),
        ("The exit code is 1 if it fails", False),
        ('{"error": null, "output": "42"}', False),
        ('{"error_count": 0}', False),
        ('{"output": "42", "error": "boom"}', True),
        ('{"output": "x", "exit_code": 1}', True),
        ('{"success": false, "msg": "bad"}', True),
        ("Errors: 0", False),
        ("Exceptions are listed below", False),
        ("Command: ls /none\nExit Code: 1\nSignal: (none)", True),
        ("Wall time: 0.1 seconds\nProcess exited with code 0\nOutput:", False),
        ("Wall time: 0.1 seconds\nProcess exited with code 2\nOutput:", True),
        ("", False),
        (None, False),
    ],
)
def test_a_result_fails_by_its_first_words(result, failed):
    assert has_failed({"role": "tool", "content": result}) is failed


def test_a_mark_counts_whatever_the_text_says():
    assert has_failed({"role": "tool", "content": "done", "is_error": True})
    assert has_failed({"role": "tool", "content": "done", "status": "error"})
