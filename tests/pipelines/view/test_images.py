"""The pictures of a conversation, from the dataset's store only."""

import base64
import hashlib
import json

import pytest

import rollout_io
import rollout_io.formats.exports
from pipelines.view.export import export, key_of
from tests.helpers.conversion_helpers import write
from tests.helpers.picture_rows import MISSING, WAYS, picture, write_steps
from tests.helpers.report_helpers import answers_in
from tests.helpers.view_helpers import Asked, bundle_in

PICTURE = b"\x89PNG\r\n\x1a\n a picture" * 100
DOCUMENT = b"%PDF-1.7 a document" * 100
DATA = base64.b64encode(PICTURE).decode()
BLOB = f"sha256:{hashlib.sha256(PICTURE).hexdigest()}"
FILE = f"sha256:{hashlib.sha256(DOCUMENT).hexdigest()}"
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    file = {"file_data": base64.b64encode(DOCUMENT).decode(), "filename": "plan.pdf"}
    shown = [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "file", "file": file},
    ]
    result = [{"type": "text", "text": "done"}, {"type": "image_url", "image_url": {"url": URL}}]
    web = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    messages = [
        {"role": "user", "content": shown},
        {"role": "tool", "tool_call_id": "c", "content": result},
        {"role": "user", "content": web},
    ]
    message = {"role": "assistant", "content": "A cat."}
    line = {
        "session": "a/0",
        "request": {"messages": messages},
        "response": {
            "prompt_token_ids": [1],
            "choices": [{"index": 0, "token_ids": [2], "message": message}],
        },
    }
    rollout_io.convert([write(folder / "a.calls.jsonl", line)], folder / "ds")
    return folder / "ds"


def test_a_conversation_lists_pictures_and_files_where_they_are(dataset):
    found = Asked(dataset)("/api/datasets/d0/conversation", trajectory_id="a_0")
    parts = [
        [(part["type"], part["text"][:9]) for part in turn["parts"]]
        for turn in found["lanes"][0]["turns"]
    ]
    assert parts[:3] == [
        [("text", "See"), ("image", BLOB[:9]), ("file", FILE[:9])],
        [("tool_result", "done"), ("image", BLOB[:9])],
        [("image", "https://e")],
    ]
    assert [turn["num_chars"] for turn in found["lanes"][0]["turns"]] == [3, 4, 0, 6]


def test_a_picture_is_served_by_its_digest_and_nothing_else_is(dataset):
    ask = Asked(dataset)
    assert ask("/api/datasets/d0/picture", blob=BLOB) == {"url": URL}
    for other in (FILE, "../ds/part-00000.parquet", "/etc/passwd", "sha256:" + "0" * 64, BLOB[7:]):
        assert ask("/api/datasets/d0/picture", blob=other) == {"url": None}, other


def test_a_report_has_each_picture_once(dataset, tmp_path):
    bundle, out = bundle_in(tmp_path / "bundle"), tmp_path / "report.html"
    export(Asked(dataset).sources, bundle, str(out), where=None, limit=5)
    key = key_of("/api/datasets/d0/picture", blob=BLOB)
    assert json.loads(answers_in(out)[key]) == {"url": URL}


def test_a_picture_that_was_changed_is_not_shown(dataset, tmp_path):
    rollout_io.formats.exports.export(dataset, tmp_path / "ds", "parquet")
    (tmp_path / "ds.blobs" / f"{BLOB[7:]}.png").unlink()
    (tmp_path / "ds.blobs" / f"{BLOB[7:]}.png").symlink_to("/etc/hostname")
    ask = Asked(tmp_path / "ds")
    assert ask("/api/datasets/d0/picture", blob=BLOB) == {"url": None}


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_of_a_row_come_with_the_pictures_at_them(way, tmp_path):
    entry = write_steps(tmp_path / "ds", way)
    ask = Asked(tmp_path / "ds")
    rows = [[entry, MISSING]] if way == "merged" else [[entry], [entry, MISSING]]
    for step, entries in enumerate(rows):
        table = ask.table("/api/datasets/d0/tokens", trajectory_id="a_0", step_index=step)
        assert json.loads(table.schema.metadata[b"pictures"]) == entries
        ids = table.column("id").to_pylist()
        spans = [ids[one["start"] :][: one["length"]] for one in entries]
        assert spans == [[9] * one["length"] for one in entries]


def test_a_report_has_the_pictures_of_tokens_without_messages_and_says_how_many_it_lacks(tmp_path):
    entry = write_steps(tmp_path / "ds", "prefix")
    bundle, out = bundle_in(tmp_path / "bundle"), tmp_path / "report.html"
    summary = export(Asked(tmp_path / "ds").sources, bundle, str(out), where=None, limit=5)
    assert "without 1 picture that cannot be read" in summary
    urls = [
        json.loads(answers_in(out)[key_of("/api/datasets/d0/picture", blob=one["sha256"])])["url"]
        for one in (entry, MISSING)
    ]
    assert urls == [f"data:image/png;base64,{base64.b64encode(picture()).decode()}", None]
