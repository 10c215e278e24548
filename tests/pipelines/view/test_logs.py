"""Logs in the viewer, without a conversion: what is shown is what a conversion would write."""

import gzip
import json
import os

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.logs import session, write_sessions
from pipelines.view import log_index
from pipelines.view.log_index import Job, Part, Whole, index_logs
from pipelines.view.paths import kind_of_path
from pipelines.view.sources import Sources
from rollout_io import convert, scan
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES
from tests.helpers.log_view_helpers import different_texts, log_of
from tests.helpers.view_helpers import Asked

CHAT = [
    {"role": "user", "content": "Is the door open?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"at":"door"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "open"},
    {"role": "assistant", "content": "It is open."},
]


def write_chats(path, *chats, **more):
    lines = [json.dumps({"messages": chat, **more}) for chat in chats]
    path.write_text("".join(f"{line}\n" for line in lines))


def test_a_log_of_text_shows_messages_calls_and_lengths_without_a_tokenizer(tmp_path):
    write_chats(tmp_path / "door.jsonl", CHAT, task="door")
    ask = Asked(tmp_path / "door.jsonl")
    (line,) = ask("/api/datasets/d0/trajectories").to_dicts()
    found = (line["num_messages"], line["num_turns"], line["num_tool_calls"])
    assert found == (4, 2, 1)
    assert line["num_characters"] == sum(len(m["content"]) for m in CHAT) + len('{"at":"door"}')
    assert (line["task_text"], line.get("response_tokens")) == ("Is the door open?", None)
    told = ask("/api/datasets/d0/conversation", trajectory_id=line["trajectory_id"])
    (lane,) = told["lanes"]
    kinds = [part["type"] for turn in lane["turns"] for part in turn["parts"]]
    assert kinds == ["text", "text", "tool_call", "tool_result", "text"]


def test_exact_logs_show_what_a_conversion_writes(tmp_path):
    path = EXAMPLES / "shop.calls.jsonl"
    convert(path, tmp_path / "ds")
    ask = Asked(path)
    assert different_texts(ask, scan(tmp_path / "ds").collect()) == []
    (first,) = ask("/api/datasets/d0/trajectories", limit=1).to_dicts()
    name = first["trajectory_id"]
    found = ask("/api/datasets/d0/tokens", trajectory_id=name, step_index=1)
    row = scan(tmp_path / "ds").filter(trajectory_id=name, step_index=1).collect().to_dicts()[0]
    assert found["id"].to_list() == row["prompt_token_ids"] + row["response_ids"]
    assert ask("/api/datasets/d0/tree", trajectory_id=name)["num_tokens"] > 0
    assert log_of(ask)["has_tokens"]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(st.lists(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), min_size=1, max_size=4))
@settings(
    max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_ragged_conversations_are_shown_message_by_message(tmp_path, chats):
    written = []
    for turns in chats:
        pairs = [
            ({"role": "user", "content": a}, {"role": "assistant", "content": b}) for a, b in turns
        ]
        written.append([message for pair in pairs for message in pair])
    write_chats(tmp_path / "a.jsonl", *written)
    ask = Asked(tmp_path / "a.jsonl")
    lines = ask("/api/datasets/d0/trajectories", limit=100, where="error IS NULL")
    assert len(lines) + log_of(ask)["num_rejected"] == len(written)
    for line in lines.to_dicts():
        chat = written[int(ask.sources.dataset("d0").trajectory(
            ask.sources.dataset("d0").index.number(line["trajectory_id"]), ["source"]
        ).column("source")[0].as_py().rpartition(":")[2]) - 1]  # fmt: skip
        assert line["num_messages"] == len(chat)
        assert line["num_characters"] == sum(len(message["content"]) for message in chat)
        found = ask("/api/datasets/d0/search", text=chat[-1]["content"], limit=1000)
        assert line["trajectory_id"] in {hit["trajectory_id"] for hit in found["hits"]}


@pytest.fixture
def folder(tmp_path):
    """A log, a broken log, a file of no format, and a link to a file outside."""
    root, outside = tmp_path / "logs", tmp_path / "secret.jsonl"
    root.mkdir()
    write_chats(root / "good.jsonl", CHAT, task="door")
    write_chats(outside, [{"role": "user", "content": "hidden"}, CHAT[-1]], task="x")
    (root / "broken.jsonl").write_text(f'{json.dumps({"messages": CHAT})}\n{{"messages": [\n')
    (root / "cut.jsonl").write_text('{"messages": [{"role": "user", "content": "Is it op')
    (root / "notes.md").write_text("# Notes\n")
    (root / "link.jsonl").symlink_to(outside)
    return root


def test_what_cannot_be_read_is_shown_with_its_reason_and_the_rest_opens(folder):
    ask = Asked(folder)
    lines = ask("/api/datasets/d0/trajectories")
    good = lines.filter(pl.col("error").is_null())
    assert good["file"].to_list() == ["broken.jsonl", "good.jsonl"]
    failed = dict(lines.filter(pl.col("error").is_not_null()).select("file", "error").rows())
    assert "[json_line]" in failed["broken.jsonl"]
    assert "cut off" in failed["cut.jsonl"]
    assert "leaves the directory" in failed["link.jsonl"]
    log = log_of(ask)
    assert [name.partition(":")[0] for name in log["skipped"]] == [str(folder / "notes.md")]
    assert log["num_records"] == len(good) + log["num_rejected"]
    names = lines.filter(pl.col("error").is_not_null())["trajectory_id"]
    told = ask("/api/datasets/d0/conversation", trajectory_id=names[0])
    assert [lane["turns"] for lane in told["lanes"]] == [[]]
    assert told["error"].startswith(names[0].partition(".")[0])


def test_a_file_that_may_not_be_read_is_one_failed_row(folder, monkeypatch):
    from rollout_io.conversion import inputs

    opened = inputs.open_input

    def refusing(path):
        if str(path).endswith("good.jsonl"):
            raise inputs.InputError("input_file", str(path), "permission denied")
        return opened(path)

    monkeypatch.setattr(inputs, "open_input", refusing)
    lines = Asked(folder)("/api/datasets/d0/trajectories")
    errors = dict(lines.select("file", "error").rows())
    assert "permission denied" in errors["good.jsonl"]
    assert errors["broken.jsonl"] is None or "json_line" in errors["broken.jsonl"]


def test_a_link_put_in_place_of_a_log_is_not_followed(folder, tmp_path):
    ask = Asked(folder)
    name = ask("/api/datasets/d0/trajectories").filter(file="good.jsonl")["trajectory_id"][0]
    (folder / "good.jsonl").unlink()
    (folder / "good.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(RolloutError, match="leaves the directory"):
        ask("/api/datasets/d0/conversation", trajectory_id=name)


def test_a_log_that_names_a_picture_outside_its_directory_does_not_show_it(tmp_path):
    png = b"\x89PNG\r\n\x1a\n" + b"\0" * 64
    root = tmp_path / "logs"
    root.mkdir()
    for place in (tmp_path / "out.png", root / "in.png"):
        place.write_bytes(png + place.name.encode())
    pictures = [
        {"type": "image_url", "image_url": {"url": str(p)}}
        for p in (tmp_path / "out.png", root / "in.png")
    ]
    write_chats(root / "a.jsonl", [{"role": "user", "content": pictures}, CHAT[-1]])
    ask = Asked(root)
    (line,) = ask("/api/datasets/d0/trajectories").to_dicts()
    assert line["num_images"] == 2
    told = ask("/api/datasets/d0/conversation", trajectory_id=line["trajectory_id"])
    outside, inside = (p["text"] for p in told["lanes"][0]["turns"][0]["parts"])
    assert outside == str(tmp_path / "out.png")
    assert ask("/api/datasets/d0/picture", blob=inside)["url"].startswith("data:image/png")


def test_nothing_is_written_beside_the_logs(folder):
    before = sorted(folder.parent.rglob("*"))
    ask = Asked(folder)
    for name in ask("/api/datasets/d0/trajectories")["trajectory_id"]:
        ask("/api/datasets/d0/conversation", trajectory_id=name)
    assert sorted(folder.parent.rglob("*")) == before


def test_conditions_use_the_counts_of_text(folder):
    ask = Asked(folder)

    def number(where):
        return len(ask("/api/datasets/d0/trajectories", where=where))

    assert number("num_tool_calls > 0 AND error IS NULL") == 2
    assert number("file = 'good.jsonl'") == 1
    assert number("task_text LIKE '%door%'") == 2
    with pytest.raises(RolloutError, match=r"no index of messages.*\[condition\]"):
        number("messages LIKE '%door%'")


def test_attempts_at_a_task_diverge_at_a_character(tmp_path):
    other = [*CHAT[:-1], {"role": "assistant", "content": "It is shut."}]
    write_chats(tmp_path / "a.jsonl", CHAT, other, task="door")
    ask = Asked(tmp_path / "a.jsonl")
    (task,) = ask("/api/datasets/d0/tasks")["tasks"]
    found = ask("/api/datasets/d0/group", instance_id=task["instance_id"])
    first, second = found["attempts"]
    assert first["parts_at"] is None
    assert not found["has_mixed_prompts"]
    assert second["parts_at"]["said"] == [["It is ", "open."], ["It is ", "shut."]]


def test_attempts_in_a_log_that_start_from_different_questions_are_noted(tmp_path):
    other = [{"role": "user", "content": "Is it late?"}, *CHAT[-1:]]
    write_chats(tmp_path / "a.jsonl", CHAT, other, task="door")
    ask = Asked(tmp_path / "a.jsonl")
    (task,) = ask("/api/datasets/d0/tasks")["tasks"]
    found = ask("/api/datasets/d0/group", instance_id=task["instance_id"])
    assert found["has_mixed_prompts"]


def test_two_logs_are_compared_by_task(tmp_path):
    for name, said in (("a", "It is open."), ("b", "It is ajar.")):
        write_chats(
            tmp_path / f"{name}.jsonl", [*CHAT[:-1], {"role": "assistant", "content": said}]
        )
    ask = Asked(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    (task,) = ask("/api/diff", a="d0", b="d1").to_dicts()
    (pair,) = ask("/api/diff/pair", a="d0", b="d1", task=task["task_instance_id"])["pairs"]
    assert pair["parts_at"]["said"] == [["It is ", "open."], ["It is ", "ajar."]]


@pytest.mark.slow  # loads Transformers
def test_a_tokenizer_adds_the_tokens_of_a_conversion(tmp_path, smollm2_dir):
    write_chats(tmp_path / "door.jsonl", CHAT[:1] + CHAT[-1:])
    convert(tmp_path / "door.jsonl", tmp_path / "ds", tokenizer=str(smollm2_dir))
    (row,) = scan(tmp_path / "ds").collect().to_dicts()
    ask = Asked(tmp_path / "door.jsonl", tokenizer=str(smollm2_dir))
    found = ask("/api/datasets/d0/tokens", trajectory_id=row["trajectory_id"], step_index=0)
    assert found["id"].to_list() == row["prompt_token_ids"] + row["response_ids"]
    told = ask("/api/datasets/d0/conversation", trajectory_id=row["trajectory_id"])
    assert told["is_approximate"]


@pytest.mark.slow  # loads Transformers
def test_a_conversation_that_a_template_cannot_render_is_still_shown(tmp_path, smollm2_dir):
    write_chats(tmp_path / "door.jsonl", CHAT)  # SmolLM2's template drops tool calls
    ask = Asked(tmp_path / "door.jsonl", tokenizer=str(smollm2_dir))
    name = ask("/api/datasets/d0/trajectories")["trajectory_id"][0]
    told = ask("/api/datasets/d0/conversation", trajectory_id=name)
    assert len(told["lanes"][0]["turns"]) == 4
    with pytest.raises(RolloutError, match="cannot be re-tokenized"):
        ask("/api/datasets/d0/tokens", trajectory_id=name, step_index=0)


def test_without_a_tokenizer_a_row_of_text_has_no_tokens(tmp_path):
    write_chats(tmp_path / "door.jsonl", CHAT)
    ask = Asked(tmp_path / "door.jsonl")
    name = ask("/api/datasets/d0/trajectories")["trajectory_id"][0]
    assert not log_of(ask)["has_tokens"]
    with pytest.raises(RolloutError, match=r"has no token ids.*\[no_token_ids\]"):
        ask("/api/datasets/d0/tokens", trajectory_id=name, step_index=0)


def test_large_logs_show_their_newest_files_first(tmp_path):
    num = write_sessions(tmp_path, 60_000, session_bytes=6_000)
    newest = sorted(tmp_path.rglob("*.jsonl"))[3]
    os.utime(newest, (2e9, 2e9))
    (tmp_path / "spool").mkdir()
    messages = []
    index_logs(Job(str(tmp_path / "projects"), "auto", tmp_path / "spool", 15_000), messages.append)
    at = next(i for i, message in enumerate(messages) if isinstance(message, Whole))
    first = [m for m in messages[:at] if isinstance(m, Part)]
    assert first[0].facts["file"][0] == str(newest.relative_to(tmp_path / "projects"))
    whole = pl.concat([m.facts for m in messages[at:] if isinstance(m, Part)])
    assert whole["trajectory_id"].n_unique() == len(whole) == num


def test_the_command_that_converts_names_the_path_and_what_it_needs(folder):
    command = log_of(Asked(folder))["command"]
    assert command.startswith(f"rollouts convert {folder} --tokenizer DIR --on-error skip --out ")


def test_labels_need_a_dataset(folder, tmp_path):
    from pipelines.view.dataset import write_labels

    logs = Sources.open([str(folder)]).dataset("d0")
    with pytest.raises(RolloutError, match=r"\[needs_dataset\]"):
        write_labels(logs, "good", {}, str(tmp_path / "out"))


def test_paths_are_told_apart(shop, folder, tmp_path):
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "other.parquet")
    assert kind_of_path(str(shop)) == "dataset"
    assert kind_of_path(str(folder)) == "log"
    assert kind_of_path(str(EXAMPLES / "shop.calls.jsonl")) == "log"
    assert kind_of_path(str(tmp_path / "none")) == "dataset"
    with pytest.raises(RolloutError, match="neither a dataset"):
        kind_of_path(str(tmp_path / "other.parquet"))


@pytest.mark.parametrize("content", [b"PAR1 but cut", None])
def test_a_table_beside_logs_leaves_them_logs(folder, content):
    if content is None:
        pl.DataFrame({"a": [1]}).write_parquet(folder / "results.parquet")
    else:
        (folder / "results.parquet").write_bytes(content)
    assert kind_of_path(str(folder)) == "log"
    ask = Asked(folder)
    assert "good.jsonl" in ask("/api/datasets/d0/trajectories")["file"].to_list()
    told = [*log_of(ask)["skipped"], *ask("/api/datasets/d0/trajectories")["error"].to_list()]
    assert any("results.parquet" in str(each) for each in told)


def test_a_pipe_with_the_name_of_a_table_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "x.parquet")
    assert kind_of_path(str(tmp_path)) == kind_of_path(str(tmp_path / "x.parquet")) == "log"
    with pytest.raises(RolloutError, match="no files"):
        Sources.open([str(tmp_path)])


def test_a_log_written_anew_says_so_when_a_conversation_is_opened(tmp_path):
    path = tmp_path / "door.jsonl"
    write_chats(path, CHAT, task="door")
    ask = Asked(path)
    (name,) = ask("/api/datasets/d0/trajectories")["trajectory_id"]
    path.write_text(path.read_text().replace("door", "roof"))
    os.utime(path, (1, 1))
    with pytest.raises(RolloutError, match="changed since it was read"):
        ask("/api/datasets/d0/conversation", trajectory_id=name)


def test_a_log_that_grew_still_opens(tmp_path):
    path = tmp_path / "door.jsonl"
    write_chats(path, CHAT, task="door")
    ask = Asked(path)
    (name,) = ask("/api/datasets/d0/trajectories")["trajectory_id"]
    with path.open("a") as file:
        file.write(path.read_text())
    assert ask("/api/datasets/d0/conversation", trajectory_id=name)["lanes"]


def test_a_name_that_is_not_utf_8_is_told(tmp_path):
    write_chats(tmp_path / "door.jsonl", CHAT, task="door")
    (tmp_path / os.fsdecode(b"b\xff.jsonl")).write_bytes((tmp_path / "door.jsonl").read_bytes())
    errors = Asked(tmp_path)("/api/datasets/d0/trajectories").select("file", "error").rows()
    assert [name for name, error in errors if error and "not valid UTF-8" in error] == [
        r"b\xff.jsonl"
    ]


def test_a_trajectory_that_two_tables_hold_is_rejected_by_name(tmp_path, monkeypatch):
    write_chats(tmp_path / "door.jsonl", CHAT, task="door")
    read = log_index.read_opened

    def twice(*arguments):
        first, *reads = read(*arguments)
        return iter([first, *reads, *reads])

    monkeypatch.setattr(log_index, "read_opened", twice)
    ask = Asked(tmp_path)
    errors = ask("/api/datasets/d0/trajectories")["error"].to_list()
    assert [bool(error) for error in errors] == [False, True]
    assert "[unique_trajectory]" in errors[1]
    assert (log_of(ask)["num_records"], log_of(ask)["num_rejected"]) == (2, 1)


def test_a_compressed_log_is_named_as_it_lies_there(tmp_path):
    (tmp_path / "a").mkdir()
    write_chats(tmp_path / "door.jsonl", CHAT, task="door")
    packed = gzip.compress((tmp_path / "door.jsonl").read_bytes())
    (tmp_path / "door.jsonl").unlink()
    (tmp_path / "a" / "door.jsonl.gz").write_bytes(packed)
    lines = Asked(tmp_path)("/api/datasets/d0/trajectories")
    assert lines["file"].to_list() == ["a/door.jsonl.gz"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "contains no files"),
        (lambda path: path.write_text("# Title\n"), "not recognized"),
        (lambda path: path.write_text(""), "empty"),
    ],
)
def test_a_path_that_is_no_log_is_refused_in_a_sentence(tmp_path, make, words):
    make(tmp_path / "README.md")
    with pytest.raises(RolloutError, match=words):
        Sources.open([str(tmp_path / "README.md")])


def test_the_sessions_of_the_benchmark_are_read(tmp_path):
    lines = "".join(f"{json.dumps(line)}\n" for line in session(3, 5_000))
    (tmp_path / "s.jsonl").write_text(lines)
    (line,) = Asked(tmp_path)("/api/datasets/d0/trajectories").to_dicts()
    assert line["task_text"].startswith("Task 3: ")
    assert line["num_tool_calls"] > 0
