"""A record that occurs twice is used once; another one under its name is refused."""

import json
import shutil

import pytest

import rollout_io
from rollout_io import convert, read
from rollout_io.conversion.plan import Keywords
from schemas.errors import count
from tests.helpers.conversion_helpers import SHOP, call, refusal, rejected_in, write

SKIP = Keywords(on_error="skip")


def rows_of(dataset):
    table = read(dataset).drop_columns("source").replace_schema_metadata(None)
    return table.to_pylist()


@pytest.mark.parametrize("has_time", [True, False])
def test_a_log_that_is_given_with_its_copy_is_converted_once(has_time, tmp_path):
    records = [json.loads(line) for line in SHOP.read_bytes().splitlines()]
    if not has_time:
        for record in records:
            del record["time"]
    log = write(tmp_path / "a.jsonl", *records)
    copy = write(tmp_path / "b.jsonl", *records[1:], records[0])
    convert(log, tmp_path / "once")
    done = convert([log, copy], tmp_path / "ds", **SKIP)
    assert rows_of(tmp_path / "ds") == rows_of(tmp_path / "once")
    counts, num = done.summary, len(records)
    assert (counts.num_records, counts.num_written, counts.num_rejected) == (2 * num, num, num)
    assert counts.num_duplicates == num
    assert f"{count(num, 'rejected record')} with the same content as another" in counts.text("ds")
    assert {r["rule"] for r in rejected_in(tmp_path / "ds")} == {"duplicate_record"}
    assert refusal([log, copy], tmp_path / "new").rule == "duplicate_record"


def test_a_copy_without_its_last_newline_is_a_copy(tmp_path):
    log = write(tmp_path / "a.jsonl", call("a/0", 5), call("a/0", 6, 7))
    copy = tmp_path / "b.jsonl"
    copy.write_bytes(log.read_bytes().rstrip())
    counts = convert([log, copy], tmp_path / "ds", **SKIP).summary
    assert (counts.num_written, counts.num_rejected, counts.num_duplicates) == (2, 2, 2)


def test_another_call_of_the_same_size_and_time_is_no_copy(tmp_path):
    log = write(tmp_path / "a.jsonl", *(call("a/0", i, time=1) for i in (5, 6, 5)))
    counts = convert(log, tmp_path / "ds", **SKIP).summary
    assert (counts.num_written, counts.num_rejected, counts.num_duplicates) == (2, 1, 1)
    assert read(tmp_path / "ds").column("response_ids").to_pylist() == [[5], [6]]


def test_another_call_under_the_name_of_the_last_is_refused(tmp_path):
    log = write(tmp_path / "a.jsonl", *(call("a/0", i, final=True) for i in (5, 6)), call("b/0"))
    counts = convert(log, tmp_path / "ds", **SKIP).summary
    assert (counts.num_written, counts.num_rejected, counts.num_duplicates) == (1, 2, 0)


FORMATS = {
    "verl": {"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 1},
    "openai_messages": {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_a_copy_of_another_is_one_rejected_record(name, tmp_path, smollm2_dir):
    choices = {"format": name, "tokenizer": str(smollm2_dir)}
    log = write(tmp_path / "a.jsonl", FORMATS[name], FORMATS[name])
    copy = shutil.copy(log, tmp_path / "b.jsonl")
    counts = convert([log, copy], tmp_path / "ds", **choices, on_error="skip").summary
    assert (counts.num_records, counts.num_written, counts.num_duplicates) == (3, 2, 1)
    (rejected,) = rejected_in(tmp_path / "ds")
    assert (rejected["rule"], rejected["source"]) == ("duplicate_input", str(copy))
    error = refusal([log, copy], tmp_path / "new", **choices)
    assert (error.rule, error.where) == ("duplicate_input", str(copy))


def test_a_document_with_a_trajectory_of_another_is_rejected_alone(tmp_path, shop_dataset):
    output = rollout_io.to_generator_output(read(shop_dataset))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    rollout_io.write_generator_output(read(shop_dataset), paths[0])
    content = json.loads(paths[0].read_bytes())
    paths[1].write_text(json.dumps(content | {"rollout_metrics": {"loss": 1.0}}))
    counts = convert(paths, tmp_path / "ds", **SKIP).summary
    assert (counts.num_records, counts.num_written, counts.num_duplicates) == (2, 1, 0)
    assert [r["rule"] for r in rejected_in(tmp_path / "ds")] == ["unique_trajectory"]
    assert len(output["rewards"]) == counts.num_rows
