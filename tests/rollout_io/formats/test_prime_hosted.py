import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.base import Options
from rollout_io.formats.engines.files import Start
from rollout_io.formats.prime_rl import ADAPTER
from tests.helpers.adapter_helpers import convert_with, planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, check_records, mutated_lines, save_template
from tests.helpers.text_log_helpers import mutated, save

RUN = "h4y9hb6fjom4xfbclitb2938"
CALL = {"id": "a", "name": "ls", "arguments": '{"n": 1}'}
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
COMPLETION = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [json.dumps(CALL)],
        "reasoning_content": "x",
    },
    {"role": "tool", "tool_call_id": "a", "content": "y"},
    {"role": "assistant", "content": "Ho.", "tool_calls": None, "thinking_blocks": None},
]


def row(sample, reward=0.0, baseline=0.5, **fields):
    made = {
        "run_id": "r",
        "sample_id": sample,
        "problem_id": 1,
        "step": 3,
        "prompt": json.dumps(PROMPT),
        "completion": json.dumps(COMPLETION),
        "reward": reward,
        "advantage": reward - baseline,
        "metrics": json.dumps({"judge": reward, "num_turns": 2.0, "note": "x"}),
        "timing": "{}",
        "info": "",
        "env_name": "env",
        "task": "default",
        "tag": "",
    }
    return made | fields


def page(rows, **fields):
    return {"limit": 25, "page": 1, "samples": rows, "total": len(rows), "total_pages": 1} | fields


def groups_of(plan):
    return [run.instance_id.rpartition("/")[2] for run in plan.runs]


def directory(path, rows, group_size=None, **fields):
    path.mkdir()
    write_lines(path / "results.jsonl", *rows)
    save(path / "rollouts_raw.json", page(rows, **fields))
    save(path / "metadata.json", {"run": {"id": "r", "rollouts_per_example": group_size}})
    return path


def test_rows_with_one_baseline_are_a_group_whatever_their_problem_says(tmp_path):
    rows = [row(0, 1.0, 0.375), row(1, 0.0, 0.125), row(2, 0.0, 0.375), row(3, 1.0, 0.1250001)]
    plan = planned(ADAPTER, write_lines(tmp_path / "rows", *rows))
    assert groups_of(plan) == ["group-0", "group-1", "group-0", "group-1"]
    assert plan.runs[0].instance_id == "r/step-3/problem-1/group-0"
    assert [run.repetition_id for run in plan.runs] == [0, 0, 1, 1]
    assert plan.about["groups"].startswith("inferred: rows with the same step, problem, prompt")


@pytest.mark.parametrize(("run_id", "size"), [("r", 2), ("another", None)])
def test_the_metadata_beside_single_files_give_the_size_of_a_group_of_their_run(
    run_id, size, tmp_path
):
    files = [
        write_lines(tmp_path / f"page-{n}.jsonl", *map(row, range(4 * n, 4 * n + 4)))
        for n in range(2)
    ]
    save(tmp_path / "metadata.json", {"run": {"id": run_id, "rollouts_per_example": 2}})
    groups = groups_of(planned(ADAPTER, *files))
    assert groups == [f"group-{i // (size or 8)}" for i in range(8)]


@pytest.mark.parametrize(
    "other",
    [{"step": 4}, {"problem_id": 2}, {"prompt": "[]"}, {"advantage": None}, {"run_id": "q"}],
)
def test_another_step_problem_prompt_or_no_advantage_is_another_group(other, tmp_path):
    plan = planned(ADAPTER, write_lines(tmp_path / "rows", row(0), row(1) | other, row(2)))
    assert plan.runs[0].instance_id == plan.runs[2].instance_id != plan.runs[1].instance_id


def test_a_group_is_no_larger_than_the_metadata_say(tmp_path):
    rows = [row(i, 0.0, 0.0) for i in range(4)]
    assert groups_of(planned(ADAPTER, directory(tmp_path / "a", rows, 2))) == [
        "group-0",
        "group-0",
        "group-1",
        "group-1",
    ]
    assert set(groups_of(planned(ADAPTER, directory(tmp_path / "b", rows)))) == {"group-0"}


def test_rows_that_were_not_saved_are_named(tmp_path):
    rows = [row(0), row(1)]
    whole = directory(tmp_path / "whole", rows)
    cut = directory(tmp_path / "cut", rows, total=5, total_pages=3)
    assert "partial" not in planned(ADAPTER, whole).about
    said = "2 of 5 rows (page 1 of 3): groups may be partial"
    assert planned(ADAPTER, cut).about["partial"] == {str(cut): said}
    file = cut / "rollouts_raw.json"
    assert planned(ADAPTER, file).about["partial"] == {str(file): said}


def test_a_page_gives_the_runs_that_its_rows_give(tmp_path):
    folder = directory(tmp_path / "a", [row(i) for i in range(3)])
    read = [
        [trajectory for _, trajectory in read_all(ADAPTER, place)[0]]
        for place in (folder, folder / "results.jsonl", folder / "rollouts_raw.json")
    ]
    for trajectories in read:
        assert [t.steps[0].messages for t in trajectories] == [t.steps[0].messages for t in read[0]]
    (folder / "results.jsonl").unlink()
    assert ADAPTER.recognizes(Start(folder))
    assert len(planned(ADAPTER, folder).runs) == 3


def test_strings_of_json_become_messages_metrics_and_a_reward(tmp_path):
    ((run, found),), _ = read_all(
        ADAPTER, write_lines(tmp_path / "rows", row(7, 1.0, 0.5, tag="t"))
    )
    assert found.reward == 1.0
    assert found.metrics == {"reward": 1.0, "advantage": 0.5, "judge": 1.0, "num_turns": 2.0}
    assert found.user_values == {"env": "env", "task": "default", "tag": "t", "step": "3"}
    assert run.labels["sample"] == "7"
    messages = found.steps[0].messages
    assert messages[:2] == PROMPT
    function = {"name": "ls", "arguments": '{"n":1}'}
    assert messages[2]["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
    assert messages[2]["reasoning_content"] == "x"
    assert messages[4] == {"role": "assistant", "content": "Ho."}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"prompt": "not JSON"}, "json_line"),
        ({"completion": '"text"'}, "record_type"),
        ({"completion": '[{"content": "x"}]'}, "record_type"),
        ({"completion": '[{"role": "assistant", "tool_calls": ["{"]}]'}, "json_line"),
        ({"metrics": "[1]"}, "record_type"),
        ({"metrics": '{"a": 1e999}'}, "record_type"),
        ({"reward": "1"}, "record_type"),
        ({"sample_id": None}, "record_type"),
    ],
)
def test_a_field_that_holds_something_else_is_refused_with_its_row(fields, rule, tmp_path):
    path = write_lines(tmp_path / "rows", row(0), row(1) | fields)
    found, ((place, error, _),) = read_all(ADAPTER, path)
    assert len(found) == 1
    assert (error.rule, place.where) == (rule, f"{path}:2")
    assert error.where.startswith(place.where)


def test_the_real_rows_are_two_groups_of_eight(harness_logs):
    folder = harness_logs / "prime_hosted_rl" / RUN
    for place in (folder, folder / "results.jsonl", folder / "rollouts_raw.json"):
        assert ADAPTER.recognizes(Start(place))
        plan = planned(ADAPTER, place)
        assert groups_of(plan) == ["group-0"] * 8 + ["group-1"] * 8
        assert {run.labels["problem"] for run in plan.runs} == {"1"}
        assert plan.rejected == []
        assert "partial" not in plan.about
    read = [ADAPTER.read(run, Options()) for run in planned(ADAPTER, folder).runs]
    assert [t.reward for t in read] == [0.0] * 5 + [1.0] * 3 + [0.0] * 7 + [1.0]
    assert [len(t.steps[0].messages) for t in read] == [5] * 4 + [7, 7, 11, 9] + [5] * 7 + [9]
    assert all("reasoning_content" in t.steps[0].messages[2] for t in read)
    assert not ADAPTER.recognizes(Start(folder / "metadata.json"))


def test_the_user_can_group_the_real_rows_by_their_problem(harness_logs):
    folder = harness_logs / "prime_hosted_rl" / RUN
    plan = planned(ADAPTER, folder, group_by=["step", "problem"])
    assert {run.instance_id for run in plan.runs} == {"0/1"}


@pytest.mark.slow
@pytest.mark.model
def test_with_a_tokenizer_the_real_rows_become_rows_with_rewards(
    harness_logs, tmp_path, smollm2_dir
):
    rows = (harness_logs / "prime_hosted_rl" / RUN / "results.jsonl").read_bytes().splitlines()
    log = write_lines(tmp_path / "results.jsonl", *rows[4:8])
    choices = {"tokenizer": str(smollm2_dir), "chat_template": save_template(tmp_path)}
    choices["reward"] = "judge_reward"
    done, table = convert_with(ADAPTER, [log], tmp_path, **choices)
    assert (done.summary.num_records, done.summary.num_written) == (4, 4)
    assert len(done.summary.instances) == 1
    assert set(table["token_source"].to_pylist()) == {"retokenized"}
    assert table["reward"].to_pylist() == [0.0, 1.0, 1.0, 1.0]


LOG = b"\n".join(json.dumps(row(i, float(i % 2))).encode() for i in range(3))


@given(mutated_lines(LOG))
@settings(deadline=None, max_examples=examples(120))
def test_no_damage_loses_a_row_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        path.write_bytes(content)
        check_lines(ADAPTER, path)


@given(mutated(json.dumps(page([row(0), row(1)])).encode()), st.booleans())
@settings(deadline=None, max_examples=examples(80))
def test_no_damage_of_a_page_loses_a_row_or_ends_in_a_traceback(content, is_directory):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts_raw.json"
        path.write_bytes(content)
        given_path = Path(folder) if is_directory else path
        check_records(ADAPTER, given_path, planned(ADAPTER, given_path).num_records)
