import json
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.formats.engines.files import Start
from rollout_io.formats.skyrl import EVALUATIONS
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines

METRICS = {"eval/all/avg_score": 0.5, "eval/all/pass_at_1": 0.5}
PROMPT = "<|im_start|>user\n1 + 5?<|im_end|>\n<|im_start|>assistant\n"


def sample(**fields):
    made = {"input_prompt": PROMPT, "output_response": "6<|im_end|>", "score": 1.0}
    made |= {"stop_reason": "stop", "env_class": "gsm8k", "env_extras": {}, "data_source": "gsm8k"}
    return made | fields


class TrainingInputBatch(dict):
    pass


def test_lines_of_one_data_source_with_one_prompt_are_a_group(tmp_path):
    other = sample(input_prompt="x")
    path = write_lines(tmp_path / "gsm8k.jsonl", sample(), other, sample())
    assert EVALUATIONS.recognizes(Start(path))
    plan = planned(EVALUATIONS, path)
    first, second, third = plan.runs
    assert first.instance_id == third.instance_id != second.instance_id
    assert first.instance_id.startswith("gsm8k/prompt-")
    assert [run.repetition_id for run in plan.runs] == [0, 0, 1]
    assert plan.about["groups"].startswith("inferred: lines of one evaluation")
    assert plan.about["text"].startswith("decoded with special tokens")


def test_evaluations_of_other_steps_and_of_other_runs_are_other_groups(tmp_path):
    paths = []
    for folder in ("a/global_step_5_evals", "a/global_step_10_evals", "b/global_step_5_evals"):
        (tmp_path / folder).mkdir(parents=True)
        paths.append(write_lines(tmp_path / folder / "gsm8k.jsonl", sample()))
    runs = planned(EVALUATIONS, *paths).runs
    names = [run.instance_id.rpartition("/")[0] for run in runs]
    assert names == ["step-5/gsm8k", "step-10/gsm8k", "step-5/gsm8k/file-1"]
    assert runs[1].labels["step"] == "10"


@pytest.mark.parametrize(
    ("score", "reward", "metrics"),
    [
        (0.5, 0.5, {"score": 0.5}),
        ([0.0, 0.25, 1.0], 1.25, {"score": 1.25, "num_response_tokens": 3.0}),
        ([], None, {}),
        (None, None, {}),
    ],
)
def test_the_score_or_the_sum_of_its_tokens_is_the_outcome(score, reward, metrics, tmp_path):
    path = write_lines(tmp_path / "gsm8k.jsonl", sample(score=score, env_extras={"answer": "6"}))
    ((_, trajectory),) = read_all(EVALUATIONS, path)[0]
    assert (trajectory.reward, trajectory.metrics) == (reward, metrics)
    assert trajectory.user_values == {
        "env_class": "gsm8k",
        "env_extras": '{"answer": "6"}',
        "data_source": "gsm8k",
    }
    (step,) = trajectory.steps
    assert (step.prompt, step.response, step.stop_reason) == (PROMPT, "6<|im_end|>", "stop")


def test_the_placeholder_of_a_failed_run_is_no_text_of_the_model(tmp_path):
    failed = sample(stop_reason="error", output_response="!", score=0.0)
    path = write_lines(tmp_path / "gsm8k.jsonl", failed)
    ((_, trajectory),) = read_all(EVALUATIONS, path)[0]
    assert (trajectory.steps, trajectory.error) == ([], "error")


@pytest.mark.slow
@pytest.mark.model
def test_with_a_tokenizer_special_tokens_in_the_text_are_theirs_again(tmp_path, smollm2_dir):
    failed = sample(stop_reason="error", output_response="!", score=0.0)
    path = write_lines(tmp_path / "gsm8k.jsonl", sample(), failed)
    done, table = convert_with(EVALUATIONS, [path], tmp_path, tokenizer=str(smollm2_dir))
    assert (done.summary.num_records, done.summary.num_written) == (2, 2)
    assert table["prompt_token_ids"].to_pylist()[0][:2] == [1, 4093]
    assert table["response_ids"].to_pylist() == [[38, 2], []]
    assert table["reward"].to_pylist() == [1.0, None]
    assert table["stop_reason"].to_pylist() == ["stop", None]
    assert table["error"].to_pylist() == [None, "error"]


def test_a_directory_of_evaluations_is_one_log_and_its_aggregated_metrics_no_record(tmp_path):
    write_lines(tmp_path / "gsm8k.jsonl", sample(), sample())
    write_lines(tmp_path / "aime.jsonl", sample(data_source="aime"))
    aggregated = write_lines(tmp_path / "aggregated_results.jsonl", METRICS)
    assert EVALUATIONS.recognizes(Start(tmp_path))
    assert not EVALUATIONS.recognizes(Start(aggregated))
    plan = planned(EVALUATIONS, tmp_path)
    assert plan.num_records == 3
    where = [place.where for run in plan.runs for place in run.places]
    assert where == [f"{tmp_path}/{n}" for n in ("aime.jsonl:1", "gsm8k.jsonl:1", "gsm8k.jsonl:2")]


def test_a_pickled_batch_is_refused_and_never_loaded(tmp_path):
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(pickle.dumps(TrainingInputBatch()))
    assert EVALUATIONS.recognizes(Start(path))
    (rejected,) = planned(EVALUATIONS, path).rejected
    assert rejected.error.rule == "pickle"
    assert "not loaded" in rejected.error.got
    assert "from_generator_output" in rejected.error.hint


@given(mutated_lines(b"\n".join(json.dumps(sample(score=s)).encode() for s in (0.0, [1.0]))))
@settings(deadline=None, max_examples=examples(100))
def test_no_damage_loses_a_line_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gsm8k.jsonl"
        path.write_bytes(content)
        check_lines(EVALUATIONS, path)
