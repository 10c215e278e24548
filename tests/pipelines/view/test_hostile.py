"""Hostile values break no answer: JSON and Arrow stay valid, and texts have a bounded length."""

import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pipelines.view.responses import arrow_response, json_response
from rollout_io import RolloutWriter
from schemas.errors import ConfigError
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


@pytest.mark.slow
def test_the_table_shows_every_trajectory(ask):
    found = ask("/api/datasets/d0/trajectories")
    assert len(found) == len(TEXTS)
    assert found["score"].equals(pl.Series("score", NUMBERS), null_equal=True)
    assert found["large"].to_list() == [2.0**62] * len(TEXTS)
    assert 200 < found["note"].str.len_chars().max() < 250
    assert "blob" not in found.columns
    for sort in ("score", "note", 'a "column" < \u202e'):
        assert len(ask("/api/datasets/d0/trajectories", sort=sort)) == len(TEXTS)


@pytest.mark.slow
def test_values_that_are_no_numbers_sort_last_and_are_counted_apart(ask):
    found = ask("/api/datasets/d0/trajectories", sort="score", descending=1)
    assert np.isnan(found["score"].to_list()[-1])
    counted = ask("/api/datasets/d0/histogram", column="score", bins=3)
    assert sum(counted["counts"]) == 5
    assert (counted["nulls"], counted["not_finite"]) == (0, 3)


@pytest.mark.slow
def test_a_long_text_is_filtered_by_all_of_it(ask):
    condition = f"len(note) = {len(LONG)}"
    with_length = ask("/api/datasets/d0/trajectories", where=condition.replace("len", "length"))
    assert len(with_length) == 1


@pytest.mark.slow
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


@pytest.mark.slow
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
    found = json.loads(json_response(value).body.decode("utf-8"))
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
    table = pa.ipc.open_stream(arrow_response(frame, total=2).body).read_all()
    kinds = [pa.string(), pa.string(), pa.int32(), pa.float64(), pa.bool_()]
    assert table.schema.types == kinds
    assert table.to_pylist()[1] == {
        "text": None,
        "category": "y",
        "small": 255,
        "large": float(2**40),
        "flag": None,
    }


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A dataset with columns whose values are easily rounded, merged or confused."""
    n = 41
    big = [2**53 + 1, 2**53 + 2, -(2**60) - 1, *range(n - 3)]
    notes = ["e" * 250 + "a", "e" * 250 + "b", *["short"] * (n - 2)]
    table = pa.table(
        {
            "instance_id": [f"t{i}" for i in range(n)],
            "repetition_id": pa.array([0] * n, pa.int32()),
            "trajectory_id": [f"t{i}_0" for i in range(n)],
            "step_index": pa.array([0] * n, pa.int32()),
            "is_last_step": [True] * n,
            "prompt_token_ids": pa.array([[1, 2]] * n, pa.list_(pa.int32())),
            "response_ids": pa.array([[3]] * n, pa.list_(pa.int32())),
            "loss_mask": [[True]] * n,
            "token_source": ["engine"] * n,
            "error": notes,
            "seed": pa.array(big, pa.int64()),
            "unsigned": pa.array([2**64 - 1] * n, pa.uint64()),
            "note": notes,
            "prompt_tokens": pa.array([1000] * n, pa.int64()),
            "num tokens: prompt": [7] * n,
            "tenths": pa.array(np.arange(n) / 40, pa.float32()),
            "partly": [float("nan"), None, float("inf"), *[1.0] * (n - 3)],
            "wide": [-1.7e308, *[1.7e308] * (n - 1)],
        }
    )
    path = tmp_path_factory.mktemp("numbers") / "ds"
    with RolloutWriter(path) as writer:
        writer.write(table)
    return Asked(path), table


def num_matching(ask, where):
    metadata = ask.table("/api/datasets/d0/trajectories", where=where).schema.metadata
    return int(metadata[b"total"])


@pytest.mark.parametrize("name", ["seed", "unsigned"])
def test_large_integers_keep_every_digit(numbers, name):
    ask, table = numbers
    found = ask("/api/datasets/d0/trajectories")
    assert found[name].to_list() == table[name].to_pylist()


@pytest.mark.parametrize("name", ["note", "error"])
def test_long_texts_that_begin_alike_are_different_values(numbers, name):
    ask, _ = numbers
    found = ask("/api/datasets/d0/histogram", column=name)
    assert sorted(found["counts_all"]) == [1, 1, 39]
    cut = [value for value in found["values"] if value != "short"]
    assert all(value.startswith("e" * 200 + "… [cut: 251 characters, #") for value in cut)
    assert num_matching(ask, f"{name} = '{'e' * 250}a'") == 1


@pytest.mark.parametrize("name", ["tenths", "wide", "partly", "response_tokens"])
def test_a_filter_finds_as_many_trajectories_as_a_bin_counts(numbers, name):
    ask, _ = numbers
    found = ask("/api/datasets/d0/histogram", column=name, bins=40)
    edges, last = found["edges"], len(found["counts"]) - 1
    for number, expected in enumerate(found["counts"]):
        end = "<=" if number == last else "<"
        where = f"{name} >= {edges[number]!r} AND {name} {end} {edges[number + 1]!r}"
        assert num_matching(ask, where) == expected
    assert num_matching(ask, f"{name} IS NULL") == found["nulls"]
    assert sum(found["counts"]) + found["nulls"] + found["not_finite"] == 41


def test_a_column_named_as_one_of_the_index_is_that_of_the_dataset(numbers):
    ask, _ = numbers
    assert ask("/api/datasets/d0/trajectories")["longest_row_tokens"].to_list() == [3] * 41
    assert num_matching(ask, '"num tokens: prompt" = 7') == 41


def test_a_name_of_two_columns_is_refused(numbers):
    ask, _ = numbers
    with pytest.raises(ConfigError, match=r"one that the viewer computes. \[condition\]"):
        num_matching(ask, "prompt_tokens >= 1000")
    assert "the column prompt_tokens is not shown" in ask("/api/sources")["warnings"][-1]


def test_a_condition_that_polars_panics_over_is_refused(numbers):
    with pytest.raises(ConfigError, match=r"index out of bounds.*\[condition\]"):
        num_matching(numbers[0], "CAST(reward AS DECIMAL(99, 2)) > 1")


@pytest.mark.parametrize(("where", "expected"), [("TRUE", 41), ("1 = 2", 0)])
def test_a_constant_condition_holds_everywhere_or_nowhere(numbers, where, expected):
    assert num_matching(numbers[0], where) == expected
