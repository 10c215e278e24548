"""Pictures in the tokens of Qwen's vision models: real tokens, real chat templates."""

import json

import pytest

import rollout_io
from rollout_io.retokenize import load_tokenizer
from tests.helpers.conversion_helpers import write
from tests.helpers.qwen import chat_template_of, save_qwen3
from tests.rollout_io.conversion.test_images import (
    ANTHROPIC,
    ONE,
    OPENAI,
    RESPONSES,
    THREE,
    TWO,
    chat,
    name_of,
)

PAD = "<|image_pad|>"
RESULT = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "see", "arguments": {"n": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "It:"}, OPENAI]},
    {"role": "assistant", "content": f"A dog; {PAD} is a token."},
]
SEEN = [
    [*chat(ANTHROPIC, OPENAI), *chat(RESPONSES, answer="Another cat.")],
    chat(ANTHROPIC, {"type": "text", "text": f"Say {PAD}."}),
    RESULT,
]
NAMES = [[ONE, TWO, THREE], [ONE], [TWO]]


def as_the_template_takes_it(message):
    """A message with the parts that Qwen's templates know."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [
        part if part["type"] == "text" else {"type": "image", "image": "x"} for part in content
    ]
    return message | {"content": parts}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5_think"])
def converted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tokenizer").mkdir()
    directory = save_qwen3(folder / "tokenizer", chat_template_of(request.param), 15_000)
    lines = [{"id": f"s{i}", "messages": messages} for i, messages in enumerate(SEEN)]
    log = write(folder / "chat.jsonl", *lines)
    # Templates for chats without tools drop calls: such a run is refused by name.
    done = rollout_io.convert([log], folder / "ds", tokenizer=str(directory), on_error="skip")
    rows = rollout_io.read(folder / "ds").to_pylist()
    rules = {
        json.loads(line)["rule"]
        for path in folder.glob("ds.rejected.jsonl")
        for line in path.read_text().splitlines()
    }
    return load_tokenizer(str(directory)), rows, rules, done.summary


@pytest.mark.slow
def test_each_picture_is_the_placeholder_of_the_template(converted):
    tokenizer, rows, rules, _ = converted
    pad = tokenizer.backend.convert_tokens_to_ids(PAD)
    assert len(rows) >= 2
    assert rules <= {"text_kept"}
    for row in rows:
        number = int(row["instance_id"].removeprefix("s"))
        ids = row["prompt_token_ids"] + row["response_ids"]
        assert [entry["sha256"] for entry in row["pictures"]] == [*map(name_of, NAMES[number])]
        spans = {(entry["start"], entry["length"]) for entry in row["pictures"]}
        assert spans == {(None, None)}, "the placeholder is not expanded without an image processor"
        positions = [at for at, each in enumerate(ids) if each == pad]
        assert len(positions) == len(row["pictures"])
        around = [tokenizer.decode(ids[at - 1 : at + 2]) for at in positions]
        assert set(around) == {f"<|vision_start|>{PAD}<|vision_end|>"}
        assert not any(row["loss_mask"][at - len(row["prompt_token_ids"])] for at in positions
                       if at >= len(row["prompt_token_ids"]))  # fmt: skip


def test_rows_decode_to_what_the_real_template_renders(converted):
    tokenizer, rows, _, _ = converted
    for row in rows:
        messages = SEEN[int(row["instance_id"].removeprefix("s"))]
        taken = [as_the_template_takes_it(message) for message in messages]
        expected = tokenizer.backend.apply_chat_template(taken, tokenize=False)
        text = tokenizer.decode(row["prompt_token_ids"] + row["response_ids"])
        thought = "<think>\n\n</think>\n\n"  # where a template adds an empty one
        assert text.replace(thought, "").rstrip("\n") == expected.replace(thought, "").rstrip("\n")


def test_the_summary_counts_pictures_that_are_tokens(converted):
    _, rows, _, summary = converted
    num_pictures = sum(len(row["pictures"]) for row in rows)
    assert summary.notes["images encoded as the placeholder of the chat template"] == num_pictures
