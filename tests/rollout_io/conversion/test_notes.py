"""What rows lack although the log has it is counted through every step of a conversion."""

import json

import pytest

from rollout_io import convert
from rollout_io.conversion.summary import Summary
from rollout_io.formats.claude_code import ADAPTER
from rollout_io.formats.parsing.messages import NO_SYSTEM, NO_TOOLS
from tests.helpers.adapter_helpers import convert_with, write_lines
from tests.helpers.line_log_helpers import save_template


def test_counts_of_parts_add_up_and_are_printed():
    one, other = Summary(notes={"images": 2}), Summary(notes={"images": 1, "forks": 3})
    one.merge(Summary.decode(json.loads(json.dumps(other.encode()))))
    assert one.to_dict()["notes"] == {"images": 3, "forks": 3}
    assert "images: 3" in one.text("ds")


@pytest.mark.slow
@pytest.mark.model
def test_a_finished_conversion_still_knows_the_counts(tmp_path, smollm2_dir):
    def line(uuid, role, content, parent):
        message = {"role": role, "content": content}
        return {"type": role, "sessionId": "s", "uuid": uuid, "parentUuid": parent} | {
            "message": message
        }

    path = write_lines(
        tmp_path / "s.jsonl",
        line("1", "user", "Hi.", None),
        line("2", "assistant", [{"type": "text", "text": "Ho."}], "1"),
        line("3", "user", [{"type": "image"}], "2"),
        line("4", "assistant", [{"type": "text", "text": "A cat."}], "3"),
    )
    choices = {"tokenizer": str(smollm2_dir), "chat_template": save_template(tmp_path)}
    expected = {"answers after content of type 'image'": 1, NO_SYSTEM: 1, NO_TOOLS: 1}
    done, table = convert_with(ADAPTER, [path], tmp_path, **choices)
    assert done.summary.notes == expected
    assert table["response_text"].to_pylist() == ["Ho."]
    for was_done in (False, True):
        again = convert([path], tmp_path / "again", **choices)
        assert (again.was_done, again.summary.notes) == (was_done, expected)
