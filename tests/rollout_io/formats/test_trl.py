import math
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.engines.files import Start
from rollout_io.formats.trainers import TRL as ADAPTER
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with, planned, read_all
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_records


def prompt(text):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def answer(text):
    return [{"role": "assistant", "content": text}]


def calling(name, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def save(path, num_rows=2, step=7, **columns):
    """A file with the columns, in the order, in which TRL writes them."""
    advantage = columns.pop("advantage", [0.5] * num_rows)
    table = {"step": [step] * num_rows, **columns, "advantage": advantage}
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture
def file(tmp_path):
    return save(
        tmp_path / "completions_00007.parquet",
        num_rows=3,
        prompt=[prompt("1 + 5?"), prompt("2 + 2?"), prompt("1 + 5?")],
        completion=[answer("6"), answer("4"), answer("7")],
        correct=[1.0, 1.0, 0.0],
        advantage=[0.7, 0.0, -0.7],
    )


def test_rows_of_one_step_with_one_prompt_are_a_group(file):
    plan = planned(ADAPTER, file)
    first, second, third = plan.runs
    assert first.instance_id == third.instance_id != second.instance_id
    assert first.instance_id.startswith("step-7/prompt-")
    assert [run.repetition_id for run in plan.runs] == [0, 0, 1]
    assert plan.about["groups"] == "inferred: rows of one step with the same prompt"
    assert [place.where for run in plan.runs for place in run.places] == [
        f"{file}, row {i}" for i in range(3)
    ]


def test_the_only_column_of_numbers_is_the_outcome(file):
    read = [trajectory for _, trajectory in read_all(ADAPTER, file)[0]]
    assert [t.reward for t in read] == [1.0, 1.0, 0.0]
    assert read[0].metrics == {"correct": 1.0, "advantage": 0.7}
    assert read[0].steps[0].messages == [*prompt("1 + 5?"), *answer("6")]
    assert read[0].user_values == {"step": "7"}


def test_of_several_rewards_none_is_the_outcome_until_one_is_chosen(tmp_path):
    columns = {"prompt": [prompt("x")] * 2, "completion": [answer("y")] * 2}
    columns |= {"correct": [1.0, math.nan], "length": [0.5, 0.25], "note": ["a", "b"]}
    path = save(tmp_path / "c.parquet", **columns)
    read = [trajectory for _, trajectory in read_all(ADAPTER, path)[0]]
    assert [t.reward for t in read] == [None, None]
    assert read[0].metrics == {"correct": 1.0, "length": 0.5, "advantage": 0.5}
    assert read[1].metrics == {"length": 0.25, "advantage": 0.5}


def test_a_function_that_gave_no_reward_leaves_it_unknown(tmp_path):
    columns = {"prompt": [prompt("x")] * 2, "completion": [answer("y")] * 2}
    path = save(tmp_path / "c.parquet", **columns, correct=[math.nan, 1.0])
    assert [t.reward for _, t in read_all(ADAPTER, path)[0]] == [None, 1.0]


def test_arguments_have_none_of_the_nulls_that_arrow_fills_in(tmp_path):
    turns = [calling("ls", path="a"), {"role": "tool", "name": "ls", "content": "x"}]
    completions = [[*turns, *answer("y")], [calling("cat", file="b"), *answer("z")]]
    columns = {"prompt": [prompt("x")] * 2, "completion": completions, "correct": [1.0, 0.0]}
    read = read_all(ADAPTER, save(tmp_path / "c.parquet", **columns))[0]
    calls = [t.steps[0].messages[2]["tool_calls"][0]["function"] for _, t in read]
    assert calls == [
        {"name": "ls", "arguments": '{"path":"a"}'},
        {"name": "cat", "arguments": '{"file":"b"}'},
    ]
    assert read[0][1].steps[0].messages[3] == {"role": "tool", "name": "ls", "content": "x"}


def test_rows_of_plain_text_are_runs_too_and_the_log_says_so(file, tmp_path):
    columns = {"prompt": ["x", "y", "x"], "completion": ["a", "b", "c"], "correct": [1.0] * 3}
    path = save(tmp_path / "c.parquet", 3, **columns)
    assert ADAPTER.recognizes(Start(path))
    plan = planned(ADAPTER, path)
    first, second, third = plan.runs
    assert first.instance_id == third.instance_id != second.instance_id
    assert plan.about["text"].startswith("decoded without special tokens")
    assert "text" not in planned(ADAPTER, file).about
    read = [trajectory for _, trajectory in read_all(ADAPTER, path)[0]]
    assert [(t.steps[0].prompt, t.steps[0].response) for t in read] == [
        *(("x", "a"), ("y", "b"), ("x", "c"))
    ]
    assert [t.reward for t in read] == [1.0] * 3


@pytest.mark.parametrize(("prompts", "completions"), [("x", [answer("y")]), ([prompt("x")], "y")])
def test_messages_in_one_column_and_text_in_the_other_are_refused(prompts, completions, tmp_path):
    columns = {"prompt": [*prompts], "completion": [*completions], "correct": [1.0]}
    path = save(tmp_path / "c.parquet", 1, **columns)
    errors = [rejected.error for rejected in read_all(ADAPTER, path)[1]]
    assert [error.rule for error in errors] == ["message"]
    assert errors[0].where.startswith(f"{path}, row 0, ")


@pytest.mark.model
def test_with_a_tokenizer_plain_text_is_encoded_as_it_stands(tmp_path, smollm2_dir):
    columns = {"prompt": ["1 + 5 =", "1 + 5 ="], "completion": [" 6", ""], "correct": [1.0, 0.0]}
    path = save(tmp_path / "c.parquet", **columns)
    choices = {"tokenizer": str(smollm2_dir), "on_error": "skip"}
    done, table = convert_with(ADAPTER, [path], tmp_path, **choices)
    assert (done.summary.num_written, done.summary.num_rejected) == (1, 1)
    assert table["response_text"].to_pylist() == [" 6"]
    assert table["messages"].to_pylist() == ['"1 + 5 ="']
    assert table["reward"].to_pylist() == [1.0]
    assert table["loss_mask"].to_pylist() == [[True] * len(table["response_ids"][0])]


def test_a_completion_without_an_answer_has_no_calls(tmp_path):
    completions = [answer("y"), [{"role": "user", "content": "z"}]]
    columns = {"prompt": [prompt("x")] * 2, "completion": completions, "correct": [1.0] * 2}
    found, ((place, error, _),) = read_all(ADAPTER, save(tmp_path / "c.parquet", **columns))
    assert len(found) == 1
    assert (place.where, error.rule) == (f"{tmp_path / 'c.parquet'}, row 1", "no_calls")


def test_parquet_without_its_columns_is_none_of_trl(tmp_path):
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"step": [1], "prompt": ["x"]}), path)
    assert not ADAPTER.recognizes(Start(path))
    assert not ADAPTER.recognizes(Start(tmp_path))
    ((_, error, _),) = planned(ADAPTER, path).rejected
    assert (error.rule, error.got) == (
        "parquet_file",
        "cannot read the file: the column 'completion' is missing",
    )


def test_a_reward_that_is_not_there_is_refused_with_the_names(file, tmp_path, smollm2_dir):
    choices = {"tokenizer": str(smollm2_dir), "reward": "corect"}
    with pytest.raises(RolloutError, match="reward_key") as caught:
        convert_with(ADAPTER, [file], tmp_path, **choices)
    assert "--reward correct" in caught.value.hint


def bytes_of(**columns):
    with tempfile.TemporaryDirectory() as folder:
        return save(Path(folder) / "c.parquet", **columns).read_bytes()


WHOLE = bytes_of(
    prompt=[prompt("x")] * 2, completion=[[calling("ls", n=1)], answer("z")], correct=[1.0, 0.0]
)


@given(st.integers(0, len(WHOLE)), st.binary(min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=examples(150))
def test_no_damage_loses_a_row_or_ends_in_a_traceback(at, junk, is_cut):
    damaged = WHOLE[:at] if is_cut else WHOLE[:at] + junk + WHOLE[at + len(junk) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.parquet"
        path.write_bytes(damaged)
        check_records(ADAPTER, path, planned(ADAPTER, path).num_records)


VALUES = st.sampled_from(
    [
        *(["x", "y"], [1, 2], [None, None], [[], []], [[["x"]], []]),
        *([[{"role": "user"}], []], [[{"content": "x"}], None], [[{"role": 3}], []]),
        *([prompt("x"), answer("y")], [[prompt("x")], []]),
    ]
)


@given(
    VALUES,
    VALUES,
    st.sampled_from([[1.0, 0.0], ["a", "b"], [True, None], [None, None], [2**63 - 1, 0]]),
)
@settings(deadline=None, max_examples=examples(150))
def test_columns_of_other_types_give_runs_or_named_errors(prompts, completions, rewards):
    columns = {"prompt": prompts, "completion": completions, "correct": rewards}
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "c.parquet", **columns)
        check_records(ADAPTER, path, 2)
