import json

import pytest

from rollout_io.cli.main import run
from rollout_io.conversion.driver import Keywords, convert
from rollout_io.conversion.summary import Summary
from rollout_io.formats.base import noted, unread_in
from rollout_io.formats.detect import load_formats, matches, recognize
from rollout_io.formats.grammar import SELF, Contents, account
from rollout_io.formats.unread import holds_text
from schemas.errors import InputError
from tests.helpers.adapter_helpers import write_lines

PARTS = Contents(
    kind="type", default="text", reads={"text": "text", "group": ""}, inner={"group/parts": SELF}
)
CONTENTS = Contents(
    kind="type",
    subkind="subtype",
    reads={"*": "uuid", "user": "message.role", "system:note": "text"},
    leaves={"shown only": "user/title", "state": "mode */version"},
    inner={"user/message.content": PARTS},
)


def unread(*records, contents=CONTENTS):
    with noted() as notes:
        for record in records:
            account(contents, record)
    return unread_in(notes)


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"type": "user", "uuid": "u", "title": "x", "version": "y"}, []),
        ({"type": "user", "message": {"role": "user", "content": [{"text": "Hi."}]}}, []),
        ({"type": "user", "message": {"role": "user", "mood": "merry"}}, ["user.message.mood"]),
        ({"type": "user", "origin": {"deep": [{"er": "text"}]}}, ["user.origin"]),
        ({"type": "mode", "anything": "x"}, []),
        ({"type": "novel", "text": "x"}, ["novel"]),
        ({"text": "x"}, ["record"]),
        ({"type": "system", "subtype": "note", "text": "x"}, []),
        ({"type": "system", "subtype": "other", "text": "x"}, ["system"]),
        (
            {"type": "user", "message": {"content": [{"type": "video", "url": "x"}]}},
            ["user.message.content[video]"],
        ),
        (
            {
                "type": "user",
                "message": {"content": [{"type": "group", "parts": [{"type": "odd"}]}]},
            },
            ["user.message.content[group].parts[odd]"],
        ),
    ],
)
def test_what_is_in_neither_list_is_named(record, names):
    assert unread(record) == dict.fromkeys(names, 1)
    assert unread(json.dumps(record).encode()) == dict.fromkeys(names, 1)


@pytest.mark.parametrize("value", [0, False, 0.5, "9e107d9d-372b-4826-bd81-3542a419d6aa", [], {}])
@pytest.mark.parametrize(
    "key", ["weight", "loss_mask", "isHidden", "parentId", "history_base", "train"]
)
def test_what_links_records_or_marks_a_message_is_named_whatever_its_value(key, value):
    assert unread({"type": "user", key: value}) == {f"user.{key}": 1}
    assert unread({"type": "user", key: None}) == {}
    assert unread({"type": "user", "baseline": 7, "weights": value, "branches": 0}) == {}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((v, False) for v in (None, 7, True, "", "12.5", [], {"a": [1, None]}, "--")),
        *((v, False) for v in ("2026-05-01T10:00:00.5Z", "0a1b2c3d-4e5f-4061-8071-2a3b4c5d6e7f")),
        *((v, True) for v in ("yes", ["", {"a": "b"}], {"a": {"b": "Read this."}})),
    ],
)
def test_identifiers_times_and_numbers_are_no_text(value, expected):
    assert holds_text(value) is expected


def test_the_number_of_names_is_bounded_and_no_count_is_lost():
    records = [{"type": f"kind {i}"} for i in range(1000)]
    found = unread(*records)
    assert (len(found), sum(found.values())) == (101, 1000)
    one, other = Summary(), Summary()
    with noted() as notes:
        for record in records:
            account(CONTENTS, record)
    one.notes = dict(notes)
    other.notes = {key.replace("kind", "type"): n for key, n in notes.items()}
    one.merge(other)
    assert (len(one.unread), sum(one.unread.values())) == (101, 2000)


def test_damaged_or_deep_records_are_left_to_the_reader():
    assert unread(b'{"type": ', b'{"a": "\xff"}', b"[" * 100_000) == {}
    deep = {"type": "user", "message": {"content": []}}
    for _ in range(500):
        deep["message"]["content"] = [{"type": "group", "parts": deep["message"]["content"]}]
    assert unread(deep) == {}


def test_the_coverage_counts_the_keys_at_the_top_of_records():
    known = {"type": "user", "uuid": "u", "message": {}, "origin": "x"}
    coverage = CONTENTS.coverage([known, {"type": "novel", "a": 1}, {"type": "mode", "a": 1}])
    assert (coverage.num_known, coverage.num_keys) == (5, 8)
    assert coverage.unknown == ("origin", "novel")
    assert coverage.share == 5 / 8


HERMES = {
    "id": "s1",
    "source": "cli",
    "model": "m",
    "system_prompt": "You are brief.",
    "message_count": 2,
    "title": "Sums",
    "messages": [
        {"id": 1, "role": "user", "content": "1 + 5?", "active": 1},
        {"id": 2, "role": "assistant", "content": "6", "active": 1},
    ],
}


def test_the_format_that_knows_most_keys_of_a_file_is_chosen_and_the_choice_is_explained(
    tmp_path, capsys
):
    formats = load_formats().adapters
    path = write_lines(tmp_path / "s.jsonl", HERMES)
    assert recognize(path, formats) == ["hermes"]
    found = {match.format: match for match in matches(path, formats)}
    assert found["hermes"].coverage.share == 1.0
    assert not found["openai_messages"].is_best
    assert run(["formats", str(path)]) == 0
    out = capsys.readouterr().out
    assert "hermes (7 of 7 keys known; 3 of 7 keys known to openai_messages)" in out
    bare = write_lines(tmp_path / "bare.jsonl", {"messages": HERMES["messages"], "mood": "merry"})
    assert run(["formats", str(bare)]) == 0
    assert "openai_messages (1 of 2 keys known; unknown: mood)" in capsys.readouterr().out


@pytest.mark.model
def test_unread_content_is_a_warning_in_json_and_an_error_with_strict(
    tmp_path, smollm2_dir, capsys
):
    path = write_lines(tmp_path / "s.jsonl", {"messages": HERMES["messages"], "mood": "merry"})
    out, tokenizer = tmp_path / "ds", ["--tokenizer", str(smollm2_dir)]
    assert run(["convert", str(path), "--out", str(out), *tokenizer]) == 0
    assert "warning: content that is neither read nor left out on purpose: mood (1)" in (
        capsys.readouterr().err
    )
    for _ in range(2):  # the second time, the counts are read from the dataset
        assert run(["convert", str(path), "--out", str(out), *tokenizer, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["unread"], found["notes"]) == ({"mood": 1}, {})
    with pytest.raises(InputError) as caught:
        convert([path], tmp_path / "x", tokenizer=str(smollm2_dir), strict=True)
    assert (caught.value.rule, caught.value.where) == ("unread_content", f"{path}:1")
    assert "mood (1)" in caught.value.got


@pytest.mark.slow
@pytest.mark.model
def test_unread_content_has_the_same_counts_with_several_processes(tmp_path, smollm2_dir):
    record = {"messages": HERMES["messages"], "mood": "merry"}
    path = write_lines(tmp_path / "s.jsonl", *[record | {"id": i} for i in range(4)])
    choices = Keywords(tokenizer=str(smollm2_dir))
    counts = [
        convert([path], tmp_path / f"ds{n}", **choices, workers=n, chunk_bytes=200).summary.unread
        for n in (1, 2)
    ]
    assert counts == [{"mood": 4}] * 2


def test_what_is_left_out_entirely_hides_nothing_beside_a_key_that_is_read_in_part():
    contents = Contents(reads={"": "event.result.output"}, leaves={"facts": "event"})
    found = []
    contents.unread(
        {"event": {"id": "a b", "result": {"output": "c", "note": "d e"}}}, found.append
    )
    assert found == ["event.result.note"]
