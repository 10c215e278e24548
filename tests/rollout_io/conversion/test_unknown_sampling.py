"""A conversion counts the rows whose requests left the sampling to the engine's defaults."""

import json

import pytest

from rollout_io.cli.main import run

RESPONSE = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {"index": 0, "message": {"content": "a"}, "token_ids": [3], "finish_reason": "stop"}
    ],
}
FULL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([{}, {}], "2 rows without a recorded temperature or top_p or top_k: "),
        ([FULL, {"temperature": 0.5, "top_p": 1.0}], "1 row without a recorded top_k: "),
        ([FULL, FULL], None),
    ],
)
def test_rows_without_recorded_sampling_are_noted_with_their_count(fields, said, tmp_path, capfd):
    log = tmp_path / "x.calls.jsonl"
    calls = [
        {"session": f"a/{i}", "request": {"messages": []} | given, "response": RESPONSE}
        for i, given in enumerate(fields)
    ]
    log.write_text("".join(json.dumps(call) + "\n" for call in calls))
    assert run(["convert", str(log), "--format", "calls", "--out", str(tmp_path / "ds")]) == 0
    printed = capfd.readouterr().err
    assert ("without a recorded" in printed) == (said is not None)
    assert (said or "") in printed
