"""A directory of logs of several formats, among files of none, becomes one dataset."""

import json
import shutil

import pytest

import rollout_io
from rollout_io import convert, read_log, read_metadata
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from schemas.errors import RolloutError
from tests.helpers.conversion_helpers import call, refusal, rejected_in, write

TEMPLATE = "chatml_tools_thinking"
ANSWERS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def folder(tmp_path, harness_logs):
    """Logs of three formats, in three directories, with notes, a picture and a broken document."""
    logs = tmp_path / "logs"
    write(logs / "b" / "calls.jsonl", call("a/0", 5), call("a/1", 6))
    for path in (harness_logs / "claude_code").iterdir():
        (logs / "claude").mkdir(exist_ok=True)
        shutil.copy(path, logs / "claude")
    shutil.copytree(harness_logs / "verifiers" / "v0_eval_mcp_env", logs / "runs" / "mcp")
    (logs / "README.md").write_text("# Notes")
    (logs / "plot.png").write_bytes(b"\x89PNG\r\n\x00\xff")
    (logs / "b" / "config.json").write_text('{"seed": 1}')
    (logs / "b" / "cut.json").write_text('{"seed": ')
    (logs / ".hidden.jsonl").write_text("{")
    return logs


@pytest.mark.slow
def test_all_logs_of_a_directory_are_found_and_the_other_files_are_left(
    folder, tmp_path, smollm2_dir, capsys
):
    out = tmp_path / "ds"
    arguments = [str(folder), "--tokenizer", str(smollm2_dir), "--on-error", "skip"]
    arguments += ["--chat-template", TEMPLATE]
    assert run(["convert", *arguments, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["formats"]) == ["calls", "claude_code", "verifiers"]
    assert said["formats"]["calls"] == 2
    assert said["num_left"] == 4
    names = ("README.md", "b/config.json", "b/cut.json", "plot.png")
    assert sorted(said["left"]) == sorted(str(folder / name) for name in names)
    assert said["num_records"] == said["num_written"] + said["num_rejected"]
    assert not {r["source"] for r in rejected_in(out)} & set(said["left"])
    sources = rollout_io.read(out)["token_source"].to_pylist()
    assert set(sources) == {"engine", "retokenized"}
    assert run(["convert", *arguments, "--out", str(out)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("2 sessions (calls), ")
    assert lines[0].endswith(" runs (verifiers); skipped 4 other files")
    assert f"{out} is up to date with these logs; nothing to do" in lines


def test_the_metadata_names_all_formats_and_no_fact_of_one_as_that_of_all(
    folder, tmp_path, smollm2_dir
):
    shutil.rmtree(folder / "runs")
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template=TEMPLATE, on_error="skip")
    done = convert(folder, tmp_path / "ds", **choices)
    metadata = read_metadata(tmp_path / "ds")
    assert [made["format"] for made in metadata.made_by] == ["calls", "claude_code"]
    assert [made["verb"] for made in metadata.made_by] == ["convert", "convert"]
    assert metadata.tokenizer_fingerprint is not None
    assert metadata.chat_template_fingerprint is None
    assert "groups (claude_code)" in done.about
    text = convert(folder / "claude", tmp_path / "text", **choices)
    assert read_metadata(tmp_path / "text").chat_template_fingerprint is not None
    assert "groups" in text.about


def test_a_foreign_file_is_an_error_or_a_rejected_record_only_with_strict(tmp_path, capsys):
    logs = tmp_path / "logs"
    write(logs / "a.jsonl", call("a/0"))
    (logs / "README.md").write_text("# Notes")
    assert refusal(logs, tmp_path / "no", strict=True).where == str(logs / "README.md")
    assert not (tmp_path / "no").exists()
    counts = convert(logs, tmp_path / "skip", strict=True, on_error="skip").summary
    assert (counts.num_records, counts.num_rejected) == (2, 1)
    assert convert(logs, tmp_path / "ds").left == [str(logs / "README.md")]
    arguments = ["convert", str(logs), "--strict", "--out", str(tmp_path / "x")]
    assert run(arguments) == 1
    assert "README.md: the format is not recognized" in capsys.readouterr().err
    assert read_log(logs).num_rows == 1
    with pytest.raises(RolloutError, match="known_format"):
        read_log(logs, strict=True)


def test_a_damaged_log_of_a_known_format_stays_an_error(tmp_path):
    logs = tmp_path / "logs"
    write(logs / "a.jsonl", call("a/0"), b'{"session": "b/')
    (logs / "README.md").write_text("# Notes")
    assert refusal(logs, tmp_path / "ds").where == f"{logs / 'a.jsonl'}:2"


def test_a_directory_without_a_log_is_an_error_that_names_it(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("README.md", "TODO.md"):
        (tmp_path / "logs" / name).write_text("# Notes")
    error = refusal(tmp_path / "logs", tmp_path / "ds")
    assert (error.rule, error.where) == ("known_format", str(tmp_path / "logs"))
    assert "(found 2 files, the first is " in error.sentence


def test_two_formats_that_claim_one_run_are_an_error_that_names_both(tmp_path):
    first = write(tmp_path / "a.jsonl", call("a/0", 5))
    second = write(tmp_path / "b.jsonl", {"id": "a", "messages": ANSWERS})
    error = refusal([first, second], tmp_path / "ds")
    assert (error.rule, error.where) == ("unique_trajectory", f"{second}:1")
    assert f"instance 'a', repetition 0, also occurs in {first}:1" in error.sentence
    assert "separate dataset" in error.hint
    counts = convert([first, second], tmp_path / "ds", on_error="skip").summary
    assert (counts.num_written, counts.num_rejected) == (1, 1)


@pytest.mark.slow
def test_outcomes_are_of_the_runs_of_any_format(tmp_path, smollm2_dir):
    log = write(tmp_path / "a.jsonl", call("a/0", 5))
    text = write(tmp_path / "b.jsonl", {"id": "b", "messages": ANSWERS})
    lines = [{"session": f"{name}/0", "reward": 1.0} for name in "ab"]
    rewards = write(tmp_path / "rewards", *lines, {"session": "c/0", "error": "lost"})
    choices = Keywords(rewards=str(rewards), tokenizer=str(smollm2_dir))
    assert convert([log, text], tmp_path / "ds", **choices).summary.formats == {
        "calls": 1,
        "openai_messages": 1,
    }
    table = rollout_io.read(tmp_path / "ds")
    assert table["reward"].to_pylist() == [1.0, 1.0, None]
    assert table["error"].to_pylist() == [None, None, "lost"]
    assert read_log([log, text], **choices).num_rows == 3


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_chunks_of_several_formats_make_the_same_dataset_with_any_workers(
    workers, folder, tmp_path, smollm2_dir
):
    choices = Keywords(tokenizer=str(smollm2_dir), on_error="skip")
    done = convert(folder, tmp_path / "ds", **choices, workers=workers, chunk_bytes=5_000)
    found = rollout_io.read(tmp_path / "ds")
    assert found.num_rows == done.summary.num_rows
    assert found["trajectory_id"].to_pylist()[0] == "a_0"


def test_a_job_of_harbor_is_one_log_beside_logs_of_other_formats(tmp_path, trial):
    from tests.helpers.harbor_helpers import write_trial

    logs = tmp_path / "logs"
    for name in ("t1", "t2"):
        directory = write_trial(logs / "jobs" / "j1", trial(name))
        write(directory / "agent" / "sessions" / "own.jsonl", call("inside/0"))
    write(logs / "more" / "deep" / "a.jsonl", call("a/0"))
    done = convert(logs, tmp_path / "ds")
    assert done.summary.formats == {"harbor": 2, "calls": 1}
    (directory / "result.json").unlink()
    error = refusal(logs, tmp_path / "no")
    assert (error.rule, error.where) == ("no_trial_result", str(directory))
