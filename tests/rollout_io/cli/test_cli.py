import json
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pipelines
import rollout_io
from rollout_io.cli.main import run
from rollout_io.cli.trajectory_text import legend, render, view_trajectory
from tests.conftest import EXAMPLES

SHOP = EXAMPLES / "shop.calls.jsonl"
SHOP_REWARDS = EXAMPLES / "shop.rewards.jsonl"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("shop") / "ds")
    assert run(["convert", str(SHOP), "--rewards", str(SHOP_REWARDS), "--out", out]) == 0
    return out


def shop_lines():
    with SHOP.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def test_listing_the_formats_loads_no_polars():
    code = "import sys; from rollout_io.cli.main import run; run(['formats']); print('polars' in sys.modules)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.endswith("False\n")
    assert "claude_code" in found.stdout


def test_help_loads_no_heavy_library():
    code = (
        "import sys; from rollout_io.cli.main import run; run(['--help']);"
        "print([m for m in ('torch', 'polars', 'pyarrow', 'numpy', 'transformers', 'msgspec', 'rich', "
        "'asyncio', 'importlib.metadata', 'email', 'zipfile', 'hashlib', 'difflib') "
        "if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.endswith("[]\n")


@pytest.mark.slow
def test_convert_and_drift_leave_pandas_alone_and_usable(tmp_path):
    code = (
        "import sys\n"
        "from rollout_io.cli.main import run\n"
        "calls, rewards, out = sys.argv[1:]\n"
        "assert run(['convert', calls, '--rewards', rewards, '--out', out, '-q']) == 0\n"
        "assert run(['drift', out]) == 0\n"
        "assert 'pandas' not in sys.modules\n"
        "import pyarrow as pa\n"
        "assert pa.table({'a': [1]}).to_pandas()['a'].sum() == 1\n"
    )
    files = [str(EXAMPLES / f"shop.{name}.jsonl") for name in ("calls", "rewards")]
    arguments = [sys.executable, "-c", code, *files, str(tmp_path / "shop")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_of_a_verb_ends_with_an_example(capsys):
    for verb in ("convert", "validate", "stats", "filter", "merge", "drift", "export"):
        assert run([verb, "--help"]) == 0
        assert f"  rollouts {verb} " in capsys.readouterr().out


def test_convert_says_what_it_read_and_what_comes_next(tmp_path, capsys):
    out = str(tmp_path / "ds")
    assert run(["convert", str(SHOP), "--rewards", str(SHOP_REWARDS), "--out", out]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "205 calls" in printed.err
    assert "205 rows, 48 trajectories, 12 groups, mean reward 0.25" in printed.err
    assert f"next: rollouts validate {out}" in printed.err


def test_convert_counts_calls_failures_and_unknown_rewards(tmp_path, capsys):
    calls = [c for c in shop_lines() if c["session"].startswith("shop-1/")]
    calls.append(json.loads(json.dumps(calls[0])) | {"session": "shop-1/9"})
    choices = calls[-1]["response"]["choices"]
    calls[-1]["response"] |= {"choices": [*choices, choices[0] | {"index": 1}], "usage": None}
    logs = write_lines(tmp_path / "calls.jsonl", calls)
    records = [{"session": f"shop-1/{r}", "reward": 0.5} for r in range(4)]
    records.append({"session": "shop-1/8", "error": "no sandbox"})
    rewards = write_lines(tmp_path / "rewards.jsonl", records)
    args = ["convert", logs, "--rewards", rewards, "--out", str(tmp_path / "ds"), "--json"]
    assert run(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: value for name, value in found.items() if value} == {
        "format": "calls",
        "formats": {"calls": 5},
        "num_records": len(calls),
        "num_written": len(calls),
        "num_exact": 5,
        "num_calls": len(calls),
        "num_rows": len(calls) + 2,
        "num_trajectories": 6,
        "num_groups": 1,
        "reward_mean": 0.5,
        "num_without_reward": 1,
        "num_failed": 1,
        "num_without_sampling": len(calls) + 1,
    }


def test_convert_notes_in_the_files_how_they_were_made(tmp_path, smollm2_dir):
    out = str(tmp_path / "ds")
    flags = ["--layout", "full", "--logprobs-mode", "raw", "--tokenizer", str(smollm2_dir)]
    assert run(["convert", str(SHOP), "--out", out, *flags]) == 0
    metadata = rollout_io.read_metadata(out)
    assert (metadata.tokenizer, metadata.logprobs_mode) == (str(smollm2_dir), "raw")
    assert metadata.made_by[-1]["verb"] == "convert"
    assert metadata.made_by[-1]["inputs"] == [str(SHOP)]
    (shard,) = Path(out).glob("*.parquet")
    assert "prompt_token_ids" in pq.read_schema(shard).names


def test_validate_of_a_good_dataset_exits_0(dataset, capsys):
    assert run(["validate", dataset]) == 0
    printed = capsys.readouterr()
    audit = f"next: rollouts audit {dataset} --weights MODEL\n"
    assert (printed.out, printed.err) == ("", f"{dataset}: valid\n{audit}")


@pytest.mark.parametrize("columns", [[], ["rollout_logprobs"]])
def test_validate_suggests_no_audit_of_rows_without_log_probabilities(
    columns, dataset, tmp_path, capsys
):
    table = rollout_io.read(dataset).drop_columns("rollout_logprobs")
    for name in columns:
        table = table.append_column(name, pa.nulls(table.num_rows, pa.list_(pa.float32())))
    pq.write_table(table, tmp_path / "ds.parquet")
    assert run(["validate", str(tmp_path / "ds.parquet")]) == 0
    assert "audit" not in capsys.readouterr().err


@pytest.fixture
def broken(dataset, tmp_path):
    table = rollout_io.read(dataset)
    rewards = [float("nan")] * 7 + table["reward"].to_pylist()[7:]
    table = table.drop_columns("reward").append_column("reward", pa.array(rewards, pa.float64()))
    pq.write_table(table, tmp_path / "broken.parquet")
    return str(tmp_path / "broken.parquet")


def test_validate_groups_breaches_by_rule_and_exits_1(broken, capsys):
    assert run(["validate", broken]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(
        f"Error: {Path(broken).name}, row 0 (trajectory shop-0_0, step 0): "
        "reward is nan; it must be finite or null. [reward_finite]\n"
    )
    assert "\n... and 2 more [reward_finite]; --json lists all\n" in printed.out
    assert "\nHint: use null" in printed.out
    assert printed.err == f"{broken}: 7 errors, 0 warnings\n"


def test_validate_counts_the_rows_of_each_shard(broken, tmp_path, capsys):
    table = pq.read_table(broken)
    cut = table["step_index"].to_pylist().index(0, 1)
    (tmp_path / "ds").mkdir()
    for index, part in enumerate((table.slice(cut), table.slice(0, cut))):
        pq.write_table(part, tmp_path / "ds" / f"part-0000{index}.parquet")
    assert run(["validate", str(tmp_path / "ds")]) == 1
    printed = capsys.readouterr().out
    assert (
        "Error: part-00000.parquet, row 1 (trajectory shop-0_1, step 1): reward is nan" in printed
    )
    assert (
        "Error: part-00001.parquet, row 2 (trajectory shop-0_0, step 2): reward is nan" in printed
    )


def test_validate_lists_every_breach_in_json(broken, capsys):
    assert run(["validate", broken, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [b["row"] for b in report["breaches"]] == list(range(7))
    assert [(r["rule"], r["num_breaches"]) for r in report["rules"]] == [("reward_finite", 7)]


def test_warnings_alone_exit_0(dataset, tmp_path, capsys):
    table = rollout_io.read(dataset)
    none = [[False] * len(mask) for mask in table["loss_mask"].to_pylist()]
    column = pa.array(none, pa.list_(pa.bool_()))
    masked = table.drop_columns("loss_mask").append_column("loss_mask", column)
    pq.write_table(masked, tmp_path / "masked.parquet")
    assert run(["validate", str(tmp_path / "masked.parquet")]) == 0
    found = f"Warning: {tmp_path}/masked.parquet: loss_mask is false for every token. "
    assert capsys.readouterr().out.startswith(f"{found}[mask_trains_something]\n")


def test_inspect_shows_whole_trajectories_that_match(dataset, capsys):
    assert run(["inspect", dataset, "--where", "return > 0", "--limit", "2", "--json"]) == 0
    views = json.loads(capsys.readouterr().out)
    assert [v["trajectory_id"] for v in views] == ["shop-0_1", "shop-0_3"]
    assert [v["reward"] for v in views] == [1.0, 1.0]
    assert [s["step_index"] for s in views[0]["steps"]] == [0, 1, 2, 3]


def test_inspect_lists_the_ids_of_all_that_match(dataset, capsys):
    arguments = ["inspect", dataset, "--where", "return > 0", "--ids-only", "--limit", "1"]
    assert run(arguments) == 0
    ids = capsys.readouterr().out.split()
    returns = pipelines.trajectory_returns(dataset).filter(pl.col("return") > 0).collect()
    assert sorted(ids) == sorted(returns["trajectory_id"])
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ids


def test_inspect_counts_the_prompt_tokens_each_step_shares_with_the_one_before(dataset, capsys):
    assert run(["inspect", dataset, "--trajectory", "shop-0_1", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)[0]["steps"]
    assert [(s["num_shared_tokens"], s["num_new_tokens"]) for s in steps] == [
        (0, 53),
        (117, 23),
        (204, 23),
        (291, 23),
    ]


def test_inspect_marks_what_trains_where_there_is_no_colour(dataset, capsys):
    assert run(["inspect", dataset, "--trajectory", "shop-1_0"]) == 0
    printed = capsys.readouterr()
    assert "[+ You're asked to calculate" in printed.out
    assert "\x1b" not in printed.out
    assert "[+ trained on +]" in printed.err
    assert "1 of 1 trajectory shown" in printed.err


def test_inspect_says_once_how_to_see_text(dataset, smollm2_dir, capsys):
    note = "only logged text is shown"
    assert run(["inspect", dataset, "--limit", "2"]) == 0
    said = capsys.readouterr()
    assert (said.err.count(note), said.out.count(note)) == (1, 0)
    assert run(["inspect", dataset, "--limit", "2", "--tokenizer", str(smollm2_dir)]) == 0
    assert note not in capsys.readouterr().err


def test_where_nothing_failed_no_trajectory_has_an_error(dataset, capsys):
    assert run(["inspect", dataset, "--where", "error is not null"]) == 0
    assert "no trajectory matches: error is not null" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["inspect", "export"])
def test_a_parquet_file_of_another_kind_is_a_clean_error(verb, tmp_path, capsys):
    other = str(tmp_path / "other.parquet")
    pq.write_table(pa.table({"a": [1]}), other)
    more = ["--format", "skyrl", "--out", str(tmp_path / "x.json")] if verb == "export" else []
    assert run([verb, other, *more]) == 1
    said = capsys.readouterr().err
    assert f"{other}: the required column instance_id is missing. [columns_and_types]" in said
    assert f"Hint: run `rollouts validate {other}`" in said


def test_an_unexpected_error_is_one_line_and_exits_2(monkeypatch, capsys):
    from rollout_io.cli.validate import validate

    def fail(**_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(validate, "callback", fail)
    assert run(["validate", "x"]) == 2
    assert capsys.readouterr().err == (
        "Error: unexpected ZeroDivisionError: a bug\n"
        "Hint: set ROLLOUTS_DEBUG=1 to see the traceback.\n"
    )
    monkeypatch.setenv("ROLLOUTS_DEBUG", "1")
    assert run(["validate", "x"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_exits_130(monkeypatch):
    from rollout_io.cli.validate import validate

    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(validate, "callback", interrupt)
    assert run(["validate", "x"]) == 130


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error_message(dataset):
    command = [sys.executable, "-m", "rollout_io", "inspect", dataset, "--limit", "48"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert "error" not in said
    assert "Traceback" not in said


def row(**fields):
    ids = {"prompt_token_ids": [1, 2], "response_ids": [3, 4, 5], "loss_mask": [True, True, True]}
    return {"trajectory_id": "a_0", "step_index": 0} | ids | fields


def test_a_view_tells_trained_masked_and_observed_tokens_apart():
    segments = [
        {"start": 0, "length": 1, "step_index": 0},
        {"start": 2, "length": 1, "step_index": 1},
    ]
    merged = row(segments=segments, loss_mask=[True, False, False], response_text="all of it")
    spans = view_trajectory([merged]).steps[0].spans
    found = [(s.kind, s.num_tokens, s.text) for s in spans]
    assert found == [("trained", 1, "3"), ("observed", 1, "4"), ("masked", 1, "5")]
    text = render(view_trajectory([merged]), color=False)
    assert "[+ 3 +][. 4 .][- 5 -]" in text


def test_a_view_decodes_the_new_part_of_the_prompt_and_each_span():
    rows = [
        row(),
        row(step_index=1, prompt_token_ids=[1, 2, 3, 4, 9], loss_mask=[True, True, False]),
    ]
    letters = {i: chr(96 + i) for i in range(1, 10)}
    view = view_trajectory(rows, lambda ids: "".join(letters[i] for i in ids))
    assert [step.prompt for step in view.steps] == ["ab", "i"]
    assert [s.text for s in view.steps[1].spans] == ["cd", "e"]


def test_a_merged_row_shows_the_recorded_text_of_each_of_its_steps():
    segments = [
        {"start": 0, "length": 1, "step_index": 0, "response_text": "one"},
        {"start": 2, "length": 1, "step_index": 1, "response_text": "two"},
    ]
    merged = row(segments=segments, loss_mask=[True, False, True])
    spans = view_trajectory([merged]).steps[0].spans
    assert [(s.kind, s.text) for s in spans] == [
        ("trained", "one"),
        ("observed", "4"),
        ("trained", "two"),
    ]


def test_a_failed_trajectory_shows_its_error():
    empty = row(prompt_token_ids=[], response_ids=[], loss_mask=[], error="no sandbox")
    assert "a_0  1 step  error: no sandbox" in render(view_trajectory([empty]), color=False)


def test_a_picture_is_named_in_place_of_its_tokens_in_prompts_and_between_answers():
    name = f"sha256:{'0' * 64}"
    entries = [{"sha256": name, "start": at, "length": 3} for at in (1, 7)]
    row = {"trajectory_id": "a_0", "step_index": 0, "prompt_token_ids": [1, 9, 9, 9, 2]}
    row |= {"response_ids": [3, 4, 9, 9, 9, 5], "loss_mask": [True, *[False] * 4, True]}
    segments = [{"start": start, "length": 1, "step_index": start} for start in (0, 5)]
    row |= {"segments": segments, "pictures": entries}
    (step,) = view_trajectory([row], lambda ids: "".join(map(str, ids))).steps
    picture = "[picture sha256:00000000: 3 tokens]"
    assert step.prompt == f"1{picture}2"
    assert [span.text for span in step.spans] == ["3", f"4{picture}", "5"]


def test_colour_replaces_brackets_on_a_terminal():
    text = render(view_trajectory([row(response_text="hello")]), color=True)
    assert "\x1b[32mhello\x1b[0m" in text
    assert "[+" not in text
    assert "\x1b[32mtrained on\x1b[0m" in legend(color=True)


def test_a_log_cannot_drive_the_terminal():
    view = view_trajectory([row(response_text="\x1b[2Jgone\x07", agent="main")])
    assert "\\x1b[2Jgone\\x07" in render(view, color=False)


@pytest.mark.slow
def test_a_polite_kill_exits_143_and_leaves_nothing(tmp_path):
    out = tmp_path / "ds"
    command = [sys.executable, "-m", "rollout_io", "convert", "-", "--out", str(out)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    while not out.exists():  # then it waits for its input
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 143
    process.communicate()
    assert not out.exists()
