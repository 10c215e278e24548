"""The turns of a log that became one row are those of the log."""

import json

import rollout_io
from rollout_io import convert, scan
from rollout_io.dataset.trajectory_facts import num_steps


def test_a_conversation_of_five_answers_in_one_row_has_five_turns(tmp_path, smollm2_dir):
    turns = [{"role": "user", "content": "Count."}]
    for number in range(5):
        turns += [
            {"role": "assistant", "content": f"{number}."},
            {"role": "user", "content": "On."},
        ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns[:-1]}) + "\n")
    convert([tmp_path / "a.jsonl"], tmp_path / "ds", tokenizer=str(smollm2_dir))
    rows = scan(tmp_path / "ds")
    assert rollout_io.read(tmp_path / "ds").num_rows == 1
    assert rows.select(num_steps(rows)).collect().item() == 5
