import json
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.adapters.skyrl_evals import ADAPTER
from tests.adapter_helpers import planned, write_lines
from tests.line_log_helpers import check_lines, mutated_lines

METRICS = {"eval/all/avg_score": 0.5, "eval/all/pass_at_1": 0.5}


def sample(**fields):
    made = {"input_prompt": "<|im_start|>user\n1 + 5?", "output_response": "6", "score": 1.0}
    made |= {"stop_reason": "stop", "env_class": "gsm8k", "env_extras": {}, "data_source": "gsm8k"}
    return made | fields


class TrainingInputBatch(dict):
    pass


@pytest.mark.parametrize("score", [1.0, [0.0, 1.0], None])
def test_decoded_text_is_recognized_and_refused_by_name(score, tmp_path):
    path = write_lines(tmp_path / "gsm8k.jsonl", sample(score=score), sample())
    assert ADAPTER.recognizes(path)
    plan = planned(ADAPTER, path)
    assert plan.runs == []
    assert [r.error.rule for r in plan.rejected] == ["text_without_roles"] * 2
    assert "from_generator_output" in plan.rejected[0].error.hint


def test_a_directory_of_evaluations_is_one_log_and_its_aggregated_metrics_no_record(tmp_path):
    write_lines(tmp_path / "gsm8k.jsonl", sample(), sample())
    write_lines(tmp_path / "aime.jsonl", sample())
    aggregated = write_lines(tmp_path / "aggregated_results.jsonl", METRICS)
    assert ADAPTER.recognizes(tmp_path)
    assert not ADAPTER.recognizes(aggregated)
    plan = planned(ADAPTER, tmp_path)
    assert plan.num_records == 3
    where = {r.error.where for r in plan.rejected}
    assert where == {f"{tmp_path}/{n}" for n in ("aime.jsonl:1", "gsm8k.jsonl:1", "gsm8k.jsonl:2")}


def test_a_pickled_batch_is_refused_and_never_loaded(tmp_path):
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(pickle.dumps(TrainingInputBatch()))
    assert ADAPTER.recognizes(path)
    (rejected,) = planned(ADAPTER, path).rejected
    assert rejected.error.rule == "pickle"
    assert "not run" in rejected.error.expected


def test_other_pickles_lines_and_directories_are_none_of_skyrl(tmp_path):
    (tmp_path / "other.pkl").write_bytes(pickle.dumps({"a": 1}))
    write_lines(tmp_path / "a.jsonl", METRICS)
    for path in (tmp_path / "other.pkl", tmp_path / "a.jsonl", tmp_path, tmp_path / "nowhere"):
        assert not ADAPTER.recognizes(path)


@given(mutated_lines(b"\n".join(json.dumps(sample(score=s)).encode() for s in (0.0, [1.0]))))
@settings(deadline=None, max_examples=100)
def test_no_damage_loses_a_line_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gsm8k.jsonl"
        path.write_bytes(content)
        check_lines(ADAPTER, path)
