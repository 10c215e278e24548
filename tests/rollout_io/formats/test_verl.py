import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.cli.main import run
from rollout_io.formats.engines.files import Start
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.trainers import NO_IDS, TOOL_RESULTS
from rollout_io.formats.trainers import VERL as ADAPTER
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines


def sample(**fields):
    made = {"input": "user\n1 + 5?\nassistant\n", "output": "6", "gts": "6", "score": 1.0}
    return made | {"step": 3, "acc": True} | fields


def test_lines_of_one_step_with_one_input_are_a_group(tmp_path):
    other = sample(input="user\n2 + 2?\nassistant\n", output="4")
    path = write_lines(tmp_path / "3.jsonl", sample(), other, sample(output="7", score=0.0))
    assert ADAPTER.recognizes(Start(path))
    plan = planned(ADAPTER, path)
    first, second, third = plan.runs
    assert first.instance_id == third.instance_id != second.instance_id
    assert first.instance_id.startswith("step-3/prompt-")
    assert [run.repetition_id for run in plan.runs] == [0, 0, 1]
    assert plan.about["groups"] == "inferred: lines of one file and step with the same input"
    assert plan.about["text"] == "decoded without special tokens: the ids are approximate"


def test_another_step_and_another_file_of_the_step_are_other_groups(tmp_path):
    (tmp_path / "val").mkdir()
    rollouts = write_lines(tmp_path / "3.jsonl", sample(), sample(step=4))
    validation = write_lines(tmp_path / "val" / "3.jsonl", sample())
    names = [run.instance_id for run in planned(ADAPTER, rollouts, validation).runs]
    key = names[0].removeprefix("step-3/")
    assert names == [f"step-3/{key}", f"step-4/{key}", f"step-3/file-1/{key}"]


def test_the_score_is_the_outcome_and_all_numbers_are_metrics(tmp_path):
    extra = {"format_reward": 0.5, "acc": False, "note": "x", "request_id": "r1", "pred": [1]}
    path = write_lines(tmp_path / "3.jsonl", sample(score=0.25, **extra), sample(gts=None))
    (_, first), (_, second) = read_all(ADAPTER, path)[0]
    assert (first.reward, second.reward) == (0.25, 1.0)
    assert first.metrics == {"score": 0.25, "acc": 0.0, "format_reward": 0.5}
    task = {"step": "3", "task_instance_id": prompt_key(sample()["input"])}
    assert first.user_values == {**task, "gts": "6", "request_id": "r1"}
    assert second.user_values == task
    (step,) = first.steps
    assert (step.prompt, step.response) == ("user\n1 + 5?\nassistant\n", "6")
    assert step.source == f"{path}:1"


def test_what_a_dump_lacks_and_the_tool_results_in_it_are_counted(tmp_path):
    chatml = "<tool_call>{}</tool_call>\nuser\n<tool_response>\n6\n</tool_response>\nassistant\n6"
    llama = '{"name": "sum"}ipython\n\n6assistant\n\nIt is 6.'
    plain = "the user\nis an assistant\n\nof a tool"
    samples = [sample(output=text) for text in (chatml, llama, plain, "6", "observation\n6")]
    path = write_lines(tmp_path / "3.jsonl", *samples)
    runs, _ = read_all(ADAPTER, path)
    assert [found.notes.get(NO_IDS, 0) for _, found in runs] == [1] * 5
    assert [found.notes.get(TOOL_RESULTS, 0) for _, found in runs] == [1, 1, 0, 0, 1]


@pytest.mark.model
def test_the_dumps_of_two_steps_are_compared_task_by_task(tmp_path, smollm2_dir, capsys):
    datasets = []
    for step in (3, 4):
        log = write_lines(tmp_path / f"{step}.jsonl", sample(step=step), sample(step=step, score=0))
        datasets.append(str(tmp_path / f"step-{step}"))
        arguments = ["convert", str(log), "--out", datasets[-1], "--tokenizer", str(smollm2_dir)]
        assert run([*arguments, "-q"]) == 0
    assert run(["diff", *datasets]) == 0
    assert "1 task in both" in capsys.readouterr().out


@pytest.mark.model
def test_with_a_tokenizer_both_texts_are_encoded_as_they_stand(tmp_path, smollm2_dir):
    path = write_lines(tmp_path / "3.jsonl", sample(), sample(output="7 or 8", score=0.0))
    done, table = convert_with(ADAPTER, [path], tmp_path, tokenizer=str(smollm2_dir))
    assert (done.summary.num_records, done.summary.num_written) == (2, 2)
    assert done.summary.num_retokenized == 2
    assert table["reward"].to_pylist() == [1.0, 0.0]
    assert table["token_source"].to_pylist() == ["retokenized"] * 2
    assert table["response_text"].to_pylist() == ["6", "7 or 8"]
    from rollout_io.retokenize import load_tokenizer

    decode = load_tokenizer(smollm2_dir).decode
    assert [decode(ids) for ids in table["prompt_token_ids"].to_pylist()] == [sample()["input"]] * 2
    assert [decode(ids) for ids in table["response_ids"].to_pylist()] == ["6", "7 or 8"]
    assert all(all(mask) for mask in table["loss_mask"].to_pylist())


@pytest.mark.model
@pytest.mark.parametrize(("empty", "what"), [("input", "prompt"), ("output", "response")])
def test_an_empty_text_is_refused_by_name(empty, what, tmp_path, smollm2_dir):
    path = write_lines(tmp_path / "3.jsonl", sample(**{empty: ""}), sample())
    done, _ = convert_with(ADAPTER, [path], tmp_path, tokenizer=str(smollm2_dir), on_error="skip")
    assert (done.summary.num_written, done.summary.num_rejected) == (1, 1)
    (rejected,) = (tmp_path / "ds.rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rejected)["rule"] == f"nonempty_{what}"


@given(mutated_lines(b"\n".join(json.dumps(sample(score=s)).encode() for s in (0.0, 1.0))))
@settings(deadline=None, max_examples=examples(100))
def test_no_damage_loses_a_line_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "3.jsonl"
        path.write_bytes(content)
        check_lines(ADAPTER, path)
