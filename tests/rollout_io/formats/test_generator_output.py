import copy
import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io import (
    TrajectoryID,
    from_generator_output,
    read_generator_output,
    read_log,
    to_generator_output,
    write_generator_output,
)
from rollout_io.cli.main import run
from schemas import check
from schemas.errors import InputError, RolloutError
from schemas.strategies import rollout_tables
from tests.conftest import EXAMPLES

PLACEHOLDER = {
    "prompt_token_ids": [0],
    "response_ids": [0],
    "loss_masks": [0],
    "rollout_logprobs": [0.0],
    "stop_reasons": "error",
    "is_last_step": True,
    "rollout_expert_indices": [[[0, 1]] * 3],
}

TWO_TRAJECTORIES = {
    "prompt_token_ids": [[1, 2], [1, 2, 3, 9], [4]],
    "response_ids": [[3], [5, 6], [7, 8]],
    "rewards": [0.0, 1.0, 0.5],
    "loss_masks": [[1], [0, 1], [1, 1]],
    "stop_reasons": ["tool_call", "stop", "length"],
    "rollout_metrics": {"generate/avg_num_tokens": 1.5},
    "rollout_logprobs": [[-1.5], [0.0, -0.5], [-0.25, -2.0]],
    "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 0), TrajectoryID("a", 1)],
    "rollout_expert_indices": None,
    "is_last_step": [False, True, True],
    "env_metrics": [None, {"turns": 2.0}, {}],
    "trajectory_generation_times": None,
}


IDS = TWO_TRAJECTORIES["trajectory_ids"]


def with_field(name, value):
    return copy.deepcopy(TWO_TRAJECTORIES) | {name: value}


def with_listed_routes(output):
    """Lists instead of the arrays that SkyRL's trainer requires as routes."""
    routes = output["rollout_expert_indices"]
    listed = routes and [None if row is None else row.tolist() for row in routes]
    return {**output, "rollout_expert_indices": listed}


def shop():
    logs, rewards = EXAMPLES / "shop.calls.jsonl", EXAMPLES / "shop.rewards.jsonl"
    return read_log([logs], format="calls", rewards=str(rewards))


@st.composite
def outputs(draw):
    """A canonical output: all fields, float32 log-probabilities, failures of whole groups."""
    token_rewards, logprobs, metrics, routed = (draw(st.booleans()) for _ in range(4))
    rows = []
    for instance in range(draw(st.integers(1, 3))):
        failed = draw(st.booleans())
        for repetition in range(draw(st.integers(1, 3))):
            num_steps = 1 if failed else draw(st.integers(1, 3))
            identity = TrajectoryID(f"i{instance}", repetition)
            for step in range(num_steps):
                row = _placeholder() if failed else draw(_rows())
                row["is_last_step"] = step == num_steps - 1
                rows.append(row | {"trajectory_ids": identity})
    for row in rows:
        row["rewards"] = row["rewards"] if token_rewards else row["rewards"][-1]
    names = [n for n in TWO_TRAJECTORIES if n not in {"rollout_metrics", "rollout_expert_indices"}]
    output = {name: [row.get(name) for row in rows] for name in names}
    absent = [("rollout_logprobs", not logprobs), ("env_metrics", not metrics)]
    output |= {name: None for name, is_absent in absent if is_absent}
    output["trajectory_generation_times"] = None
    output["rollout_metrics"] = draw(st.none() | st.just({"a": 1.5, "b": 2}))
    routes = [row.get("rollout_expert_indices") for row in rows]
    any_routes = any(r != PLACEHOLDER["rollout_expert_indices"] for r in routes)
    output["rollout_expert_indices"] = routes if routed and any_routes else None
    return {name: output[name] for name in TWO_TRAJECTORIES}


def _placeholder():
    return copy.deepcopy(PLACEHOLDER) | {"rewards": [0.0], "env_metrics": None}


@st.composite
def _rows(draw):
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
    prompt, response = draw(ids), draw(ids)
    assume(
        (prompt, response) != ([0], [0])
    )  # the tokens of a placeholder, whose routes are padding
    num_tokens = len(response)

    def per_token(values):
        return draw(st.lists(values, min_size=num_tokens, max_size=num_tokens))

    routes = st.lists(st.integers(0, 2**15 - 1), min_size=2, max_size=2)
    num_routed = len(prompt) + num_tokens - 1
    return {
        "prompt_token_ids": prompt,
        "response_ids": response,
        "rewards": per_token(st.floats(-1e9, 1e9)),
        "loss_masks": per_token(st.sampled_from([0, 1])),
        "stop_reasons": draw(st.sampled_from(["stop", "length", "error", None])),
        "rollout_logprobs": per_token(st.floats(-50, 0, width=32)),
        "env_metrics": draw(
            st.none() | st.dictionaries(st.text(max_size=3), st.floats(-1e9, 1e9), max_size=2)
        ),
        "rollout_expert_indices": [[draw(routes) for _ in range(3)] for _ in range(num_routed)],
    }


@pytest.mark.slow
@settings(deadline=None)
@given(outputs())
def test_output_to_table_and_back_is_the_identity(output):
    again = to_generator_output(from_generator_output(output), failed="trajectory")
    assert with_listed_routes(again) == output


@pytest.mark.slow
@settings(deadline=None)
@given(outputs())
def test_table_to_output_and_back_is_the_identity(output):
    table = from_generator_output(output)
    again = from_generator_output(to_generator_output(table, failed="trajectory"))
    assert again.equals(table, check_metadata=True)
    assert "error" not in check(table)["severity"].to_list()


HELD = ("reward", "rollout_logprobs", "stop_reason", "metrics", "rollout_expert_indices")


@pytest.mark.slow
@settings(deadline=None)
@given(rollout_tables(min_trajectories=1, optional=HELD, errors=False, user_column=False))
def test_any_table_comes_back_with_all_columns_an_output_holds(table):
    reward = pc.fill_null(table["reward"], 0.0)
    logprobs = [[-0.5] * len(ids) for ids in table["response_ids"].to_pylist()]
    table = table.drop_columns(["reward", "rollout_logprobs", "token_source"])
    table = table.append_column("reward", reward)
    table = table.append_column("rollout_logprobs", pa.array(logprobs, pa.list_(pa.float32())))
    table = table.append_column("token_source", pa.array(["engine"] * table.num_rows))
    again = from_generator_output(to_generator_output(table))
    if pc.all(pc.is_null(table["rollout_expert_indices"])).as_py():
        table = table.drop_columns("rollout_expert_indices")
    assert again.select(table.column_names).to_pylist() == table.to_pylist()


def test_shop_comes_back_with_all_columns_an_output_holds():
    table = shop()
    again = from_generator_output(to_generator_output(table))
    shared = [name for name in again.column_names if name in table.column_names]
    assert {"reward", "rollout_logprobs", "metrics", "stop_reason"} <= set(shared)
    assert again.select(shared).equals(table.select(shared))


def test_json_export_import_export_is_byte_identical(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_generator_output(shop(), first)
    write_generator_output(read_generator_output(first), second)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_the_worked_example_has_these_rows():
    table = from_generator_output(TWO_TRAJECTORIES)
    assert table["trajectory_id"].to_pylist() == ["a_0", "a_0", "a_1"]
    assert table["step_index"].to_pylist() == [0, 1, 0]
    assert table["loss_mask"].to_pylist() == [[True], [False, True], [True, True]]
    assert table["reward"].to_pylist() == [0.0, 1.0, 0.5]
    assert table["metrics"].to_pylist() == [None, [{"key": "turns", "value": 2.0}], []]
    assert to_generator_output(table) == TWO_TRAJECTORIES


def test_token_rewards_fill_both_columns():
    table = from_generator_output(with_field("rewards", [[0.0], [0.5, 0.25], [0.0, 1.0]]))
    assert table["rewards"].to_pylist() == [[0.0], [0.5, 0.25], [0.0, 1.0]]
    assert table["reward"].to_pylist() == [0.0, 0.75, 1.0]


def failed_table():
    table = from_generator_output(TWO_TRAJECTORIES)
    other = from_generator_output(
        TWO_TRAJECTORIES | {"trajectory_ids": [TrajectoryID("b", t.repetition_id) for t in IDS]}
    )
    table = pa.concat_tables([table, other])
    errors = ["timeout", "timeout", None, None, None, None]
    rewards = [None, None, 0.5, 0.0, 1.0, 0.5]
    table = table.drop_columns("reward").append_column("reward", pa.array(rewards, pa.float64()))
    return table.append_column("error", pa.array(errors, pa.string()))


def test_a_failure_masks_its_group_by_default():
    output = to_generator_output(failed_table())
    assert output["prompt_token_ids"] == [[0], [0], [1, 2], [1, 2, 3, 9], [4]]
    assert output["loss_masks"] == [[0], [0], [1], [0, 1], [1, 1]]
    assert output["rewards"] == [0.0, 0.0, 0.0, 1.0, 0.5]
    assert output["stop_reasons"] == ["error", "error", "tool_call", "stop", "length"]
    assert output["rollout_logprobs"][:2] == [[0.0], [0.0]]
    assert output["is_last_step"] == [True, True, False, True, True]


def test_placeholders_of_a_failed_group_have_the_routes_of_one_token_and_import_again():
    routes = [[[[5, 7]]] * n for n in (2, 5, 2)]
    table = from_generator_output(with_field("rollout_expert_indices", routes))
    error = pa.array([None, None, "crashed"], pa.string())
    output = to_generator_output(table.append_column("error", error))
    assert with_listed_routes(output)["rollout_expert_indices"] == [[[[0, 1]]], [[[0, 1]]]]
    assert from_generator_output(output)["error"].null_count == 0


def test_routes_of_a_placeholder_are_dropped_whatever_they_are():
    failed = with_field("rollout_expert_indices", [[[[5, 7]]] * n for n in (2, 5, 4)])
    for name, value in PLACEHOLDER.items():
        failed[name][2] = value if name != "rollout_expert_indices" else failed[name][2]
    failed["rewards"][2] = 0.0
    table = from_generator_output(failed)
    assert table["rollout_expert_indices"].is_valid().to_pylist() == [True, True, False]


def test_a_failure_masks_itself_alone_when_asked():
    output = to_generator_output(failed_table(), failed="trajectory")
    assert output["prompt_token_ids"] == [[0], [4], [1, 2], [1, 2, 3, 9], [4]]
    assert output["trajectory_ids"][:2] == [TrajectoryID("a", 0), TrajectoryID("a", 1)]


def test_a_placeholder_comes_back_as_a_failed_row_without_tokens():
    table = from_generator_output(to_generator_output(failed_table()))
    assert [e is not None for e in table["error"].to_pylist()] == [True, True, False, False, False]
    assert table["response_ids"].to_pylist()[:2] == [[], []]
    assert table["reward"].to_pylist()[:2] == [None, None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_ids", [1]),
        ("rewards", 1.0),
        ("loss_masks", [1]),
        ("stop_reasons", "stop"),
        ("rollout_logprobs", [-0.5]),
    ],
)
def test_what_only_resembles_a_placeholder_is_an_ordinary_row(name, value):
    row = PLACEHOLDER | {"rewards": 0.0} | {name: value}
    output = {key: [found] for key, found in row.items()}
    output["trajectory_ids"] = [{"instance_id": "a", "repetition_id": 0}]
    assert "error" not in from_generator_output(output).column_names


def test_a_merged_row_exports_the_reward_and_stop_reason_of_its_last_step():
    first = {"start": 0, "length": 1, "step_index": 0, "reward": 0.25, "stop_reason": "tool_call"}
    last = {"start": 1, "length": 1, "step_index": 1, "reward": 1.0, "stop_reason": "stop"}
    segments = [first | {"joined": True}, last | {"joined": True}]
    fields = [("start", pa.int32()), ("length", pa.int32()), ("step_index", pa.int32())]
    fields += [("joined", pa.bool_()), ("reward", pa.float64()), ("stop_reason", pa.string())]
    table = from_generator_output(TWO_TRAJECTORIES)
    column = pa.array([None, segments, None], pa.list_(pa.struct(fields)))
    summed = pa.array([0.0, 1.25, 0.5])
    table = table.drop_columns("reward").append_column("reward", summed)
    output = to_generator_output(table.append_column("segments", column))
    assert output["rewards"] == [0.0, 1.0, 0.5]
    assert output["stop_reasons"] == ["tool_call", "stop", "length"]


def test_rewards_per_token_on_some_rows_only_are_refused():
    table = from_generator_output(TWO_TRAJECTORIES)
    rewards = pa.array([[0.0], None, [0.0, 0.5]], pa.list_(pa.float64()))
    with pytest.raises(RolloutError, match=r"exported row 1"):
        to_generator_output(table.append_column("rewards", rewards))


def test_an_invalid_table_is_not_exported():
    table = from_generator_output(TWO_TRAJECTORIES)
    with pytest.raises(RolloutError, match="final_row_is_last"):
        to_generator_output(table.slice(0, 1))


def test_an_empty_table_is_not_exported():
    with pytest.raises(RolloutError, match="some_rows"):
        to_generator_output(from_generator_output(TWO_TRAJECTORIES).slice(0, 0))


def test_ids_have_the_attributes_of_skyrls_own():
    first = to_generator_output(from_generator_output(TWO_TRAJECTORIES))["trajectory_ids"][0]
    assert (first.instance_id, first.repetition_id, first.to_string()) == ("a", 0, "a_0")


def as_mapping(form):
    return {"instance_id": form.instance_id, "repetition_id": form.repetition_id}


def as_object(form):
    return SimpleNamespace(**as_mapping(form))


@pytest.mark.parametrize("make", [as_mapping, as_object])
def test_objects_and_numpy_values_are_accepted(make):
    output = copy.deepcopy(TWO_TRAJECTORIES)
    for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"):
        output[name] = [np.array(row) for row in output[name]]
    output["rewards"] = np.array(output["rewards"], np.float32)
    output["is_last_step"] = np.array(output["is_last_step"])
    output["trajectory_ids"] = [make(own) for own in output["trajectory_ids"]]
    output["env_metrics"][1]["turns"] = np.int64(2)
    assert to_generator_output(from_generator_output(output)) == TWO_TRAJECTORIES


def test_a_group_size_stands_in_for_missing_ids():
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
    output = {name: TWO_TRAJECTORIES[name] * 2 for name in names}
    table = from_generator_output(output, group_size=3)
    wanted = ["0_0", "0_1", "0_2", "1_0", "1_1", "1_2"]
    assert table["trajectory_id"].to_pylist() == wanted
    assert table["is_last_step"].to_pylist() == [True] * 6


def test_ids_without_last_steps_mean_one_row_per_trajectory():
    output = with_field("is_last_step", None)
    with pytest.raises(RolloutError, match="unique_trajectory"):
        from_generator_output(output)
    output["trajectory_ids"][1] = TrajectoryID("a", 7)
    assert from_generator_output(output)["step_index"].to_pylist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("response_ids", None, "fields"),
        ("response_ids", [], "some_rows"),
        ("pixel_values", [1, 2, 3], "fields"),
        ("rewards", [0.0, 1.0], "fields_align"),
        ("stop_reasons", ["stop"], "fields_align"),
        ("rewards", [0.0, [0.0, 1.0], 0.5], "reward_kind"),
        ("rewards", [0.0, None, 0.5], "field_kind"),
        ("rewards", [0.0, float("nan"), 0.5], "reward_finite"),
        ("rewards", [[0.0], [1.0], [0.5, 0.0]], "lengths_align"),
        ("loss_masks", [[1], [1], [1, 1]], "lengths_align"),
        ("loss_masks", [[1], [2, 1], [1, 1]], "mask_kind"),
        ("rollout_logprobs", [[-1.0], [-1.0], [-1.0, -1.0]], "lengths_align"),
        ("rollout_logprobs", [[-1.0], None, [-1.0, -1.0]], "field_kind"),
        ("rollout_logprobs", [[1.0], [-1.0, 0.0], [-1.0, -1.0]], "logprobs_nonpositive"),
        ("prompt_token_ids", [[1, 2], [], [4]], "nonempty_prompt"),
        ("prompt_token_ids", [[1, 2], [-1], [4]], "token_range"),
        ("prompt_token_ids", [[1, 2], [0.5], [4]], "field_kind"),
        ("prompt_token_ids", [[1, 2], [3, True], [4]], "field_kind"),
        ("prompt_token_ids", [[1, 2], [[1], [2, 3]], [4]], "field_kind"),
        ("trajectory_ids", None, "fields"),
        ("stop_reasons", 3, "field_kind"),
        ("response_ids", 3, "field_kind"),
        ("trajectory_ids", [IDS[0], {"instance_id": "a"}, IDS[2]], "trajectory_id"),
        ("trajectory_ids", [IDS[0], IDS[2], IDS[0]], "contiguous_trajectory"),
        ("is_last_step", [False, True, False], "final_row_is_last"),
        ("is_last_step", [True, True, True], "unique_trajectory"),
        ("is_last_step", [0, 1, 1], "last_flag"),
        ("env_metrics", [None, {"a": "b"}, None], "field_kind"),
        ("env_metrics", [None, 3, None], "field_kind"),
        ("stop_reasons", ["stop", 3, None], "field_kind"),
        ("rollout_expert_indices", [[[0]], None, None], "routing_shape"),
        ("rollout_expert_indices", [[[[0]], [[0, 1]]], None, None], "routing_shape"),
        ("rollout_expert_indices", [5, None, None], "routing_shape"),
        ("trajectory_ids", [{"instance_id": "a", "repetition_id": 2**31}] * 3, "trajectory_id"),
        ("trajectory_ids", [{"instance_id": "\ud800", "repetition_id": 0}] * 3, "trajectory_id"),
        ("stop_reasons", ["\ud800", "stop", "stop"], "field_kind"),
        ("env_metrics", [{"\ud800": 1.0}, None, None], "field_kind"),
        ("trajectory_generation_times", [[1.0, [2.0]], None, None], "field_kind"),
        ("rollout_expert_indices", [[[[2**15]]], None, None], "routing_shape"),
        ("trajectory_generation_times", [1.0, "x", 2.0], "field_kind"),
    ],
)
def test_a_bad_field_is_refused_by_name(name, value, rule):
    with pytest.raises(RolloutError) as caught:
        from_generator_output(with_field(name, value))
    assert caught.value.rule == rule


def test_generation_times_are_kept():
    output = with_field("trajectory_generation_times", [1.5, 1.5, 2.0])
    assert to_generator_output(from_generator_output(output), failed="trajectory") == output


@pytest.mark.parametrize(
    ("content", "rule"), [(b"{", "json_file"), (b"[]", "json_file"), (b"\xff", "json_file")]
)
def test_a_file_that_is_no_output_is_refused(content, rule, tmp_path):
    file = tmp_path / "output.json"
    file.write_bytes(content)
    with pytest.raises(RolloutError) as caught:
        read_generator_output(file)
    assert (caught.value.rule, caught.value.where) == (rule, str(file))


def test_a_number_that_json_lacks_leaves_no_file(tmp_path):
    output = with_field("env_metrics", [None, {"a": float("nan")}, None])
    with pytest.raises(RolloutError, match="json_number"):
        write_generator_output(from_generator_output(output), tmp_path / "output.json")
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_plain_json(tmp_path):
    file = tmp_path / "output.json"
    write_generator_output(from_generator_output(TWO_TRAJECTORIES), file)
    ids = {"trajectory_ids": [asdict(own) for own in IDS]}
    assert json.loads(file.read_text(encoding="utf-8")) == TWO_TRAJECTORIES | ids


UNKNOWN = {
    "splits": {"llm": [1.0, 2.0, 3.0], "env": [0.5, None, 0.25]},
    "pixel_values": [np.ones((2, 1)), np.zeros((1, 1)), np.ones((1, 1))],
}


def test_fields_without_a_column_are_kept_or_dropped_when_asked_with_a_warning():
    output = TWO_TRAJECTORIES | UNKNOWN
    with pytest.raises(RolloutError, match="other_fields"):
        from_generator_output(output)
    with pytest.warns(UserWarning, match="dropped: splits, pixel_values"):
        dropped = from_generator_output(output, other_fields="drop")
    assert dropped.equals(from_generator_output(TWO_TRAJECTORIES))
    with pytest.warns(UserWarning, match="kept as columns"):
        kept = from_generator_output(output, other_fields="keep")
    assert kept["splits"].to_pylist()[1] == {"llm": 2.0, "env": None}
    assert kept["pixel_values"].to_pylist() == [[[1.0], [1.0]], [[0.0]], [[1.0]]]


@pytest.mark.parametrize(
    "value", [[1, 2], {"llm": [1.0]}, 7, [1, "two", 3.0], [object(), None, None], {"llm": 1.0}]
)
def test_a_field_that_is_no_column_cannot_be_kept(value):
    with pytest.raises(RolloutError, match="other_fields"):
        from_generator_output(TWO_TRAJECTORIES | {"pixel_values": value}, other_fields="keep")


def test_a_conversion_keeps_other_fields(tmp_path):
    import rollout_io

    output = TWO_TRAJECTORIES | {"splits": UNKNOWN["splits"]}
    file = tmp_path / "output.json"
    file.write_text(json.dumps(output, default=asdict))
    convert = ["convert", str(file), "--format", "skyrl", "--out"]
    assert run([*convert, str(tmp_path / "refused")]) == 1
    with pytest.warns(UserWarning, match="kept"):
        assert run([*convert, str(tmp_path / "ds"), "--other-fields", "keep"]) == 0
    splits = rollout_io.read(tmp_path / "ds")["splits"].to_pylist()
    assert [split["llm"] for split in splits] == [1.0, 2.0, 3.0]


def _output(**fields):
    """Two steps of one attempt, which merge."""
    own = {"instance_id": "x", "repetition_id": 0}
    return {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4]],
        "response_ids": [[3], [5]],
        "rewards": [0.0, 1.0],
        "loss_masks": [[1], [1]],
        "is_last_step": [False, True],
        "trajectory_ids": [own, own],
        "rollout_metrics": {"a": 1.0},
        **fields,
    }


def test_string_ids_and_missing_ids_say_what_to_do():
    table = rollout_io.from_generator_output(_output(trajectory_ids=["add-3-4_0"] * 2))
    assert table["instance_id"].to_pylist() == ["add-3-4"] * 2
    with pytest.raises(InputError) as caught:
        rollout_io.from_generator_output(_output(trajectory_ids=["add-3-4"] * 2))
    assert "INSTANCE_REPETITION" in caught.value.expected
    with pytest.raises(InputError) as caught:
        rollout_io.from_generator_output(_output(trajectory_ids=None))
    assert "group_size" in (caught.value.hint or "")


def test_retokenized_rows_with_log_probabilities_are_no_missing_ones(tmp_path):
    output = _output(rollout_logprobs=[[-0.1], [-0.2]], token_source=["retokenized"] * 2)
    (tmp_path / "o.json").write_text(json.dumps(output))
    summary = rollout_io.convert([tmp_path / "o.json"], tmp_path / "ds").summary
    assert summary.num_retokenized == 2
    assert "log-probabilities" not in summary.text("ds")
