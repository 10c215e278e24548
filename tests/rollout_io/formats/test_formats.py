import json
import os
import subprocess
import sys
import tempfile
import tomllib
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io.cli.main import run
from rollout_io.conversion.chunk import Settings
from rollout_io.conversion.text import Untokenized
from rollout_io.formats.base import Adapter
from rollout_io.formats.detect import (
    GROUP,
    adapters,
    find_adapter,
    load_formats,
    recognize,
    sort_by_format,
)
from rollout_io.formats.engines.files import Start
from rollout_io.formats.grammar import like
from rollout_io.plugins import Plugin
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.examples import examples

SHOP = EXAMPLES / "shop.calls.jsonl"
REWARDS = EXAMPLES / "shop.rewards.jsonl"
CALL = b'{"session": "a/0", "request": {}, "response": {}}\n'


@pytest.fixture
def formats():
    return load_formats().adapters


def converted(tmp_path, *arguments):
    assert run(["convert", *map(str, arguments), "--out", str(tmp_path / "ds")]) == 0
    return rollout_io.read(tmp_path / "ds")


def format_noted_in(dataset):
    return rollout_io.read_metadata(dataset).made_by[-1]["format"]


def test_every_registered_format_loads_and_says_in_one_line_what_it_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = load_formats({n: Plugin(n, v) for n, v in project["entry-points"][GROUP].items()})
    assert found.failures == {}
    for adapter in found.adapters.values():
        assert 10 < len(adapter.summary) <= 90
        assert "\n" not in adapter.summary


def test_calls_are_recognized_by_their_content_whatever_the_file_is_called(tmp_path, formats):
    (tmp_path / "night.log").write_bytes(SHOP.read_bytes())
    assert recognize(tmp_path / "night.log", formats) == ["calls"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n \n\n",
        b"# Notes",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b"PAR1\x00\x00",
        b'{"session": "a/0", "request": {}}',
        b'{"session": 1, "request": {}, "response": {}}',
        b'{"session": "a/0", "request": {}, "response": 1}',
        b'{"prompt_token_ids": [[1]], "response_ids": [[1]], "rewards": [1]}',
        b'{"id": 1, "prompt_token_ids": [], "response_ids": [], "rewards": [], "loss_masks": []}',
        b"[" * 100_000,
    ],
)
def test_what_no_format_describes_is_of_none(content, tmp_path, formats):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert recognize(tmp_path / "a.jsonl", formats) == []


def test_a_damaged_line_at_the_start_does_not_hide_what_a_log_is(tmp_path, formats):
    log = tmp_path / "cut.jsonl"
    log.write_bytes(CALL[20:] + b"\n" + CALL)
    assert recognize(log, formats) == ["calls"]
    with pytest.raises(RolloutError, match=rf"{log}:1.*\[json_line\]"):
        rollout_io.read_log([log], format="calls")


@given(st.binary(max_size=200) | st.integers(0, len(CALL)).map(lambda n: CALL[:n] * 2))
@example(b"\x00" * 4096)
@example(b'{"rewards": ')
@settings(deadline=None, max_examples=examples(100))
def test_looking_at_any_bytes_never_raises(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        path.write_bytes(content)
        for adapter in load_formats().adapters.values():
            assert adapter.recognizes(Start(path)) in {True, False}
            assert adapter.recognizes(Start(path.parent)) in {True, False}
            assert adapter.recognizes(Start(path / "nowhere")) is False


def test_every_real_log_is_of_one_format_at_most(harness_logs, formats):
    found = {
        str(path.relative_to(harness_logs)): recognize(path, formats)
        for path in sorted(harness_logs.rglob("*"))
    }
    assert len(found) > 50
    assert {path: names for path, names in found.items() if len(names) > 1} == {}


def test_convert_finds_the_format_out_and_notes_it_in_the_dataset(tmp_path, capsys):
    auto = converted(tmp_path, SHOP, "--rewards", REWARDS)
    assert "48 sessions (calls)\n" in capsys.readouterr().err
    assert format_noted_in(tmp_path / "ds") == "calls"
    (tmp_path / "named").mkdir()
    assert auto.equals(
        converted(tmp_path / "named", SHOP, "--rewards", REWARDS, "--format", "calls")
    )
    assert "48 sessions (calls)\n" in capsys.readouterr().err


def test_an_input_of_no_format_is_refused_by_name_with_the_way_to_the_list(tmp_path, capsys):
    inputs = [str(SHOP), str(ROOT / "README.md")]
    assert run(["convert", *inputs, "--out", str(tmp_path / "ds")]) == 1
    said = capsys.readouterr().err
    assert f"Error: {ROOT / 'README.md'}: the format is not recognized" in said
    assert "calls, chats, claude_code, " in said
    assert "Hint: list the formats with `rollouts formats`" in said
    assert not (tmp_path / "ds").exists()


def always(answer):
    return Adapter(summary="anything", recognizes=lambda _: answer, find=zip, read=zip)


def test_an_input_of_several_formats_is_refused_with_their_names():
    known = {"a": always(True), "b": always(False), "c": always(True)}
    with pytest.raises(RolloutError, match="the content matches 2 formats: a, c") as caught:
        sort_by_format({"shop": SHOP}, known, ["shop"])
    assert "--format a" in caught.value.hint
    assert "rollouts formats" in caught.value.hint


def test_inputs_are_sorted_by_format_and_those_of_none_are_left_unless_named(tmp_path, formats):
    output, notes = tmp_path / "output.json", tmp_path / "notes.md"
    rollout_io.write_generator_output(converted(tmp_path, SHOP, "--rewards", REWARDS), output)
    notes.write_text("# Notes")
    paths = {str(path): path for path in (SHOP, notes, output)}
    found, left = sort_by_format(paths, formats, [str(SHOP)])
    assert found == {"calls": [str(SHOP)], "skyrl": [str(output)]}
    assert left == [str(notes)]
    with pytest.raises(RolloutError) as caught:
        sort_by_format(paths, formats, [str(notes)])
    assert (caught.value.rule, caught.value.where) == ("known_format", str(notes))


def test_two_formats_that_both_know_one_input_are_told_apart_by_the_others(tmp_path):
    (tmp_path / "b").touch()
    narrow = Adapter(
        summary="b", recognizes=lambda start: start.path.name == "b", find=zip, read=zip
    )
    paths = {"b": tmp_path / "b", "shop": SHOP}
    formats = {"all": always(True), "narrow": narrow}
    assert sort_by_format(paths, formats, paths) == ({"all": ["b", "shop"]}, [])


def test_a_pipe_is_refused_and_not_waited_for(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run(["convert", str(pipe), "--out", str(tmp_path / "ds")]) == 1
    assert f"Error: cannot read {pipe}: it is a pipe" in capsys.readouterr().err


def test_a_large_file_that_git_did_not_fetch_is_called_so(tmp_path, formats):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "results.jsonl").write_text(pointer)
    with pytest.raises(RolloutError, match=rf".*pointer \({len(pointer)} bytes\).*\[lfs_pointer\]"):
        recognize(tmp_path / "results.jsonl", formats)


def test_an_input_that_is_not_there_is_said_to_be_missing_not_unknown(tmp_path, formats):
    with pytest.raises(RolloutError, match=r"cannot read .*nowhere: no such file.*\[input_file\]"):
        sort_by_format({"nowhere": tmp_path / "nowhere"}, formats, [])


def test_a_format_that_does_not_load_is_named_and_the_others_work():
    entries = {
        "gone": Plugin("gone", "no_such_module:ADAPTER"),
        "nameless": Plugin("nameless", "math:ADAPTER"),
        "number": Plugin("number", "math:pi"),
        "calls": adapters()["calls"],
    }
    found = load_formats(entries)
    assert list(found.adapters) == ["calls"]
    assert found.failures["gone"] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert found.failures["nameless"].startswith("AttributeError")
    assert found.failures["number"] == "an object of type float"


@pytest.fixture
def plugins(tmp_path):
    """A folder as pip leaves it: one format of another package that works, and one that does not."""
    package = tmp_path / "plugins" / "notes-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: notes\nVersion: 1.0\n")
    registered = "notes = notes_format:ADAPTER\nbroken = notes_format:NOTHING\n"
    (package / "entry_points.txt").write_text(f"[{GROUP}]\n{registered}")
    (package.parent / "notes_format.py").write_text(
        "from rollout_io.formats.base import Adapter\n"
        "from rollout_io.formats.calls import find_sessions, read_session\n"
        "ADAPTER = Adapter(\n"
        "    summary='notes', recognizes=lambda start: start.path.suffix == '.notes',\n"
        "    find=find_sessions, read=read_session\n"
        ")\n"
    )
    path = os.pathsep.join([str(package.parent), str(ROOT)])

    def rollouts(*arguments):
        command = [sys.executable, "-m", "rollout_io", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    return rollouts


@pytest.mark.slow
def test_a_format_of_another_package_is_listed_and_one_that_fails_is_named(plugins):
    listed = plugins("formats")
    assert listed.returncode == 0
    lines = dict(line.split(maxsplit=1) for line in listed.stdout.splitlines())
    assert lines["notes"] == "notes"
    assert {"calls", "skyrl"} <= set(lines)
    assert "format broken is not available: AttributeError" in listed.stderr
    records = {r["name"]: r for r in json.loads(plugins("formats", "--json").stdout)}
    assert records["notes"] == {"name": "notes", "summary": "notes", "error": None}
    assert records["broken"]["error"].startswith("AttributeError")


@pytest.mark.slow
def test_a_format_of_another_package_takes_part_in_detection(plugins, tmp_path):
    log = tmp_path / "shop.notes"
    log.write_bytes(SHOP.read_bytes())
    unclear = plugins("convert", log, "--out", tmp_path / "ds")
    assert unclear.returncode == 1
    assert "the content matches 2 formats: calls, notes" in unclear.stderr
    done = plugins("convert", log, "--format", "notes", "--out", tmp_path / "ds")
    assert done.returncode == 0, done.stderr
    assert format_noted_in(tmp_path / "ds") == "notes"
    refused = plugins("convert", log, "--format", "broken", "--out", tmp_path / "ds2")
    assert refused.stderr.startswith("Error: format broken (notes_format:NOTHING)")


def test_formats_says_of_each_file_what_it_is_and_exits_1_if_one_is_unclear(tmp_path, capsys):
    assert run(["formats", str(SHOP)]) == 0
    assert capsys.readouterr().out == f"{SHOP}: calls\n"
    assert run(["formats", str(SHOP), str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == f"{SHOP}: calls\n"
    assert "the directory contains no files. [input_file]" in said.err
    assert run(["formats", "--json", str(SHOP)]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "path": str(SHOP),
            "formats": ["calls"],
            "matches": [
                {"format": "calls", "num_known_keys": None, "num_keys": None, "unknown": []}
            ],
            "num_logs": {"calls": 1},
            "num_skipped": 0,
            "error": None,
        }
    ]
    assert run(["formats", str(tmp_path / "nowhere")]) == 1
    assert "[input_file]" in capsys.readouterr().err


OUTPUT = {
    "prompt_token_ids": [[1, 2], [1, 2, 3, 9], [0]],
    "response_ids": [[3], [5, 6], [0]],
    "rewards": [0.0, 1.0, 0.0],
    "loss_masks": [[1], [0, 1], [0]],
    "stop_reasons": ["tool_call", "stop", "error"],
    "rollout_metrics": {"generate/avg_num_tokens": 1.5},
    "rollout_logprobs": [[-1.5], [0.0, -0.5], [0.0]],
    "trajectory_ids": [
        {"instance_id": "a", "repetition_id": 0},
        {"instance_id": "a", "repetition_id": 0},
        {"instance_id": "a", "repetition_id": 1},
    ],
    "is_last_step": [False, True, True],
    "env_metrics": [None, {"turns": 2.0}, None],
}


def write_output(path, **changes):
    output = {name: value for name, value in (OUTPUT | changes).items() if value is not None}
    path.write_text(json.dumps(output))
    return path


def renamed(instance):
    return [i | {"instance_id": instance} for i in OUTPUT["trajectory_ids"]]


def test_a_generator_output_is_converted_with_the_place_of_each_row(tmp_path, capsys):
    file = write_output(tmp_path / "step_1")
    table = converted(tmp_path, file)
    assert table["response_ids"].to_pylist() == [[3], [5, 6], []]
    assert table["rollout_logprobs"].to_pylist()[1] == [0.0, -0.5]
    assert table["loss_mask"].to_pylist() == [[True], [False, True], []]
    assert table["reward"].to_pylist() == [0.0, 1.0, None]
    assert table["error"].to_pylist()[2].startswith("failed")
    assert table["metrics"].to_pylist() == [None, [{"key": "turns", "value": 2.0}], None]
    assert table["source"].to_pylist() == [f"{file}, row {row}" for row in range(3)]
    assert format_noted_in(tmp_path / "ds") == "skyrl"
    assert "2 calls -> " in capsys.readouterr().err


def read_outputs(*paths, **choices):
    return rollout_io.read_log(paths, format="skyrl", **choices)


def test_several_generator_outputs_share_one_schema(tmp_path):
    first = write_output(tmp_path / "1", rollout_logprobs=None, env_metrics=None)
    second = write_output(tmp_path / "2", trajectory_ids=renamed("b"), rollout_metrics=None)
    table = read_outputs(first, second)
    assert table["rollout_logprobs"].null_count == 3
    assert table["instance_id"].to_pylist() == ["a"] * 3 + ["b"] * 3


ROUTES = [[[[0, 1]]], [[[0, 1]]], None]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "{b}: trajectory 'a_0' also occurs in {a}"),
        ({"rewards": None}, "{b}, GeneratorOutput, rewards: the required field is missing"),
        ({"rewards": [1.0]}, "{b}, GeneratorOutput, rewards: found a list of length 1"),
        ({"reward": [1.0]}, "{b}, GeneratorOutput, reward: the field is unknown"),
        (
            {"loss_masks": [[1], [1], [0]]},
            "{b}, table, row 1 (trajectory a_0, step 1): loss_mask has 1 values",
        ),
        (
            {"trajectory_ids": renamed("b"), "rollout_expert_indices": [[[[0]]], None, None]},
            "{b}: the routing has 1 layers, top 1",
        ),
    ],
)
def test_a_bad_generator_output_is_refused_with_its_file(changes, says, tmp_path):
    a = write_output(tmp_path / "a.json", rollout_expert_indices=ROUTES)
    b = write_output(tmp_path / "b.json", **changes)
    with pytest.raises(RolloutError) as caught:
        rollout_io.convert([a, b], tmp_path / "ds", format="skyrl")
    assert str(caught.value).startswith(says.format(a=a, b=b))
    assert not (tmp_path / "ds").exists()


def test_bad_generator_outputs_are_counted(tmp_path):
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text(f'{{"rewards": [{file.name}')
    with pytest.raises(RolloutError, match=r".*and 2 more records rejected.*\[json_document\]"):
        read_outputs(*files)


def test_a_rewards_file_beside_a_generator_output_is_refused(tmp_path):
    file = write_output(tmp_path / "a.json")
    with pytest.raises(RolloutError, match=r"--rewards: logs in .* already.*\[choices\]"):
        read_outputs(file, rewards=str(REWARDS))
    with pytest.raises(RolloutError, match="duplicate_input"):
        read_outputs(file, tmp_path / "." / "a.json")


@pytest.mark.parametrize("name", load_formats().adapters)
def test_a_format_is_the_same_in_the_processes_of_a_conversion(name):
    sent = Settings(adapter=find_adapter(name), format=name, retokenizer=Untokenized())
    assert ForkingPickler.loads(ForkingPickler.dumps(sent)).adapter == sent.adapter


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        ({"type": {"a", "b"}}, {"type": "b", "other": 1}, {"type": "c"}),
        ({"type": {"a"}}, {"type": "a"}, {"type": ["a"]}),
        ({"id": str, "message": None}, {"id": "1"}, {"id": "1", "message": None}),
        ({"id": object}, {"id": None}, {}),
        ({"message": {"parts": list}}, {"message": {"parts": []}}, {"message": []}),
        ({"lines": [{"type": str}]}, {"lines": []}, {"lines": [{"type": "a"}, {}]}),
        ({"version": 2}, {"version": 2}, {"version": 3}),
    ],
)
def test_a_record_has_the_form_of_a_pattern_or_not(pattern, fits, fails):
    assert like(pattern)(fits)
    assert not like(pattern)(fails)
    assert like({"no": str}, pattern)(fits)
