"""The tokens of pictures are those that the model's image processor gives, or the run is refused."""

import base64
import io
import json
import struct
import zlib
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import rollout_io
from rollout_io.dataset.blobs import Blobs
from rollout_io.retokenize import load_tokenizer
from rollout_io.retokenize.processor import Expansion, open_picture, spans_in
from tests.helpers.conversion_helpers import write
from tests.helpers.picture_models import FAMILIES, png, save_family
from tests.helpers.refusals import refused

SIZES = [(90, 60), (56, 56), (28, 84)]
PICTURES = [png(i, *size) for i, size in enumerate(SIZES)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    if request.param == "smolvlm":
        pytest.importorskip("num2words")
    return save_family(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("qwen") / "model")


def part_of(content):
    data = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def chat_of(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts]}]


def engine_ids(directory, *contents, text="Look: ", answer=None):
    """What an engine does: the template, then the processor over the whole text and all pictures."""
    tokenizer = load_tokenizer(directory)
    shown = [{"type": "text", "text": text}, *[{"type": "image"} for _ in contents]]
    messages = [{"role": "user", "content": shown}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    rendered = tokenizer.render(messages, generation_prompt=answer is None)
    images = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
    backend = tokenizer.processor.backend
    made = backend(text=[rendered], images=images, add_special_tokens=False)
    return [int(token) for token in made["input_ids"][0]]


def call(ids, *parts, session="a/0"):
    choice = {"index": 0, "token_ids": [7, 8], "message": {"role": "assistant", "content": ""}}
    return {
        "session": session,
        "request": {"messages": chat_of(*parts)},
        "response": {"prompt_token_ids": ids, "choices": [choice]},
    }


def converted(tmp_path, directory, *lines, **settings):
    log = write(tmp_path / "a.calls.jsonl", *lines)
    tokenizer = None if directory is None else str(directory)
    return rollout_io.convert([log], tmp_path / "ds", tokenizer=tokenizer, **settings)


def pictures_in(tmp_path):
    (row,) = rollout_io.read(tmp_path / "ds").to_pylist()
    return row, row["pictures"]


def rejected(tmp_path):
    lines = (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    return [(one["rule"], one["message"]) for one in map(json.loads, lines)]


def test_each_span_of_an_engine_prompt_is_what_the_processor_gives(family, tmp_path):
    ids = engine_ids(family, *PICTURES)
    done = converted(tmp_path, family, call(ids, *map(part_of, PICTURES)))
    row, entries = pictures_in(tmp_path)
    tokenizer = load_tokenizer(family)
    store = Blobs.of(tmp_path / "ds")
    assert [store.read(entry["sha256"]) for entry in entries] == PICTURES
    covered = set()
    for entry, content in zip(entries, PICTURES, strict=True):
        span = row["prompt_token_ids"][entry["start"] :][: entry["length"]]
        text = tokenizer.processor.expansion(content, "a.png").text.strip()
        assert tokenizer.decode(span) == text
        covered |= set(range(entry["start"], entry["start"] + entry["length"]))
    pads = {at for at, token in enumerate(ids) if token in tokenizer.processor.pads}
    assert pads <= covered
    assert rollout_io.check(tmp_path / "ds").is_empty()
    assert done.summary.notes["images whose tokens are those of the image processor"] == 3


def test_retokenized_pictures_are_expanded_as_the_processor_does(family, tmp_path):
    messages = [*chat_of(*map(part_of, PICTURES)), {"role": "assistant", "content": "Cats."}]
    log = write(tmp_path / "chat.jsonl", {"messages": messages})
    rollout_io.convert([log], tmp_path / "ds", tokenizer=str(family))
    row, entries = pictures_in(tmp_path)
    ids = row["prompt_token_ids"] + row["response_ids"]
    expected = engine_ids(family, *PICTURES, answer="Cats.")
    assert ids == expected[: len(ids)]
    assert load_tokenizer(family).decode(expected[len(ids) :]) in {"", "\n"}
    assert row["token_source"] == "retokenized"
    assert all(entry["length"] for entry in entries)
    assert [entry["start"] for entry in entries] == sorted(entry["start"] for entry in entries)


def test_special_tokens_in_texts_stay_texts_beside_expanded_pictures(qwen, tmp_path):
    parts = [{"type": "text", "text": "Say <|image_pad|>."}, part_of(PICTURES[0])]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}]
    log = write(tmp_path / "chat.jsonl", {"messages": messages})
    rollout_io.convert([log], tmp_path / "ds", tokenizer=str(qwen))
    row, (entry,) = pictures_in(tmp_path)
    tokenizer = load_tokenizer(qwen)
    pad = tokenizer.placeholder_id
    at = [i for i, token in enumerate(row["prompt_token_ids"]) if token == pad]
    assert at == list(range(entry["start"], entry["start"] + entry["length"]))
    assert "Say <|image_pad|>." in tokenizer.decode(row["prompt_token_ids"])


def shorter(ids, pad):
    at = ids.index(pad)
    return ids[:at] + ids[at + 1 :]


WRONG = {
    "a token too few": lambda ids, pad: shorter(ids, pad),
    "a token too many": lambda ids, pad: [*ids[: ids.index(pad)], pad, *ids[ids.index(pad) :]],
    "no pictures": lambda ids, pad: [token for token in ids if token != pad],
    "one more": lambda ids, pad: [*ids, pad],
}


@pytest.mark.parametrize("change", WRONG)
def test_tokens_that_are_not_those_of_the_processor_are_refused(qwen, tmp_path, change):
    pad = load_tokenizer(qwen).placeholder_id
    ids = WRONG[change](engine_ids(qwen, *PICTURES), pad)
    good = call(engine_ids(qwen, PICTURES[0]), part_of(PICTURES[0]), session="b/0")
    converted(tmp_path, qwen, call(ids, *map(part_of, PICTURES)), good, on_error="skip")
    assert rollout_io.read(tmp_path / "ds")["trajectory_id"].to_pylist() == ["b_0"]
    ((rule, message),) = rejected(tmp_path)
    assert rule == "picture_tokens"
    assert "a.calls.jsonl" in message


@pytest.mark.parametrize("shown", [PICTURES[:2], [*PICTURES, PICTURES[0]], PICTURES[::-1]])
def test_pictures_that_are_not_those_of_the_tokens_are_refused(qwen, tmp_path, shown):
    ids = engine_ids(qwen, *PICTURES)
    with refused("picture_tokens"):
        converted(tmp_path, qwen, call(ids, *map(part_of, shown)))


def test_another_limit_of_pixels_than_the_engine_had_is_refused(qwen, tmp_path):
    ids = engine_ids(qwen, PICTURES[0])
    other = save_family(tmp_path / "other")
    config = json.loads((other / "preprocessor_config.json").read_text())
    config["size"]["longest_edge"] = 28 * 28 * 2
    (other / "preprocessor_config.json").write_text(json.dumps(config))
    with refused("picture_tokens", hint="preprocessor_config.json"):
        converted(tmp_path, other, call(ids, part_of(PICTURES[0])))


def without_processor(directory, out):
    out.mkdir()
    for file in directory.iterdir():
        if "processor" not in file.name:
            (out / file.name).write_bytes(file.read_bytes())
    return out


def test_without_a_processor_the_runs_of_the_placeholder_are_the_spans(qwen, tmp_path):
    ids = engine_ids(qwen, *PICTURES)
    plain = without_processor(qwen, tmp_path / "plain")
    done = converted(tmp_path, plain, call(ids, *map(part_of, PICTURES)))
    _, entries = pictures_in(tmp_path)
    pad = load_tokenizer(qwen).placeholder_id
    for entry in entries:
        end = entry["start"] + entry["length"]
        assert ids[entry["start"] : end] == [pad] * entry["length"]
        assert ids[entry["start"] - 1] != pad != ids[end]
    name = "images at runs of the placeholder, not checked by an image processor"
    assert done.summary.notes[name] == 3


@pytest.mark.parametrize("shown", [PICTURES[:2], [*PICTURES, PICTURES[0]]])
def test_without_a_processor_other_counts_than_runs_leave_the_spans_unknown(qwen, tmp_path, shown):
    ids = engine_ids(qwen, *PICTURES)
    plain = without_processor(qwen, tmp_path / "plain")
    done = converted(tmp_path, plain, call(ids, *map(part_of, shown)))
    _, entries = pictures_in(tmp_path)
    assert [(entry["start"], entry["length"]) for entry in entries] == [(None, None)] * len(shown)
    assert done.summary.notes["images whose tokens are unknown"] == len(shown)


def test_without_a_tokenizer_spans_are_unknown_and_counted(qwen, tmp_path):
    ids = engine_ids(qwen, PICTURES[0])
    done = converted(tmp_path, None, call(ids, part_of(PICTURES[0])))
    _, (entry,) = pictures_in(tmp_path)
    assert (entry["start"], entry["length"]) == (None, None)
    assert done.summary.notes["images whose tokens are unknown"] == 1


def test_a_picture_that_the_log_has_as_a_url_alone_is_found_by_its_run(qwen, tmp_path):
    ids = engine_ids(qwen, PICTURES[0])
    url = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    converted(tmp_path, qwen, call(ids, url))
    _, (entry,) = pictures_in(tmp_path)
    assert entry["sha256"] is None
    assert entry["length"] == ids.count(load_tokenizer(qwen).placeholder_id)


def huge_png(width, height):
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b""))


BAD = {
    "cut off": PICTURES[0][: len(PICTURES[0]) // 2],
    "no picture": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "a bomb": huge_png(60_000, 60_000),
    "too large": huge_png(9_000, 9_000),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n",
    "too narrow": png(0, 3000, 4),
    "nothing": b"",
}


@pytest.mark.parametrize("bad", BAD)
def test_a_picture_that_cannot_be_read_is_refused_by_name(qwen, tmp_path, bad):
    ids = engine_ids(qwen, PICTURES[0])
    if bad == "nothing":
        with refused("picture_file"):
            open_picture(BAD[bad], "a.png")
        return
    with refused("picture_file", where="a.calls.jsonl"):
        converted(tmp_path, qwen, call(ids, part_of(BAD[bad])))
    assert not (tmp_path / "ds.blobs").exists()


def test_a_picture_on_its_side_is_turned_upright():
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show it
    Image.new("RGB", (30, 10)).save(file, "JPEG", exif=exif)
    image = open_picture(file.getvalue(), "a.jpg")
    assert (image.size, image.mode) == ((10, 30), "RGB")


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_transparent_picture_is_on_white(mode):
    file, image = io.BytesIO(), Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    image.convert(mode).save(file, "PNG")
    shown = open_picture(file.getvalue(), "a.png")
    assert [shown.getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (255, 255, 255)]


def test_a_processor_that_needs_a_missing_package_is_named(qwen, tmp_path):
    pytest.importorskip("transformers")
    broken = save_family(tmp_path / "broken")
    (broken / "preprocessor_config.json").write_text("{")
    ids = engine_ids(qwen, PICTURES[0])
    with refused("processor", hint="preprocessor_config.json"):
        converted(tmp_path, broken, call(ids, part_of(PICTURES[0])))


def test_a_directory_with_a_broken_processor_converts_text(tmp_path):
    broken = save_family(tmp_path / "broken")
    (broken / "preprocessor_config.json").write_text("{")
    converted(tmp_path, broken, call([70, 71]))
    assert rollout_io.read(tmp_path / "ds").num_rows == 1


PADS = frozenset({9, 8})


@given(st.data())
def test_spans_are_found_where_expansions_stand_between_other_tokens(data):
    others = st.lists(st.integers(0, 7), max_size=4)
    bodies = st.lists(st.sampled_from([9, 9, 8]), min_size=1, max_size=5)
    ids, expected, expansions = data.draw(others), [], []
    for _ in range(data.draw(st.integers(0, 4))):
        body = data.draw(bodies)
        expected.append((len(ids), len(body)))
        expansions.append(Expansion("", np.array(body, np.int32)))
        ids += [*body, data.draw(st.integers(0, 7)), *data.draw(others)]
    assert spans_in(np.array(ids, np.int32), expansions, PADS, "row") == expected


@given(st.lists(st.integers(0, 9), max_size=9), st.lists(st.sampled_from([8, 9]), min_size=1))
def test_spans_are_those_of_the_ids_or_the_row_is_refused(ids, body):
    expansion = Expansion("", np.array(body, np.int32))
    starts = range(len(ids) - len(body) + 1)
    first = next((at for at in starts if ids[at : at + len(body)] == body), None)
    is_alone = first is not None and not PADS & {*ids[:first], *ids[first + len(body) :]}
    with nullcontext() if is_alone else refused("picture_tokens"):
        found = spans_in(np.array(ids, np.int32), [expansion], PADS, "row")
        assert found == [(first, len(body))]
