"""Hostile values break no answer: JSON and Arrow stay valid, and texts have a bounded length."""

import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pipelines.view.answers import arrow_answer, json_answer
from rollout_io import RolloutWriter
from tests.helpers.view_helpers import Asked

LONG = "<b>x</b>" * (10 << 17)  # 10 MiB
TEXTS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "[x](javascript:alert(1))",
    "\x1b[31mred\x1b[0m\x00NUL\x07",
    "\u202eright to left\u2066",
    "\ud800 half",
    "é" * 300,
    "",
)
NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e308, -0.0, 5e-324, 0.1, 2.0**53)


def message(text):
    """A conversation with the text in every place; JSON can escape what UTF-8 cannot hold."""
    call = {"id": text, "function": {"name": text, "arguments": text}}
    return json.dumps(
        [
            {"role": text, "content": text, "reasoning_content": text},
            {"role": "assistant", "content": [{"type": text, "text": text}], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text, "content": text},
            {"role": "assistant", "content": None, "tool_calls": text},
            {"role": "user", "content": {"not": ["a", "text"]}},
        ]
    )


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    n = len(TEXTS)
    sound = [text.encode("utf-8", "replace").decode() for text in TEXTS]
    messages = [message(text) for text in TEXTS]
    messages[-1] = message(LONG)
    messages[-2] = "[" * 100_000  # too deep for a parser
    responses = [*sound[:-1], LONG]
    table = pa.table(
        {
            "instance_id": [f"{text}{i}" for i, text in enumerate(sound)],
            "repetition_id": pa.array([0] * n, pa.int32()),
            "trajectory_id": [f"{text}{i}_0" for i, text in enumerate(sound)],
            "step_index": pa.array([0] * n, pa.int32()),
            "is_last_step": [True] * n,
            "prompt_token_ids": pa.array([[1, 2]] * n, pa.list_(pa.int32())),
            "response_ids": pa.array([[2**31 - 1, 0]] * n, pa.list_(pa.int32())),
            "loss_mask": [[True, False]] * n,
            "token_source": ["engine"] * n,
            "error": pa.array([None, *sound[1:-1], LONG]),
            "agent": sound,
            "messages": messages,
            "response_text": responses,
            "score": pa.array(NUMBERS),
            "large": pa.array([2**62] * n),
            "note": responses,
            "blob": pa.array([b"\xff\xfe"] * n),
            'a "column" < \u202e': sound,
        }
    )
    path = tmp_path_factory.mktemp("hostile") / "ds"
    with RolloutWriter(path) as writer:
        writer.write(table)
    return Asked(path)


def ids(ask):
    return ask("/api/datasets/d0/trajectories")["trajectory_id"].to_list()


def test_the_table_shows_every_trajectory(ask):
    found = ask("/api/datasets/d0/trajectories")
    assert len(found) == len(TEXTS)
    assert found["score"].equals(pl.Series("score", NUMBERS), null_equal=True)
    assert found["large"].to_list() == [2.0**62] * len(TEXTS)
    assert found["note"].str.len_chars().max() == 200
    assert "blob" not in found.columns
    for sort in ("score", "note", 'a "column" < \u202e'):
        assert len(ask("/api/datasets/d0/trajectories", sort=sort)) == len(TEXTS)


def test_values_that_are_no_numbers_sort_last_and_count_as_nulls(ask):
    found = ask("/api/datasets/d0/trajectories", sort="score", descending=1)
    assert np.isnan(found["score"].to_list()[-1])
    counted = ask("/api/datasets/d0/histogram", column="score", bins=3)
    assert (sum(counted["counts"]), counted["nulls"]) == (5, 3)


def test_a_long_text_is_filtered_by_all_of_it(ask):
    condition = f"len(note) = {len(LONG)}"
    with_length = ask("/api/datasets/d0/trajectories", where=condition.replace("len", "length"))
    assert len(with_length) == 1


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_every_view_answers(ask, number):
    name = ids(ask)[number]
    instance = name.removesuffix("_0")
    told = ask("/api/datasets/d0/conversation", trajectory_id=name)
    texts = [part["text"] for lane in told["lanes"] for t in lane["turns"] for part in t["parts"]]
    assert max(map(len, texts), default=0) < 20_100
    assert len(told["error"] or "") < 20_100
    ask("/api/datasets/d0/group", instance_id=instance)
    ask("/api/datasets/d0/tree", instance_id=instance)
    assert ask("/api/datasets/d0/tokens", trajectory_id=name)["id"].to_list()[2] == 2**31 - 1
    ask("/api/datasets/d0/search", text="<script>", where=f"agent = '{instance[:-1]}'")


def test_a_cut_text_says_how_long_it_is(ask):
    told = ask("/api/datasets/d0/conversation", trajectory_id=ids(ask)[-1])
    answer = told["lanes"][0]["turns"][-1]["parts"][0]["text"]
    assert answer.endswith("\u2026 [cut: 10,485,760 characters]")
    assert answer.startswith(LONG[:20_000])


def test_text_is_sent_as_it_is(ask):
    name = ids(ask)[3]
    told = ask("/api/datasets/d0/conversation", trajectory_id=name)
    answer = told["lanes"][0]["turns"][-1]["parts"][0]["text"]
    assert answer == TEXTS[3]


def test_json_is_valid_for_any_value():
    value = {"a\ud800": [float("nan"), float("inf"), "\udc00", "\ud83d\ude00", None, 1.5]}
    found = json.loads(json_answer(value).content.decode("utf-8"))
    assert found == {"a\ufffd": [None, None, "\ufffd", "\U0001f600", None, 1.5]}


def test_arrow_has_plain_types_only():
    frame = pl.DataFrame(
        {
            "text": ["a", None],
            "category": pl.Series(["x", "y"], dtype=pl.Categorical),
            "small": pl.Series([1, 255], dtype=pl.UInt8),
            "large": pl.Series([1, 2**40], dtype=pl.Int64),
            "flag": [True, None],
        }
    )
    table = pa.ipc.open_stream(arrow_answer(frame, total=2).content).read_all()
    kinds = [pa.string(), pa.string(), pa.int32(), pa.float64(), pa.bool_()]
    assert table.schema.types == kinds
    assert table.to_pylist()[1] == {
        "text": None,
        "category": "y",
        "small": 255,
        "large": float(2**40),
        "flag": None,
    }
