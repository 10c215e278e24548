"""`convert --redact`: no secret of the log is in a file that is left."""

import json
import shutil

import pytest

from rollout_io import scan, validate
from rollout_io.cli.main import run

KEY, TOKEN = "AKIAQ3EGRMZ7WQ2LFJ5T", "ghp_0123456789abcdefghijABCDEFGHIJ0123AB"

pytestmark = pytest.mark.slow  # the scanner compiles its rules first


@pytest.fixture
def log(tmp_path):
    lines = [
        [
            {"role": "user", "content": f"the key is {KEY} ok?"},
            {"role": "assistant", "content": "ok"},
        ],
        [
            {"role": "user", "content": f"use {TOKEN} now"},
            {"role": "assistant", "content": f"I saw {TOKEN}"},
        ],
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return path


def test_a_converted_log_keeps_no_secret_in_any_file(log, smollm2_dir, tmp_path, capsys):
    out = tmp_path / "out" / "ds"
    arguments = [
        "convert",
        str(log),
        "--tokenizer",
        str(smollm2_dir),
        "--out",
        str(out),
        "--redact",
    ]
    assert run([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["redacted"]["num_secrets"] == 2
    assert printed["num_records"] == 2
    validate(out)
    assert [path.name for path in out.parent.iterdir()] == ["ds"]
    rows = scan(out).collect()
    assert rows["redacted"].explode().any()
    for secret in (KEY, TOKEN):
        assert secret not in str(rows.to_dicts())
        assert all(
            secret.encode() not in path.read_bytes() for path in out.rglob("*") if path.is_file()
        )
    assert run(arguments) == 1
    assert "[out_is_free]" in capsys.readouterr().err


def test_rejected_records_would_keep_secrets_and_are_refused(log, smollm2_dir, tmp_path, capsys):
    arguments = [
        "convert",
        str(log),
        "--tokenizer",
        str(smollm2_dir),
        "--out",
        str(tmp_path / "ds"),
    ]
    assert run([*arguments, "--redact", "--on-error", "skip"]) == 2
    assert "--redact writes no rejected records" in capsys.readouterr().err


@pytest.mark.parametrize("hint", ["copy", "unknown_reward"])
def test_hints_name_only_what_the_command_takes(log, smollm2_dir, tmp_path, capsys, hint):
    out = ["--tokenizer", str(smollm2_dir), "--out", str(tmp_path / "ds")]
    if hint == "copy":
        shutil.copy(log, tmp_path / "again.jsonl")
        arguments = ["convert", str(tmp_path / "*.jsonl"), *out]
    else:
        (tmp_path / "more.rewards").write_text('{"session": "other/0", "reward": 1}\n')
        arguments = ["convert", str(log), "--rewards", str(tmp_path / "more.rewards"), *out]
    assert run(arguments) == 1
    assert "--on-error skip" in capsys.readouterr().err
    assert run([*arguments, "--redact"]) == 1
    said = capsys.readouterr().err
    assert "Hint: " in said
    assert "--on-error" not in said


def test_a_hidden_directory_that_others_can_read_or_place_is_refused(
    log, smollm2_dir, tmp_path, capsys
):
    hidden, other = tmp_path / ".ds.unredacted", tmp_path / "other"
    options = ["--tokenizer", str(smollm2_dir), "--out", str(tmp_path / "ds"), "--redact"]
    other.mkdir(mode=0o700)
    hidden.symlink_to(other)
    for word in ("is a link", "can be read by others"):
        assert run(["convert", str(log), *options]) == 1
        said = capsys.readouterr().err
        assert word in said
        assert str(hidden) in said
        assert not list(other.iterdir())
        hidden.unlink() if hidden.is_symlink() else hidden.rmdir()
        hidden.mkdir(mode=0o755)
        hidden.chmod(0o755)
    hidden.chmod(0o700)
    assert run(["convert", str(log), *options]) == 0
    assert not hidden.exists()
    # Killed after the dataset was written, and before the unredacted rows were removed.
    hidden.mkdir(mode=0o700)
    assert run(["convert", str(log), *options]) == 1
    said = capsys.readouterr().err
    assert str(hidden) in said
    assert "unredacted rows of a killed command" in said
