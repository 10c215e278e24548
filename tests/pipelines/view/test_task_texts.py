"""The text of a task is the first user message of its first row, in full or as a line."""

import json

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.view.index_columns import add_starts
from rollout_io import RolloutWriter, scan
from rollout_io.cli.main import run
from rollout_io.dataset.trajectory_facts import MAX_TASK_CHARS, task_text
from tests.helpers.view_helpers import Asked

ROOT = "/api/datasets/d0"
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": values})
)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([{"role": "system", "content": "s"}, {"role": "user", "content": " a\nb "}], "a\nb"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}], "a\nb"),
        ([{"role": "user", "content": None}, {"role": "user", "content": "b"}], "b"),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
        ([{"role": "assistant", "content": "a"}], None),
        ("a prompt", "a prompt"),
        ({"role": "user"}, None),
        ([{"role": 1}], None),
    ],
)
def test_the_first_user_message_with_text_is_the_task(said, text):
    assert task_text(json.dumps(said)) == text


@given(messages | values)
def test_any_json_has_a_text_or_none_and_its_start_is_one_short_line(said):
    text = task_text(json.dumps(said))
    said_row = {"instance_id": ["t"], "step_index": [0], "messages": [json.dumps(said)]}
    table, starts = pa.table(said_row), {}
    add_starts(table, starts)
    start = starts["t"]
    assert (text is None) == (start is None)
    if text is not None:
        assert len(start) <= MAX_TASK_CHARS
        assert " ".join(text.split()).startswith(start.removesuffix("\u2026"))


@pytest.mark.parametrize("said", [None, "", "{", '[{"role": "user", "content": "\\ud800"}]'])
def test_damaged_messages_have_no_text(said):
    assert task_text(said) is None


def test_every_list_of_the_viewer_has_the_text_of_its_tasks(ask, shop):
    rows = scan(shop).filter(step_index=0).select("instance_id", "messages").collect()
    told = {
        name: next(m["content"] for m in json.loads(said) if m["role"] == "user")
        for name, said in rows.unique("instance_id", keep="first").rows()
    }
    window = ask(f"{ROOT}/trajectories", limit=100)
    assert window["task_text"].to_list() == [told[name] for name in window["instance_id"]]
    for task in ask(f"{ROOT}/tasks")["tasks"]:
        assert task["task_text"] == told[task["instance_id"]]
    assert ask(f"{ROOT}/group", instance_id="shop-7")["task_text"] == told["shop-7"]
    found = ask(f"{ROOT}/search", text="shop-7")
    assert [task["task_text"] for task in found["tasks"]] == [told["shop-7"]]
    for hit in ask(f"{ROOT}/search", text="calculator")["hits"]:
        assert hit["task_text"] == told[hit["trajectory_id"].rpartition("_")[0]]
    word = told["shop-7"].split()[-1].replace("'", "''")
    kept = ask(f"{ROOT}/trajectories", where=f"task_text LIKE '%{word}'")
    assert {told[name].endswith(word) for name in kept["instance_id"]} == {True}


def test_a_long_task_is_told_in_full_on_request(shop, tmp_path):
    long = "Sum the prices.\n" * 40
    said = json.dumps([{"role": "user", "content": long}])
    path = tmp_path / "ds"
    with RolloutWriter(path) as writer:
        rows = scan(shop).filter(instance_id="shop-1").with_columns(messages=pl.lit(said))
        writer.write(rows.collect())
    ask = Asked(path)
    start = ask(f"{ROOT}/group", instance_id="shop-1")["task_text"]
    assert start.endswith("\u2026")
    assert len(start) == MAX_TASK_CHARS
    assert ask(f"{ROOT}/task", instance_id="shop-1") == {"text": long.strip()}


@pytest.mark.parametrize(("last", "is_mixed"), [([1, 2], False), ([1, 3], True), ([], False)])
def test_a_group_whose_attempts_start_from_different_prompts_is_noted(
    last, is_mixed, shop, tmp_path
):
    rows = scan(shop).filter(step_index=0, instance_id="shop-1").head(3).collect()
    prompts = pl.Series("prompt_token_ids", [[1, 2], [1, 2], last], pl.List(pl.Int32))
    failed = pl.Series("error", [None, None, None if last else "lost"], pl.String)
    reward = pl.Series("reward", [0.0, 0.0, 0.0 if last else None])
    rows = rows.with_columns(prompts, failed, reward, is_last_step=True)
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(rows)
    found = Asked(tmp_path / "ds")(f"{ROOT}/group", instance_id="shop-1")
    assert found["has_mixed_prompts"] == is_mixed


def test_a_dataset_without_messages_has_no_texts(shop, tmp_path):
    path = tmp_path / "ds"
    with RolloutWriter(path) as writer:
        writer.write(scan(shop).drop("messages").collect())
    ask = Asked(path)
    assert "task_text" not in ask(f"{ROOT}/trajectories").columns
    assert ask(f"{ROOT}/task", instance_id="shop-1") == {"text": None}


def test_merging_changes_no_text_of_a_task(shop, tmp_path):
    assert run(["merge", str(shop), "--out", str(tmp_path / "merged")]) == 0
    texts = [
        dict(
            Asked(path)(f"{ROOT}/trajectories", limit=100).select("instance_id", "task_text").rows()
        )
        for path in (shop, tmp_path / "merged")
    ]
    assert texts[0] == texts[1]
    asked = [
        Asked(path)(f"{ROOT}/task", instance_id="shop-9") for path in (shop, tmp_path / "merged")
    ]
    assert asked[0] == asked[1]
