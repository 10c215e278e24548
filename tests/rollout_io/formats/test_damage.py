"""Damaged JSON is called damaged, with the format that it looks like and where it breaks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.cli.main import run
from rollout_io.formats.detect import explanation, load_formats
from rollout_io.formats.unrecognized import damage_in, mended
from tests.conftest import ROOT
from tests.helpers.conversation_writers import log_of, opencode_tables
from tests.helpers.structural_logs import CONVERSATION
from tests.rollout_io.formats.test_opencode import save_storage

SHOP = ROOT / "examples" / "shop.calls.jsonl"
FORMATS = load_formats().adapters
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def is_beginning(part, whole):
    """True if a value is another one with its end left out."""
    if isinstance(part, list):
        both = list(zip(part, whole, strict=False))
        return isinstance(whole, list) and len(part) <= len(whole) and _follow(both)
    if isinstance(part, dict):
        both = [(value, whole.get(key)) for key, value in part.items()]
        return isinstance(whole, dict) and part.keys() <= whole.keys() and _follow(both)
    return part == whole


def _follow(both):
    return all(is_beginning(one, other) for one, other in both)


@given(values, st.data())
def test_the_beginning_of_a_document_closes_to_a_document_with_its_first_values(value, data):
    content = json.dumps(value, indent=data.draw(st.sampled_from([None, 1]))).encode()
    cut = data.draw(st.integers(0, len(content)))
    found = mended(content[:cut])
    if found is not None:
        assert is_beginning(json.loads(found), value)


@pytest.mark.parametrize(
    "content", [b"", b"{name} is a template", b"[a](b)", b"{", b'{"a', b"\xff"]
)
def test_what_has_no_value_is_not_called_json(content, tmp_path):
    assert mended(content) is None
    (tmp_path / "a.txt").write_bytes(content)
    assert damage_in("a.txt", tmp_path / "a.txt", lambda _: ["calls"]) is None


@pytest.mark.parametrize("name", ["gemini_cli", "mini_swe_agent"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_document_that_was_cut_off_is_told_with_its_format(name, indent, tmp_path):
    content, file = log_of(name, [m for m in CONVERSATION if m["role"] != "system"])
    whole = json.dumps(json.loads(content), indent=indent)
    path = tmp_path / file
    path.write_text(whole[: len(whole) * 4 // 5])
    error = explanation(str(path), path, FORMATS)
    assert error.rule == "json_document"
    assert f"cut off after {len(path.read_bytes().rstrip()):,} bytes; it looks like {name}" in str(
        error
    )


def test_a_sound_document_of_no_format_is_not_called_damaged(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n {"a": "b"},\n {"c": "d"}\n]\n')
    assert explanation(str(path), path, FORMATS) is None


def test_a_line_that_breaks_is_told_with_its_place_and_format(tmp_path, capsys):
    line = SHOP.read_text().splitlines()[0]
    path = tmp_path / "log.jsonl"
    broken = line.replace('"response"', '"more": 1,, "response"')
    path.write_text(f"{broken}\n{broken}\n")
    assert run(["formats", str(path)]) == 1
    said = capsys.readouterr()
    assert (said.out, "invalid JSON" in said.err) == ("", True)
    at = broken.index(",,") + 2
    assert f"{path}:1: invalid JSON: " in said.err
    assert f"at column {at}" in said.err
    assert "[json_line]" in said.err


def test_convert_tells_damage_as_formats_does(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text(SHOP.read_text().splitlines()[0][:-40])
    assert run(["convert", str(path), "--out", str(tmp_path / "ds")]) == 1
    said = capsys.readouterr().err
    assert run(["formats", str(path)]) == 1
    assert said == capsys.readouterr().err
    assert "a.jsonl:1: the line is cut off" in said.replace("log.jsonl", "a.jsonl")
    assert "it looks like calls. [json_line]" in said


def test_one_wrong_path_does_not_hide_the_answers_for_the_others(tmp_path, capsys):
    nowhere, text = tmp_path / "nowhere", tmp_path / "notes.md"
    text.write_text("Notes\n")
    assert run(["formats", str(nowhere), str(SHOP), str(text), str(tmp_path / "*.x")]) == 1
    said = capsys.readouterr()
    assert said.out == f"{SHOP}: calls\n{text}: no known format\n"
    assert said.err.count("[input_file]") == 2
    assert run(["formats", "--json", str(nowhere), str(SHOP)]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["formats"], second["formats"]) == ([], ["calls"])
    assert (first["error"] is None, second["error"]) == (False, None)


def test_a_directory_has_the_formats_that_convert_reads(tmp_path, capsys):
    logs = tmp_path / "logs"
    (logs / "deep").mkdir(parents=True)
    (logs / "shop.jsonl").write_text(SHOP.read_text())
    (logs / "deep" / "pi.jsonl").write_bytes(log_of("pi", CONVERSATION)[0])
    (logs / "notes.md").write_text("Notes\n")
    assert run(["formats", str(logs)]) == 0
    assert capsys.readouterr().out == f"{logs}: pi (1 log), calls (1 log); 1 entry skipped\n"
    assert run(["formats", "--json", str(logs)]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["formats"], answer["num_skipped"]) == (["pi", "calls"], 1)
    assert answer["num_logs"] == {"pi": 1, "calls": 1}


def test_a_directory_that_is_one_log_has_its_format(tmp_path, capsys):
    storage = save_storage(tmp_path / "storage", opencode_tables(CONVERSATION))
    assert run(["formats", str(storage)]) == 0
    assert capsys.readouterr().out == f"{storage}: opencode\n"
