"""Several attempts under one name."""

import pytest

import rollout_io
from tests.rollout_io.formats.test_calls import call, write


@pytest.mark.parametrize(
    ("prompts", "num_restarted"),
    [
        ([[1, 2], [1, 2, 3, 4], [1, 2], [1, 2, 3, 5], [1, 2]], 1),
        ([[1, 2], [1, 2], [1, 2, 3, 4]], 0),
        ([[1, 2], [1, 2, 3, 4], [1, 5]], 0),
    ],
)
def test_attempts_that_begin_again_under_one_session_are_counted(tmp_path, prompts, num_restarted):
    records = [call("a/0", prompt, [3], time=time) for time, prompt in enumerate(prompts)]
    records.append(call("b/0", [1, 2], [3]))
    summary = rollout_io.convert(
        [write(tmp_path / "calls.jsonl", records)], tmp_path / "ds"
    ).summary
    assert summary.num_restarted == num_restarted
    assert ("in which the first prompt recurs" in summary.text("ds")) == bool(num_restarted)
