"""Inputs that are no logs: an error says what the file is, and what to give instead."""

import gzip
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import rollout_io
from rollout_io.cli.main import run
from rollout_io.formats.detect import find_adapter
from rollout_io.formats.engines.files import Start
from tests.conftest import EXAMPLES

CODE = "table = rollout_io.from_generator_output(output)"
TRIAL = EXAMPLES / "harbor" / "sum-2-3__73BsD78"
OUTPUT = {
    "prompt_token_ids": [[1, 2], [1, 2]],
    "response_ids": [[3], [4]],
    "rewards": [1.0, 0.0],
    "loss_masks": [[1], [1]],
    "trajectory_ids": [{"instance_id": "a", "repetition_id": i} for i in range(2)],
}


class Bomb:
    """Code that runs when a pickle is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("exploded"),)  # type: ignore[return-value]


def refused(capsys, path, *options):
    """The message for an input."""
    assert run(["convert", str(path), "--out", "out", *options]) == 1
    assert not Path("out").exists()
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("options", [(), ("--format", "skyrl"), ("--on-error", "skip")])
def test_a_pickle_is_never_loaded_and_the_hint_is_code_that_runs(protocol, options, capsys):
    Path("a.pkl").write_bytes(pickle.dumps([OUTPUT, Bomb()], protocol))
    message = refused(capsys, Path("a.pkl"), *options)
    assert "a.pkl: the file is a pickle, which could run code, so it is never loaded. [pickle]" in (
        message
    )
    assert not Path("exploded").exists()
    code = message[message.index("  import rollout_io") : message.index("otherwise")]
    assert CODE in code
    exec("\n".join(line.removeprefix("  ") for line in code.splitlines()), {"output": OUTPUT})
    assert rollout_io.scan("rollouts/").collect()["reward"].to_list() == [1.0, 0.0]


def test_a_compressed_pickle_is_one_too(capsys):
    Path("a.pkl.gz").write_bytes(gzip.compress(pickle.dumps(OUTPUT)))
    assert "a.pkl.gz: the file is a pickle" in refused(capsys, Path("a.pkl.gz"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_save_that_is_not_slimes_is_a_pickle(*, is_zip, capsys):
    torch.save({"a": torch.ones(3)}, "a.pt", _use_new_zipfile_serialization=is_zip)
    message = refused(capsys, Path("a.pt"))
    assert "never loaded. [pickle]" in message
    assert ("torch.save" in message) == is_zip
    assert CODE in message


def test_a_directory_of_pickles_gets_the_same_hint(capsys):
    Path("dumps").mkdir()
    Path("dumps/a.pkl").write_bytes(pickle.dumps(OUTPUT))
    message = refused(capsys, Path("dumps"))
    assert "no file is in a format that rollouts can read" in message
    assert CODE in message


@pytest.mark.parametrize("options", [(), ("--format", "calls")])
def test_an_empty_file_is_called_empty(options, capsys):
    Path("calls.jsonl").touch()
    message = refused(capsys, Path("calls.jsonl"), *options)
    assert message.startswith("Error: calls.jsonl: the file is empty. [input_file]\n")


def test_the_configuration_of_a_harbor_trial_leads_to_its_directory(capsys):
    message = refused(capsys, TRIAL / "config.json")
    assert "the file is the configuration of a Harbor trial, not its result. [harbor_input]" in (
        message
    )
    assert f"Hint: pass the trial directory ({TRIAL}/), or its result.json" in message
    assert run(["convert", str(TRIAL), "--out", "out"]) == 0


def test_the_configuration_of_a_harbor_job_leads_to_its_directory(capsys):
    Path("config.json").write_text(json.dumps({"job_name": "sums", "jobs_dir": "jobs"}))
    assert "Hint: pass the job directory (./)" in refused(capsys, Path("config.json"))


def test_the_result_of_a_harbor_job_without_its_trials_leads_to_the_job(capsys):
    shutil.copy(TRIAL.parent / "result.json", "result.json")
    message = refused(capsys, Path("result.json"))
    assert "the file is the result of a job, but its directory contains no trials" in message
    assert "Hint: pass the job directory" in message
    shutil.copytree(TRIAL, TRIAL.name)
    assert run(["convert", "result.json", "--out", "out", "--on-error", "skip"]) == 0


LINES = {
    "calls": {"session": "a/0", "request": {"messages": []}, "response": {"choices": []}},
    "verl": {"input": "1+1?", "output": "2", "score": 1.0, "step": 3},
    "skyrl_evals": {"input_prompt": "1+1?", "output_response": "2", "env_class": "sums"},
    "claude_code": {"type": "user", "message": {"role": "user"}, "sessionId": "a", "uuid": "b"},
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, line in LINES.items() for key in line]
)
def test_a_line_that_lacks_one_key_leads_to_its_format(name, key, capsys):
    line = LINES[name]
    for misspelt in (key[:-1] + key[-1] * 2, None):
        renamed = {misspelt if k == key else k: v for k, v in line.items()}
        renamed.pop(None, None)  # type: ignore[arg-type]
        Path("log.jsonl").write_text(json.dumps(renamed) + "\n")
        message = refused(capsys, Path("log.jsonl"))
        assert f"the first line has all keys of the format {name} but '{key}'. [known" in message
        hint = f"did you mean '{key}', not '{misspelt}'? See" if misspelt else f"add '{key}': see"
        assert f"Hint: {hint} docs/formats/{name}.md" in message
    Path("log.jsonl").write_text(json.dumps(line) + "\n")
    assert find_adapter(name).recognizes(Start(Path("log.jsonl")))


def test_a_file_or_dataset_with_a_similar_name_is_suggested(capsys):
    Path("logs").mkdir()
    Path("logs/calls.jsonl").touch()
    assert "Hint: did you mean logs/calls.jsonl?\n" in refused(capsys, Path("logs/cals.jsonl"))
    assert "Hint: did you mean logs/calls.jsonl?\n" in refused(capsys, Path("logs/calls.json"))
    assert "Hint: check the path: ls logs\n" in refused(capsys, Path("logs/sessions.jsonl"))
    assert "Hint: check the path: ls nowhere\n" in refused(capsys, Path("nowhere/calls.jsonl"))
    Path("runs/sums").mkdir(parents=True)
    for given, hint in {"runs/sms": "did you mean runs/sums?", "runs/x": "check the path"}.items():
        assert run(["validate", given]) == 1
        assert f"Hint: {hint}" in capsys.readouterr().err


def test_other_content_is_still_unknown(capsys):
    Path("notes.md").write_text("# Notes\n")
    assert "notes.md: the format is not recognized" in refused(capsys, Path("notes.md"))


def test_rewards_of_more_than_the_log_are_skipped_as_the_hint_says(capsys):
    lines = (EXAMPLES / "shop.calls.jsonl").read_text().splitlines(keepends=True)
    Path("part.jsonl").write_text("".join(lines[:8]))
    rewards = ("--rewards", str(EXAMPLES / "shop.rewards.jsonl"))
    message = refused(capsys, Path("part.jsonl"), *rewards)
    assert "[unknown_session]" in message
    assert "the rewards file covers more runs than the logs, pass --on-error skip" in message
    assert run(["convert", "part.jsonl", "--out", "out", *rewards, "--on-error", "skip"]) == 0
    rows = rollout_io.scan("out").collect()
    assert len(rows) == 8
    assert rows.filter("is_last_step")["reward"].null_count() == 0
