import json
import random
from base64 import b64encode

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io import read_log
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.parsing.records import natural_key
from schemas import check
from schemas.columns import metrics_dict
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES

SHOP = EXAMPLES / "shop.calls.jsonl"
SHOP_REWARDS = EXAMPLES / "shop.rewards.jsonl"


def call(session, prompt, *choices, **fields):
    request = fields.pop("request", {"messages": [{"role": "user", "content": "hi"}]})
    parts = [
        {
            "index": index,
            "message": {"content": f"text {ids}"},
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
            "finish_reason": "stop",
        }
        for index, ids in enumerate(choices)
    ]
    response = {"prompt_token_ids": prompt, "choices": parts}
    return {"session": session, "request": request, "response": response} | fields


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def read_calls(paths, rewards=None):
    return read_log(paths, format="calls", rewards=rewards and str(rewards))


def convert(tmp_path, calls, rewards=None):
    logs = write(tmp_path / "calls.jsonl", calls)
    outcomes = None if rewards is None else write(tmp_path / "rewards.jsonl", rewards)
    table = read_calls([logs], outcomes)
    assert check(table).is_empty()
    return frame(table)


def refusal(tmp_path, calls, rewards=None):
    logs = write(tmp_path / "calls.jsonl", calls)
    outcomes = None if rewards is None else write(tmp_path / "rewards.jsonl", rewards)
    with pytest.raises(RolloutError) as caught:
        read_calls([logs], outcomes)
    return caught.value


def frame(table):
    if "metrics" in table.column_names:  # a map, which only newer Polars have: as dicts in JSON
        index = table.column_names.index("metrics")
        texts = [m and json.dumps(metrics_dict(m)) for m in table.column("metrics").to_pylist()]
        table = table.set_column(index, "metrics", pa.array(texts, pa.string()))
    return pl.DataFrame(pl.from_arrow(table))


def frame_of(*paths, rewards=None):
    return frame(read_calls(paths, rewards))


def test_shop_has_205_rows_48_trajectories_12_groups_and_mean_reward_a_quarter():
    rows = frame_of(SHOP, rewards=SHOP_REWARDS)
    last = rows.filter("is_last_step")
    assert (len(rows), len(last), last["instance_id"].n_unique()) == (205, 48, 12)
    assert last["reward"].mean() == 0.25
    assert (
        rows["prompt_token_ids"].list.len().sum() + rows["response_ids"].list.len().sum() == 43897
    )


def test_a_group_is_contiguous_in_natural_order_with_repetitions_ascending():
    last = frame_of(SHOP, rewards=SHOP_REWARDS).filter("is_last_step")
    wanted = [f"shop-{i}_{r}" for i in range(12) for r in range(4)]
    assert last["trajectory_id"].to_list() == wanted


def test_a_real_row_holds_what_its_line_says():
    with SHOP.open(encoding="utf-8") as file:
        first = json.loads(file.readline())
    row = (
        frame_of(SHOP, rewards=SHOP_REWARDS)
        .filter(pl.col("source") == f"{SHOP}:1")
        .row(0, named=True)
    )
    choice = first["response"]["choices"][0]
    assert row["prompt_token_ids"] == first["response"]["prompt_token_ids"]
    assert row["response_ids"] == choice["token_ids"]
    logprobs = [t["logprob"] for t in choice["logprobs"]["content"]]
    assert row["rollout_logprobs"] == pytest.approx(logprobs, rel=1e-6)
    assert json.loads(row["messages"]) == first["request"]["messages"]
    assert row["response_text"] == choice["message"]["content"]
    assert (row["style"], row["agent"], row["stop_reason"]) == ("append", "main", "stop")
    assert row["metrics"] == '{"truth": 6.0}'
    assert (row["temperature"], row["token_source"]) == (1.0, "engine")


def test_columns_the_log_has_nothing_for_are_absent_but_for_the_reward():
    frame = frame_of(SHOP)
    assert not {"top_p", "top_k", "policy_version", "error", "metrics"} & set(frame.columns)
    assert frame["reward"].null_count() == len(frame)


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_any_permutation_of_the_lines_over_two_files_gives_the_same_table(seed, tmp_path):
    lines = SHOP.read_text(encoding="utf-8").splitlines(keepends=True)
    random.Random(seed).shuffle(lines)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("".join(lines[:100]), encoding="utf-8")
    b.write_text("".join(lines[100:]), encoding="utf-8")
    shuffled = frame_of(a, b, rewards=SHOP_REWARDS).drop("source")
    assert shuffled.equals(frame_of(SHOP, rewards=SHOP_REWARDS).drop("source"))


def test_calls_at_one_time_come_in_one_order_whatever_the_order_of_lines(tmp_path):
    calls = [call("a/0", [1], [n], time=5.0) for n in (3, 2, 4)]
    calls.append(call("a/0", [1], [9], time=5.0, final=True))
    orders = [
        convert(tmp_path, random.Random(seed).sample(calls, 4))["response_ids"].to_list()
        for seed in range(8)
    ]
    assert all(order == orders[0] for order in orders)
    assert orders[0][-1] == [9]


def test_without_time_the_order_of_lines_counts(tmp_path):
    rows = convert(tmp_path, [call("a/0", [1], [7]), call("a/0", [1], [5]), call("a/0", [1], [6])])
    assert rows["response_ids"].to_list() == [[7], [5], [6]]


def test_each_of_several_choices_is_a_step_and_the_reward_is_the_last_ones(tmp_path):
    two = call("a/0", [1, 2], [3], [4, 5], time=1.0, reward=1.0)
    two["response"]["choices"].reverse()
    rows = convert(tmp_path, [two])
    assert rows["response_ids"].to_list() == [[3], [4, 5]]
    assert rows["prompt_token_ids"].to_list() == [[1, 2], [1, 2]]
    assert rows["reward"].to_list() == [0.0, 1.0]
    assert rows["is_last_step"].to_list() == [False, True]


def test_an_unknown_outcome_leaves_null_and_a_known_one_fills_earlier_steps(tmp_path):
    calls = [
        call("a/0", [1], [2], time=1.0),
        call("a/0", [1], [3], time=2.0),
        call("b/0", [1], [2], time=1.0, reward=0.25),
        call("b/0", [1], [2, 2], time=2.0),
        call("b/0", [1], [3], time=3.0),
    ]
    rows = convert(tmp_path, calls, [{"session": "b/0", "reward": 2.0}])
    assert rows["reward"].to_list() == [None, None, 0.25, 0.0, 2.0]


def test_a_failed_session_keeps_its_calls_with_null_rewards(tmp_path):
    calls = [call("a/0", [1], [2], time=1.0), call("a/0", [1], [], time=2.0, reward=0.5)]
    calls += [call("a/1", [1], [2])]
    rewards = [
        {"session": "a/0", "reward": 0.5, "error": "timeout"},
        {"session": "a/1", "reward": 0},
    ]
    rows = convert(tmp_path, calls, rewards)
    assert rows["error"].to_list() == ["timeout", "timeout", None]
    assert rows["reward"].to_list() == [None, None, 0.0]
    assert rows["metrics"].to_list() == [None, '{"reward": 0.5}', None]


def test_a_failed_run_without_calls_is_one_row_of_empty_lists(tmp_path):
    rewards = [{"instance_id": "a", "repetition_id": 1, "error": "no sandbox"}]
    rows = convert(tmp_path, [call("a/0", [1], [2])], rewards)
    assert rows["trajectory_id"].to_list() == ["a_0", "a_1"]
    assert rows["response_ids"].to_list() == [[2], []]
    assert rows["error"].to_list() == [None, "no sandbox"]
    assert rows["source"][1].endswith("rewards.jsonl:1")


def test_extra_keys_of_a_rewards_line_become_metrics_and_columns(tmp_path):
    extra = {"style": "append", "solved": True, "turns": 3, "tests": ["t1"], "note": None}
    calls = [
        call("a/0", [1], [2], time=1.0),
        call("a/0", [1], [3], time=2.0),
        call("b/0", [1], [2]),
    ]
    rows = convert(tmp_path, calls, [{"session": "a/0", "reward": 0.0} | extra])
    assert rows["style"].to_list() == ["append", "append", None]
    assert rows["tests"].to_list() == ['["t1"]', '["t1"]', None]
    assert rows["metrics"].to_list() == [None, '{"solved": 1.0, "turns": 3.0}', None]


def test_sampling_parameters_and_policy_version_are_kept(tmp_path):
    request = {"messages": [], "temperature": 0.5, "top_p": 0.75, "top_k": 20}
    row = convert(tmp_path, [call("a/0", [1], [2], request=request, policy_version=7)]).row(
        0, named=True
    )
    names = ("temperature", "top_p", "top_k", "policy_version")
    assert [row[n] for n in names] == [0.5, 0.75, 20, 7]


def test_messages_survive_byte_for_byte(tmp_path):
    text = json.dumps(call("a/0", [1], [2]))
    text = text.replace('[{"role": "user", "content": "hi"}]', '[ {"content":1e2 ,"b":"\\u00e9"} ]')
    logs = tmp_path / "calls.jsonl"
    logs.write_text(text, encoding="utf-8")
    assert frame_of(logs)["messages"][0] == '[ {"content":1e2 ,"b":"\\u00e9"} ]'


def test_absent_logprobs_are_null(tmp_path):
    without = call("a/0", [1], [2])
    without["response"]["choices"][0]["logprobs"] = None
    rows = convert(tmp_path, [without, call("a/1", [1], [2, 3])])
    assert rows["rollout_logprobs"].to_list() == [None, [-0.5, -0.5]]


def test_blank_lines_are_skipped_but_counted(tmp_path):
    logs = tmp_path / "calls.jsonl"
    logs.write_text("\n \n" + json.dumps(call("a/0", [1], [2])) + "\n\n", encoding="utf-8")
    assert frame_of(logs)["source"].to_list() == [f"{logs}:3"]


def edited(path, value):
    record = call("a/0", [1, 2], [3, 4], time=1.0)
    *parents, last = path.split(".")
    inner = record
    for key in parents:
        inner = inner[int(key)] if key.isdigit() else inner[key]
    inner[last] = value
    return record


CHOICE = "response.choices.0"


@pytest.mark.parametrize(
    ("path", "value", "rule", "got"),
    [
        ("response.prompt_token_ids", None, "no_token_ids", "the call has no prompt token ids"),
        (f"{CHOICE}.token_ids", None, "no_token_ids", "the call has no response token ids"),
        ("response.prompt_token_ids", [], "nonempty_prompt", "the prompt has no tokens"),
        (f"{CHOICE}.token_ids", [], "nonempty_response", "the response has no tokens"),
        ("response.choices", [], "nonempty_response", "the response has no choices"),
        ("response.prompt_token_ids", [1, -1], "token_range", "-1 at index 1"),
        ("response.prompt_token_ids", [2**40], "token_range", f"id {2**40}"),
        (f"{CHOICE}.token_ids", [3], "lengths_align", "2 values"),
        (
            f"{CHOICE}.logprobs.content",
            [{"logprob": 0.1}, {"logprob": 0}],
            "logprobs_nonpositive",
            "0.1",
        ),
        (
            f"{CHOICE}.logprobs.content",
            [{"logprob": -9999.0}, {"logprob": 0}],
            "logprobs_finite",
            "-9999",
        ),
        ("session", "shop-1", "session_name", "'shop-1'"),
        ("session", "shop-1/x", "session_name", "'shop-1/x'"),
        ("session", "shop-1/01", "session_name", "'shop-1/01'"),
        ("session", 3, "record_type", "int"),
        ("request", None, "record_type", "null"),
        (f"{CHOICE}.token_ids", [1, "x"], "record_type", "str"),
    ],
)
def test_a_bad_call_is_named_with_its_rule_place_and_hint(path, value, rule, got, tmp_path):
    error = refusal(tmp_path, [call("b/0", [1], [2]), edited(path, value)])
    assert error.rule == rule
    assert error.where.startswith(f"{tmp_path / 'calls.jsonl'}:2")
    assert got in error.got
    assert error.hint


def test_a_wrong_type_is_named_with_its_json_path(tmp_path):
    error = refusal(tmp_path, [edited(f"{CHOICE}.token_ids", [1, "x"])])
    assert error.where.endswith("calls.jsonl:1, response ids, $[1]")


def test_an_error_says_how_many_more_records_are_bad(tmp_path):
    bad = edited("response.prompt_token_ids", [])
    assert "(and 2 more records rejected: " in str(refusal(tmp_path, [bad, bad, bad]))


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b'{"session": "a/0", "requ', "the line is cut off after 24 bytes"),
        (b'{"session": NaN}', "invalid JSON: invalid character at column 13"),
        (b'{"session": "a\xff/0"}', "invalid UTF-8: 0xff at column 15"),
        (b'{"extra": "\xff"}', "invalid UTF-8: 0xff at column 12"),
    ],
)
def test_a_line_that_is_not_json_is_named(content, got, tmp_path):
    logs = tmp_path / "calls.jsonl"
    logs.write_bytes(json.dumps(call("a/0", [1], [2])).encode() + b"\n" + content)
    with pytest.raises(RolloutError) as caught:
        read_calls([logs])
    assert (caught.value.rule, caught.value.where) == ("json_line", f"{logs}:2")
    assert caught.value.got == got


@pytest.mark.parametrize(
    ("first", "second", "rule", "finding"),
    [
        ({"time": 1.0, "final": True}, {"time": 2.0, "final": True}, "boundary_alignment", ":2"),
        ({"time": 1.0, "final": True}, {"time": 2.0}, "boundary_alignment", "a call after"),
        ({"time": 1.0}, {}, "mixed_time", ""),
        ({"time": 1.0}, {"time": 1.0}, "duplicate_record", ""),
    ],
)
def test_calls_that_cannot_be_of_one_session_are_refused(first, second, rule, finding, tmp_path):
    error = refusal(tmp_path, [call("a/0", [1], [2], **fields) for fields in (first, second)])
    assert (error.rule, finding in error.got) == (rule, True)


@pytest.mark.parametrize(
    ("rewards", "rule"),
    [
        ([{"session": "a/0", "reward": 1.0}, {"session": "a/0", "reward": 1.0}], "reward_line"),
        ([{"session": "a/0"}], "reward_line"),
        ([{"reward": 1.0}], "reward_line"),
        ([{"session": "a/0", "repetition_id": 1, "reward": 1.0}], "reward_line"),
        ([{"session": "a/0", "reward": 1.0, "agent": "x"}], "reward_line"),
        ([{"session": "a/0", "reward": 1.0, "": 1}], "reward_line"),
        ([{"session": "a/0", "reward": 1.0, "big": 10**400}], "reward_line"),
        ([{"session": "a/0", "reward": "1"}], "record_type"),
        ([{"session": "a/1", "reward": 1.0}], "unknown_session"),
    ],
)
def test_a_bad_rewards_line_is_refused(rewards, rule, tmp_path):
    error = refusal(tmp_path, [call("a/0", [1], [2], reward=1.0)], rewards)
    assert error.rule == rule
    assert "rewards.jsonl:" in error.where


def test_natural_order_puts_2_before_10():
    names = ["shop-10", "shop-2", "shop", "10", "9", "shop-02"]
    assert sorted(names, key=natural_key) == ["9", "10", "shop", "shop-02", "shop-2", "shop-10"]


def routed(experts, session="a/0"):
    record = call(session, [1], [2, 3])
    record["response"]["choices"][0]["routed_experts"] = experts
    return record


def test_nested_lists_of_routed_experts_fill_the_routing_column(tmp_path):
    routes = [[[1, 2], [3, 4]], [[5, 6], [7, 32767]]]
    rows = convert(tmp_path, [routed(routes), call("a/1", [1], [2])])
    assert rows["rollout_expert_indices"].to_list() == [routes, None]
    assert rows["rollout_expert_indices"].dtype == pl.List(pl.Array(pl.Int16, (2, 2)))


@pytest.mark.parametrize(
    "experts",
    ["k05VTVBZAQ==", [[1, 2]], [[[1], [2, 3]]], [[[1.5]]], [[[-1]]], [[[2**15]]], [], [[[1]]] * 4],
)
def test_routed_experts_of_another_shape_are_refused(experts, tmp_path):
    error = refusal(tmp_path, [routed(experts)])
    assert error.rule == "routing_shape"
    assert error.where == f"{tmp_path / 'calls.jsonl'}:1, choice 0, routed_experts"


def packed(header, content=b"", version=b"\x01\x00"):
    """A NumPy file with any header, in base64."""
    size = (len(header) + 1).to_bytes(2, "little")
    return b64encode(b"\x93NUMPY" + version + size + header.encode() + b"\n" + content).decode()


def header_of(shape, dtype="<i2"):
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}"


@pytest.mark.parametrize(
    "experts",
    [
        packed(header_of("(1000000, 1000000, 8)")),
        packed(header_of("(1, 1, 18446744073709551616)")),
        packed(header_of("(True, 1, 1)"), b"\1\0"),
        packed(header_of("(1, 1, True)"), b"\1\0"),
        packed(header_of("(-1, 1, -1)"), b"\1\0"),
        packed(header_of("(1, 1, 1)"), b"\1"),
        packed(header_of("(1, 1, 1)"), b"\1\0\1\0"),
        packed(header_of("(1, 1, 1)", "|O"), b"\1\0\0\0\0\0\0\0"),
        packed(header_of("(1, 1, 1)", "<f2"), b"\1\0"),
        packed(header_of("(1,) * 3"), b"\1\0"),
        packed("(" * 9000),
        packed("-" * 9000 + "1"),
        packed("{"),
        packed("'''"),
        packed(header_of("(1, 1, 1)"), b"\1\0", b"\x09\x00"),
        packed("")[:8],
    ],
)
def test_a_header_of_routed_experts_that_says_anything_rejects_its_record_alone(experts, tmp_path):
    log = write(tmp_path / "calls.jsonl", [routed(experts), call("b/0", [1], [2])])
    choices = Keywords(format="calls", on_error="skip")
    summary = rollout_io.convert(log, tmp_path / "ds", **choices).summary
    assert (summary.num_written, summary.num_rejected) == (1, 1)
    (rejected,) = map(json.loads, (tmp_path / "ds.rejected.jsonl").read_text().splitlines())
    assert rejected["rule"] == "routing_shape"


def test_routed_experts_of_two_models_are_refused(tmp_path):
    error = refusal(tmp_path, [routed([[[1]]]), routed([[[1, 2]]], "a/1")])
    assert (error.rule, error.where) == ("routing_shape", f"{tmp_path / 'calls.jsonl'}:2")


def test_lines_nested_too_deeply_and_impossible_temperatures_are_refused(tmp_path):
    logs = tmp_path / "calls.jsonl"
    logs.write_text('{"other": ' + "[" * 100_000 + "]" * 100_000 + "}", encoding="utf-8")
    with pytest.raises(RolloutError, match=r".*:1: .*nested too deeply.*\[json_line\]"):
        read_calls([logs])
    for temperature in (-1.0, 1e300):
        bad = call("a/0", [1], [2], request={"temperature": temperature})
        assert refusal(tmp_path, [bad]).rule == "record_type"
