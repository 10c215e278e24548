"""Whatever surrounds a command, it ends with a sentence, a rule and exit code 1."""

import errno
import json
import os
import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rollout_io
from rollout_io.cli.main import run
from rollout_io.configuration import load_record
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.table_helpers import write_example
from trainer.config.train_config import TrainConfig

CALLS = str(EXAMPLES / "shop.calls.jsonl")
REWARDS = str(EXAMPLES / "shop.rewards.jsonl")
PROGRAM = f"{sys.executable} -m rollout_io"
VERBS = [
    "stats DS",
    "stats DS --json",
    "validate DS",
    "inspect DS",
    "drift DS",
    "merge DS --out OUT",
    f"convert {CALLS} --rewards {REWARDS} --out OUT",
    "export DS --format skyrl --out OUT.json",
    "formats",
    "--help",
]


def shell(text, cwd):
    """Run a shell command; return its exit code, stdout and stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def said_well(code, err, rule=None):
    assert code == 1, err
    assert "unexpected" not in err
    assert "Traceback" not in err
    assert f"[{rule}]" in err if rule else "]\n" in err


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_without_a_working_directory_a_command_says_so(tmp_path, verb):
    ds = write_example(tmp_path)
    words = verb.replace("DS", str(ds)).replace("OUT", "out")
    (tmp_path / "gone").mkdir()
    code, _, err = shell(f"cd gone && rmdir ../gone && {PROGRAM} {words}", tmp_path)
    if code == 0:  # nothing of it needs the directory
        assert verb in {"--help", "formats", "validate DS", "stats DS", "stats DS --json"}
        return
    said_well(code, err, None)
    assert "working directory" in err or "No such file" in err or "no such file" in err


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&-", ">&- 2>&-"])
@pytest.mark.parametrize("verb", VERBS)
def test_with_a_closed_stdout_a_command_ends_quietly(tmp_path, verb, closed):
    ds = write_example(tmp_path)
    words = verb.replace("DS", str(ds)).replace("OUT", str(tmp_path / "out"))
    code, _, err = shell(f"{PROGRAM} {words} {closed}", tmp_path)
    assert code in {0, 1}
    assert "Error" not in err or "[reward_known]" in err  # an export needs rewards
    assert "Traceback" not in err
    if verb.startswith(("stats", "inspect", "formats", "--help")):
        assert code == 1
    if verb.startswith(("merge", "convert")):
        assert rollout_io.read(tmp_path / "out").num_rows > 0  # nothing was printed into it


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_without_stderr_a_command_does_its_work(tmp_path, verb):
    ds = write_example(tmp_path)
    words = verb.replace("DS", str(ds))
    closed, plain = (words.replace("OUT", str(tmp_path / name)) for name in ("out", "other"))
    code, _, _ = shell(f"{PROGRAM} {closed} 2>&-", tmp_path)
    assert code == shell(f"{PROGRAM} {plain}", tmp_path)[0]


@pytest.mark.slow
def test_a_closed_stdin_is_refused_where_it_is_read(tmp_path):
    code, _, err = shell(f"{PROGRAM} convert - --out out <&-", tmp_path)
    said_well(code, err, "input_file")
    assert "standard input is closed" in err


@pytest.mark.parametrize(
    ("raised", "rule"),
    [
        (OSError(errno.EIO, "Input/output error"), "file"),
        (OSError(errno.EIO, "Input/output error", "/x/a.jsonl"), "file"),
        (OSError(errno.ESTALE, "Stale file handle"), "file"),
        (OSError("no number at all"), "file"),
        (TimeoutError(), "file"),
        (RecursionError("maximum recursion depth exceeded"), "nesting"),
        (MemoryError(), "memory"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("verb", ["validate", "stats", "inspect", "merge"])
def test_an_error_of_the_system_is_a_sentence(monkeypatch, capsys, raised, rule, verb):
    from importlib import import_module

    package = "rollout_io" if verb in {"validate", "inspect"} else "pipelines"
    command = getattr(import_module(f"{package}.cli.{verb}"), verb)

    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(command, "callback", fail)
    words = ["x", "--out", "y"] if verb == "merge" else ["x"]
    said_well(run([verb, *words]), capsys.readouterr().err, rule)


@pytest.mark.parametrize("verb", ["convert", "formats"])
def test_nested_directories_are_read_or_refused(tmp_path, monkeypatch, capsys, verb):
    top = tmp_path / "n"
    top.mkdir()
    monkeypatch.chdir(top)
    for _ in range(150):  # a path of more than 4,096 bytes
        os.mkdir("d" * 30)  # noqa: PTH102
        os.chdir("d" * 30)
    monkeypatch.chdir(tmp_path)
    words = ["--out", str(tmp_path / "out")] if verb == "convert" else []
    assert run([verb, "n", *words]) == 1
    assert "unexpected" not in capsys.readouterr().err


KINDS = {
    "decimal256": pa.decimal256(50, 2),
    "nested decimal256": pa.list_(pa.decimal256(60, 0)),
    "a struct with one": pa.struct([("x", pa.decimal256(40, 1))]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words",
    [
        *(["stats"], ["validate"], ["inspect"], ["drift"], ["merge", "--out", "OUT"]),
        ["filter", "--where", "return > 0", "--out", "OUT"],
        ["export", "--format", "skyrl", "--out", "OUT"],
    ],
    ids=lambda words: words[0],
)
def test_a_column_that_polars_has_no_type_for_is_named(tmp_path, capsys, kind, words):
    table = rollout_io.read(write_example(tmp_path))
    value = {"decimal256": Decimal(1), "nested decimal256": [Decimal(1)]}.get(kind)
    value = value or {"x": Decimal(1)}
    column = pa.array([value] * table.num_rows, KINDS[kind])
    file = tmp_path / "odd.parquet"
    pq.write_table(table.append_column("cost", column), file)
    verb, *options = words
    options = [str(tmp_path / "out") if word == "OUT" else word for word in options]
    code = run([verb, str(file), *options])
    captured = capsys.readouterr()
    assert code == 1
    assert "unexpected" not in captured.err
    said = captured.out + captured.err
    assert "cost" in said
    assert "columns_and_types" in said


HUGE = {
    "digits": "batch.max_updates=" + "9" * 5000,
    "an integer": "run.seed=" + "9" * 30,
    "a number": "optimizer.learning_rate=" + "1" * 400,
    "a list": "batch.max_updates=" + "[" * 100_000,
    "tables": "loss.own=" + "{a=" * 5000,
    "a text": "batch.max_updates=" + "x" * 100_000,
    "a key": "x" * 100_000 + "=1",
    "a dotted key": "loss.own." + ".".join("a" * 5000) + "=1",
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_setting_is_refused_in_a_short_sentence(name):
    with pytest.raises((RolloutError, RecursionError)) as caught:
        load_record(TrainConfig, None, [HUGE[name]], {"model.path": "m"}, required={})
    if isinstance(caught.value, RolloutError):
        assert caught.value.rule in {"config_value", "config_key"}
        assert len(str(caught.value)) < 1500


ODD = {
    "nested": "[" * 100_000,
    "nested inside": '{"model_type": "llama", "x": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "a list": "[]",
    "text": "config",
    "an odd dtype": json.dumps({"model_type": "llama", "dtype": "floaty"}),
    "a dtype list": json.dumps({"model_type": "llama", "torch_dtype": ["float32"]}),
    "bitsandbytes": json.dumps(
        {
            "model_type": "llama",
            "quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"},
        }
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_model_with_an_odd_configuration_is_refused(tmp_path, capsys, name):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(ODD[name])
    ds = write_example(tmp_path)
    words = ["train", str(ds), "--model", str(model), "--out", str(tmp_path / "run")]
    code = run(words)
    said_well(code, capsys.readouterr().err)
