"""Pictures in logs: stored once beside the dataset, and kept by every verb."""

import base64
import hashlib
import json
import random

import polars as pl
import pyarrow.compute as pc
import pytest
import torch

import rollout_io
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from rollout_io.dataset.blobs import Blobs
from rollout_io.formats.exports import export
from rollout_io.retokenize import load_tokenizer
from schemas.checker import ValidationError
from schemas.errors import InvariantError, RolloutError
from tests.helpers.conversion_helpers import in_subprocess, write


def picture(seed, size=2000):
    return b"\x89PNG\r\n\x1a\n" + random.Random(seed).randbytes(size)


def text_of(content):
    return base64.b64encode(content).decode()


def name_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


ONE, TWO, THREE = (picture(i) for i in range(3))
ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": text_of(ONE)},
}
OPENAI = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(TWO)}"}}
RESPONSES = {"type": "input_image", "image_url": f"data:image/png;base64,{text_of(THREE)}"}
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<file_sep><filename><file_sep>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
"""A template with a placeholder of three tokens for a picture."""


def chat(*parts, answer="A cat."):
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


@pytest.fixture
def choices(smollm2_dir):
    return Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")


@pytest.fixture
def dataset(tmp_path, choices):
    log = write(
        tmp_path / "chat.jsonl",
        {"id": "a", "messages": chat(ANTHROPIC, OPENAI), "reward": 1.0},
        {"id": "b", "messages": chat(RESPONSES, ANTHROPIC), "reward": 0.0},
    )
    rollout_io.convert([log], tmp_path / "ds", **choices)
    return tmp_path / "ds"


def stored(dataset):
    folder = dataset.with_name(f"{dataset.name}.blobs")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def blobs_of(dataset):
    rows = rollout_io.read(dataset)["pictures"].to_pylist()
    return [[entry["sha256"] for entry in row or ()] for row in rows]


@pytest.mark.model
def test_each_picture_is_stored_once_byte_for_byte_and_messages_name_it_by_its_digest(dataset):
    assert stored(dataset) == {
        f"{hashlib.sha256(content).hexdigest()}.png": content for content in (ONE, TWO, THREE)
    }
    assert blobs_of(dataset) == [[name_of(ONE), name_of(TWO)], [name_of(THREE), name_of(ONE)]]
    user, _ = json.loads(rollout_io.read(dataset)["messages"][0].as_py())
    shown = [{"type": "image", "blob": name_of(c), "media_type": "image/png"} for c in (ONE, TWO)]
    assert user["content"] == [{"type": "text", "text": "What is this?"}, *shown]


@pytest.mark.model
def test_a_template_without_a_placeholder_gets_a_marked_text_and_the_summary_counts_it(
    tmp_path, choices
):
    log = write(tmp_path / "chat.jsonl", {"messages": chat(ANTHROPIC, OPENAI)})
    notes = rollout_io.convert([log], tmp_path / "ds", **choices).summary.to_dict()["notes"]
    row = rollout_io.read(tmp_path / "ds").to_pylist()[0]
    tokenizer = load_tokenizer(choices["tokenizer"])
    assert tokenizer.decode(row["prompt_token_ids"]).count("[image]") == 2
    assert [entry["start"] for entry in row["pictures"]] == [None, None]
    assert {what: n for what, n in notes.items() if "images" in what} == {
        "images and other parts stored beside the dataset, in its .blobs": 2,
        "images and other parts that are not text, each replaced by a mark such as [image]": 2,
        "re-tokenized rows with images or other parts that are not text": 1,
        "images whose tokens are unknown": 2,
    }


@pytest.mark.slow
@pytest.mark.model
def test_a_template_with_a_placeholder_gets_its_tokens(tmp_path, choices):
    template = tmp_path / "vision.jinja"
    template.write_text(TEMPLATE)
    seen = [*chat(ANTHROPIC, OPENAI), *chat(RESPONSES, answer="<filename> is a word here.")]
    log = write(tmp_path / "chat.jsonl", {"messages": seen})
    rollout_io.convert(
        [log], tmp_path / "ds", tokenizer=choices["tokenizer"], chat_template=str(template)
    )
    row = rollout_io.read(tmp_path / "ds").to_pylist()[0]
    tokenizer = load_tokenizer(choices["tokenizer"], str(template))
    plain = [
        {**m, "content": [{"type": p["type"].replace("image_url", "image").replace("input_", "")}
                          | {"text": p.get("text")} for p in m["content"]]}
        if isinstance(m["content"], list) else m for m in seen
    ]  # fmt: skip
    ids = row["prompt_token_ids"] + row["response_ids"]
    rendered = tokenizer.backend.apply_chat_template(plain, tokenize=False)
    assert tokenizer.decode(ids) == rendered
    token = tokenizer.backend.convert_tokens_to_ids("<filename>")
    assert ids.count(token) == 3, "words are no pictures"
    assert [entry["start"] for entry in row["pictures"]] == [None] * 3, "not expanded"


@pytest.mark.model
def test_what_the_log_does_not_have_is_kept_as_it_is_and_counted(tmp_path, choices):
    there, text = tmp_path / "there.png", tmp_path / "secret.txt"
    there.write_bytes(ONE)
    text.write_text("no picture")
    urls = ["https://example.com/a.png", "there.png", (tmp_path / "gone.png").as_uri(), str(text)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "input_image", "file_id": "file-1"})
    parts.append({"type": "image", "source": {"type": "base64", "data": "not base64!"}})
    log = write(tmp_path / "chat.jsonl", {"messages": chat(*parts)})
    notes = rollout_io.convert([log], tmp_path / "ds", **choices).summary.to_dict()["notes"]
    assert blobs_of(tmp_path / "ds") == [[None, name_of(ONE), None, None, None, None]]
    counts = {what.partition("parts ")[2][:24]: n for what, n in notes.items()}
    assert counts["that the log has only as"] == 1
    assert counts["in files that do not exi"] == 2
    assert counts["that only the API has, u"] == 1
    assert counts["with invalid base64, kep"] == 1
    assert list(stored(tmp_path / "ds").values()) == [ONE]


@pytest.mark.model
def test_a_file_is_found_by_its_path_or_its_url(tmp_path, choices):
    there = tmp_path / "there.png"
    there.write_bytes(ONE)
    for number, url in enumerate((str(there), there.as_uri(), "./there.png")):
        part = {"type": "image_url", "image_url": {"url": url}}
        log = write(tmp_path / f"{number}.jsonl", {"messages": chat(part)})
        rollout_io.convert([log], tmp_path / f"ds{number}", **choices)
        assert blobs_of(tmp_path / f"ds{number}") == [[name_of(ONE)]]


@pytest.mark.model
def test_base64_that_the_model_wrote_itself_is_no_picture_of_the_log(tmp_path, choices):
    call = {"id": "c", "name": "draw", "arguments": {"data": text_of(ONE)}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    log = write(
        tmp_path / "chat.jsonl", {"messages": [{"role": "user", "content": "Draw a cat."}, said]}
    )
    rollout_io.convert([log], tmp_path / "ds", **choices)
    table = rollout_io.read(tmp_path / "ds")
    assert "pictures" not in table.column_names
    answer = json.loads(table["messages"][0].as_py())[-1]
    arguments = json.loads(answer["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"data": text_of(ONE)}
    assert not (tmp_path / "ds.blobs").exists()


def exact(session, ids, *parts, time=0.0):
    content = [{"type": "text", "text": "Look."}, *parts]
    choice = {"index": 0, "token_ids": [7, 8], "message": {"role": "assistant", "content": "ok"}}
    return {
        "session": session,
        "time": time,
        "request": {"messages": [{"role": "user", "content": content}]},
        "response": {"prompt_token_ids": ids, "choices": [choice]},
    }


@pytest.fixture
def steps(tmp_path):
    """A session whose second call extends the first one by an observation with a picture."""
    first = exact("a/0", [1, 2], ANTHROPIC, time=1.0)
    second = exact("a/0", [1, 2, 7, 8, 3], ANTHROPIC, OPENAI, time=2.0)
    log = write(tmp_path / "a.calls.jsonl", first, second, exact("b/0", [4], RESPONSES))
    rollout_io.convert([log], tmp_path / "ds")
    return tmp_path / "ds"


@pytest.mark.parametrize("layout", ["prefix", "full"])
def test_merge_unmerge_and_both_layouts_keep_the_pictures(steps, tmp_path, layout):
    assert run(["merge", str(steps), "--out", str(tmp_path / "m"), "--layout", layout]) == 0
    assert run(["merge", "--undo", str(tmp_path / "m"), "--out", str(tmp_path / "u")]) == 0
    assert blobs_of(tmp_path / "m") == [[name_of(ONE), name_of(TWO)], [name_of(THREE)]]
    assert blobs_of(tmp_path / "u") == blobs_of(steps)
    for made in ("m", "u"):
        assert stored(tmp_path / made) == stored(steps)
        assert run(["validate", str(tmp_path / made)]) == 0


def test_a_filter_takes_along_only_the_pictures_of_its_rows(steps, tmp_path):
    where = ["--where", "instance_id = 'b'"]
    assert run(["filter", str(steps), *where, "--out", str(tmp_path / "f")]) == 0
    assert list(stored(tmp_path / "f").values()) == [THREE]
    (name,) = stored(tmp_path / "f")
    folders = (tmp_path / "f.blobs", steps.with_name("ds.blobs"))
    assert len({(folder / name).stat().st_ino for folder in folders}) == 1, "a link, no copy"


def test_a_dataset_whose_pictures_are_missing_or_changed_is_invalid(steps, capsys):
    folder = steps.with_name("ds.blobs")
    (first, second, third) = sorted(folder.iterdir())
    first.unlink()
    second.write_bytes(b"\x89PNG\r\n\x1a\nanother picture")
    breaches = rollout_io.check(steps)
    assert set(breaches["rule"]) == {"picture_reference"}
    assert set(breaches["column"]) == {"pictures"}
    assert run(["validate", str(steps)]) == 1
    assert "[picture_reference]" in capsys.readouterr().out
    with pytest.raises(ValidationError):
        rollout_io.validate(steps)
    with pytest.raises(InvariantError, match="picture_reference"):
        export(steps, steps.with_name("again"), "parquet")
    assert not steps.with_name("again.blobs").exists() or third.exists()


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_exports_that_are_datasets_have_a_store(steps, tmp_path, format):
    export(steps, tmp_path / "out", format)
    out = tmp_path / "out" / ("data" if format == "hf" else "")
    assert stored(out) == stored(steps)
    assert rollout_io.check(out).is_empty()


def parts_in(messages):
    return [part for m in messages for part in m["content"] if isinstance(part, dict)]


def test_exports_of_messages_have_the_bytes(tmp_path):
    log = write(tmp_path / "a.calls.jsonl", exact("a/0", [1, 2], ANTHROPIC, OPENAI))
    scores = write(tmp_path / "r.jsonl", {"session": "a/0", "reward": 1.0})
    rollout_io.convert([log], tmp_path / "ds", rewards=str(scores))
    expected = [f"data:image/png;base64,{text_of(content)}" for content in (ONE, TWO)]

    export(tmp_path / "ds", tmp_path / "a.pt", "slime")
    sample = torch.load(tmp_path / "a.pt", weights_only=True)["samples"][0]
    urls = [p["image_url"]["url"] for p in parts_in(sample["prompt"]) if p["type"] == "image_url"]
    assert urls == expected
    for format in ("trl", "verl"):
        export(tmp_path / "ds", tmp_path / f"{format}.parquet", format)
        frame = pl.read_parquet(tmp_path / f"{format}.parquet")
        sent = json.loads(frame["messages"][0])
        assert [p["image_url"]["url"] for p in parts_in(sent) if p["type"] != "text"] == expected
        assert "pictures" not in frame.columns


@pytest.mark.parametrize("format", ["trl", "verl"])
def test_exports_of_merged_rows_have_no_references_to_a_store(steps, tmp_path, format):
    scores = [{"session": f"{name}/0", "reward": 1.0} for name in "ab"]
    rewards = write(tmp_path / "r.jsonl", *scores)
    log = steps.with_name("a.calls.jsonl")
    rollout_io.convert([log], tmp_path / "again", rewards=str(rewards))
    assert run(["merge", str(tmp_path / "again"), "--out", str(tmp_path / "m")]) == 0
    merged = rollout_io.read(tmp_path / "m")["segments"].to_pylist()
    out = tmp_path / "out.parquet"
    export(tmp_path / "m", out, format)
    text = json.dumps(pl.read_parquet(out).to_dicts(), default=str)
    assert name_of(ONE) not in text
    assert text_of(ONE) in text
    rows = pl.read_parquet(out)["segments"].to_list()
    for before, after in zip(merged, rows, strict=True):
        assert (before is None) == (after is None)
        for one, other in zip(before or (), after or (), strict=True):
            assert "pictures" not in other
            names = one.keys() - {"pictures", "messages"}
            assert {n: one[n] for n in names} == {n: other[n] for n in names}
            if one.get("messages"):
                assert [p["type"] for p in parts_in(json.loads(other["messages"]))] == [
                    {"image": "image_url"}.get(p["type"], p["type"])
                    for p in parts_in(json.loads(one["messages"]))
                ]


def test_remote_datasets_have_a_store_too(steps, tmp_path):
    log = tmp_path / "a.calls.jsonl"
    rollout_io.convert([log], "memory://made/ds")
    assert Blobs.of("memory://made/ds").files.keys() == Blobs.of(steps).files.keys()
    assert Blobs.of("memory://made/ds").read(name_of(ONE)) == ONE
    assert rollout_io.check("memory://made/ds").is_empty()
    export(steps, "memory://made/copy", "parquet")
    assert rollout_io.check("memory://made/copy").is_empty()


def test_a_failed_conversion_leaves_no_pictures(tmp_path):
    bad = {"session": "a/1", "request": {"messages": []}, "response": None}
    log = write(tmp_path / "a.calls.jsonl", exact("a/0", [1, 2], ANTHROPIC), bad)
    with pytest.raises(RolloutError):
        rollout_io.convert([log], tmp_path / "ds")
    assert not (tmp_path / "ds.blobs").exists()
    assert not (tmp_path / "ds").exists()


def test_the_pictures_of_a_rejected_run_are_not_stored(tmp_path):
    other = exact("b/0", [1, 2], OPENAI)
    other["response"]["choices"][0]["token_ids"] = []
    log = write(tmp_path / "a.calls.jsonl", exact("a/0", [1, 2], ANTHROPIC), other)
    rollout_io.convert([log], tmp_path / "ds", on_error="skip")
    assert list(stored(tmp_path / "ds").values()) == [ONE]


@pytest.mark.slow
def test_a_long_session_of_repeated_pictures_needs_little_memory_and_disk(tmp_path):
    """2,331 inline images of 22 pictures: each call repeats all images of the earlier ones."""
    pictures = [picture(i, 60_000) for i in range(22)]
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(content)}"}}
        for content in pictures
    ]
    num_calls, num_images, text = 67, 0, 0
    with (tmp_path / "a.calls.jsonl").open("w") as file:
        for i in range(num_calls):
            num = i + 1 if i < num_calls - 1 else 2331 - num_images
            shown = [parts[k % 22] for k in range(num)]
            num_images += num
            line = exact("a/0", list(range(1, 5 * num)), *shown, time=float(i))
            text += len(json.dumps(exact("a/0", list(range(1, 5 * num)))))
            file.write(json.dumps(line) + "\n")
    assert num_images == 2331
    code = (
        "import sys, rollout_io; rollout_io.convert([sys.argv[1]], sys.argv[2]); "
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    done = in_subprocess("-c", code, tmp_path / "a.calls.jsonl", tmp_path / "ds")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500_000, "KiB"
    found = stored(tmp_path / "ds")
    assert sorted(found.values()) == sorted(pictures)
    on_disk = sum(map(len, found.values()))
    on_disk += sum(file.stat().st_size for file in (tmp_path / "ds").iterdir())
    assert on_disk <= 1.05 * (sum(map(len, pictures)) + text)
    entries = pc.list_flatten(rollout_io.read(tmp_path / "ds", ["pictures"])["pictures"])
    assert len(entries) == 2331


@pytest.mark.slow
def test_several_processes_store_each_picture_once(tmp_path):
    lines = [exact(f"t{i}/0", [1, 2], ANTHROPIC, OPENAI) for i in range(20)]
    log = write(tmp_path / "a.calls.jsonl", *lines)
    rollout_io.convert([log], tmp_path / "ds", workers=2, chunk_bytes=20_000)
    assert sorted(stored(tmp_path / "ds").values()) == sorted([ONE, TWO])
    assert rollout_io.check(tmp_path / "ds").is_empty()
    arguments = ["merge", str(tmp_path / "ds"), "--out", str(tmp_path / "m"), "--workers", "2"]
    assert run(arguments) == 0
    assert stored(tmp_path / "m") == stored(tmp_path / "ds")


def test_a_mixture_has_the_pictures_of_all_its_datasets(tmp_path):
    for name, part in (("one", ANTHROPIC), ("two", OPENAI)):
        log = write(tmp_path / f"{name}.calls.jsonl", exact(f"{name}/0", [1, 2], part))
        rollout_io.convert([log], tmp_path / name)
    mixed = [str(tmp_path / "one"), "--mix", str(tmp_path / "two"), "--out", str(tmp_path / "m")]
    assert run(["filter", *mixed]) == 0
    assert sorted(stored(tmp_path / "m").values()) == sorted([ONE, TWO])


def test_an_interrupted_publication_resumes_with_its_pictures(tmp_path, monkeypatch):
    log = write(
        tmp_path / "a.calls.jsonl", exact("a/0", [1, 2], ANTHROPIC), exact("b/0", [1], OPENAI)
    )
    with monkeypatch.context() as patch:
        patch.setattr("rollout_io.conversion.staging.publish", _killed)
        with pytest.raises(KeyboardInterrupt):
            rollout_io.convert([log], tmp_path / "ds", chunk_bytes=1)
    done = rollout_io.convert([log], tmp_path / "ds", chunk_bytes=1)
    assert done.num_resumed == 2
    assert sorted(stored(tmp_path / "ds").values()) == sorted([ONE, TWO])
    assert rollout_io.check(tmp_path / "ds").is_empty()
    assert rollout_io.convert([log], tmp_path / "ds", chunk_bytes=1).was_done


def _killed(*_):
    raise KeyboardInterrupt


def test_a_log_that_names_an_unknown_digest_gets_no_other_file(tmp_path):
    marked = {"type": "image_url", "image_url": {"url": f"@rollouts-blob {name_of(THREE)}"}}
    log = write(tmp_path / "a.calls.jsonl", exact("a/0", [1, 2], ANTHROPIC, marked))
    rollout_io.convert([log], tmp_path / "ds")
    assert blobs_of(tmp_path / "ds") == [[name_of(ONE), None]]
