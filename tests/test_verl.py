import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.adapters.verl import ADAPTER
from schemas.errors import RolloutError
from tests.adapter_helpers import convert_with, planned, write_lines
from tests.line_log_helpers import check_lines, mutated_lines


def sample(**fields):
    made = {"input": "user\n1 + 5?\nassistant\n", "output": "6", "gts": "6", "score": 1.0}
    return made | {"step": 3, "acc": True} | fields


def test_decoded_text_is_recognized_and_refused_by_name_with_a_way_to_tokens(tmp_path):
    path = write_lines(tmp_path / "3.jsonl", sample(), sample(gts=None, request_id="x"))
    assert ADAPTER.recognizes(path)
    plan = planned(ADAPTER, path)
    assert plan.runs == []
    assert [r.error.rule for r in plan.rejected] == ["text_without_roles"] * 2
    error = plan.rejected[1].error
    assert error.where == f"{path}:2"
    assert "special tokens were skipped" in error.got
    assert "return_token_ids" in error.hint


def test_a_dump_of_decoded_text_makes_no_dataset(tmp_path):
    path = write_lines(tmp_path / "3.jsonl", sample())
    with pytest.raises(RolloutError, match=r"no_calls.*text_without_roles"):
        convert_with(ADAPTER, [path], tmp_path, on_error="skip")
    assert not (tmp_path / "ds").exists() or not list((tmp_path / "ds").glob("*.parquet"))


@pytest.mark.parametrize("missing", ["input", "output", "score", "step"])
def test_lines_without_its_fields_are_none_of_verl(missing, tmp_path):
    record = sample()
    del record[missing]
    path = write_lines(tmp_path / "3.jsonl", record)
    assert not ADAPTER.recognizes(path)
    assert [r.error.rule for r in planned(ADAPTER, path).rejected] == ["record_type"]


@given(mutated_lines(b"\n".join(json.dumps(sample(score=s)).encode() for s in (0.0, 1.0))))
@settings(deadline=None, max_examples=100)
def test_no_damage_loses_a_line_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "3.jsonl"
        path.write_bytes(content)
        check_lines(ADAPTER, path)
