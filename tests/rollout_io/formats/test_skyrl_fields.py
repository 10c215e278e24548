"""Fields of a GeneratorOutput beyond the ones that SkyRL requires, and rows that lack something."""

import json
import warnings

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rollout_io
from rollout_io import (
    convert,
    from_generator_output,
    read_generator_output,
    to_generator_output,
    write_generator_output,
)
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES

PLAIN = {
    "prompt_token_ids": [[1, 2], [1, 2], [7], [7]],
    "response_ids": [[3], [4, 5], [6], [8, 9]],
    "rewards": [1.0, 0.0, 0.5, 0.25],
    "loss_masks": [[1], [1, 1], [1], [1, 1]],
}
IDS = [{"instance_id": name, "repetition_id": i} for name in "ab" for i in range(2)]
STEPS = PLAIN | {"trajectory_ids": [IDS[0]] * 4, "is_last_step": [False, False, False, True]}

FIELDS = {
    "temperature": (st.floats(0, 2, width=32), True),
    "top_p": (st.floats(0.125, 1, width=32), True),
    "top_k": (st.integers(-1, 2**31 - 1), True),
    "policy_version": (st.integers(0, 2**31 - 1), True),
    "agent": (st.text(st.characters(codec="utf-8")), True),
    "sampling_extra": (st.just('{"min_p":0.1}'), True),
    "token_source": (st.sampled_from(["engine", "retokenized"]), False),
}


def write(path, output):
    path.write_text(json.dumps(output), encoding="utf-8")
    return str(path)


@given(st.data())
def test_a_field_with_the_name_of_a_column_is_that_column(data):
    names = data.draw(st.sets(st.sampled_from(sorted(FIELDS)), min_size=1))
    given_fields = {}
    for name in names:
        values, nullable = FIELDS[name]
        row = st.none() | values if nullable else values
        given_fields[name] = data.draw(st.lists(row, min_size=4, max_size=4))
    for other_fields in ("refuse", "keep", "drop"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = from_generator_output(
                PLAIN | given_fields, group_size=2, other_fields=other_fields
            )
        for name, values in given_fields.items():
            assert table[name].to_pylist() == values, name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", ["hot"] * 4),
        ("temperature", [True] * 4),
        ("policy_version", [1.5] * 4),
        ("policy_version", [2**31] * 4),
        ("agent", [1] * 4),
        ("agent", ["\ud800"] * 4),
        ("token_source", ["guessed"] * 4),
        ("token_source", [None] * 4),
        ("temperature", [1.0]),
        ("temperature", 1.0),
    ],
)
def test_a_field_that_does_not_fit_its_column_is_refused_by_name(field, value):
    with pytest.raises(RolloutError, match=field):
        from_generator_output(PLAIN | {field: value}, group_size=2, other_fields="keep")


@pytest.mark.parametrize("field", ["reward", "loss_mask", "step_index", "source", "metrics"])
def test_a_field_with_the_name_of_a_computed_column_is_refused_by_name(field):
    with pytest.raises(RolloutError, match=f"column `{field}`") as caught:
        from_generator_output(PLAIN | {field: [1] * 4}, group_size=2, other_fields="keep")
    assert "--other-fields drop" in (caught.value.hint or "")


def test_newer_fields_of_skyrl_come_in_and_go_out_again(tmp_path):
    newer = {
        "trajectory_time_splits": {"llm": [1.0, 2.0, 3.0, 4.0], "env": [0.5, None, 0.25, 0.0]},
        "rollout_sample_support": [[[3, -1]], [[4, 1], [5, 2]], [[6, -1]], [[8, 9], [9, 8]]],
        "token_source": ["engine", "retokenized", "engine", "engine"],
    }
    output = PLAIN | newer | {"trajectory_ids": IDS}
    table = from_generator_output(output)
    assert table["trajectory_time_splits"].to_pylist()[1] == {"llm": 2.0, "env": None}
    file = tmp_path / "out.json"
    write_generator_output(table, file)
    again = json.loads(file.read_text())
    assert {name: again[name] for name in newer} == newer
    assert read_generator_output(file).equals(table)


def test_sample_support_of_merged_rows_is_exported_with_padding_at_observations(tmp_path):
    support = [[[3]], [[4], [5]], [[6]], [[8], [9]]]
    steps = STEPS | {"prompt_token_ids": [[1], [1, 3], [1, 3, 4, 5], [1, 3, 4, 5, 6]]}
    file = write(tmp_path / "steps.json", steps | {"rollout_sample_support": support})
    convert([file], tmp_path / "ds", format="skyrl")
    rollout_io_cli = ["merge", str(tmp_path / "ds"), "-o", str(tmp_path / "merged")]
    assert run(rollout_io_cli) == 0
    out = tmp_path / "again.json"
    assert run(["export", str(tmp_path / "merged"), "--format", "skyrl", "--out", str(out)]) == 0
    merged = json.loads(out.read_text())
    for ids, support in zip(merged["response_ids"], merged["rollout_sample_support"], strict=True):
        assert len(ids) == len(support)
        assert all(own[0] in (token, -1) for token, own in zip(ids, support, strict=True))
    table = read_generator_output(out)
    assert [[token] for token in table["response_ids"].to_pylist()[-1]] == table[
        "sampling_support"
    ].to_pylist()[-1]


def test_sample_support_that_some_rows_lack_is_not_exported_and_says_so(tmp_path):
    support = [[[3]], [[4], [5]], [[6]], [[8], [9]]]
    newer = {"rollout_sample_support": support, "trajectory_ids": IDS}
    table = from_generator_output(PLAIN | newer)
    place = table.column_names.index("sampling_support")
    kind = table.schema.field("sampling_support")
    values = [*table["sampling_support"].to_pylist()[:-1], None]
    table = table.set_column(place, kind, pa.array(values, kind.type))
    with rollout_io.RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table)
    done = rollout_io.export(tmp_path / "ds", tmp_path / "out.json", "skyrl")
    assert done.remarks == ["sampling_support not exported, because 1 row is without it"]
    assert "rollout_sample_support" not in json.loads((tmp_path / "out.json").read_text())


def test_outputs_without_ids_convert_with_a_group_size(tmp_path):
    files = [write(tmp_path / f"{i}.json", PLAIN | {"policy_version": [i] * 4}) for i in range(2)]
    out = tmp_path / "ds"
    arguments = ["convert", *files, "--format", "skyrl", "--out", str(out)]
    assert run([*arguments, "--group-size", "2"]) == 0
    table = rollout_io.read(out)
    assert table.num_rows == 8
    assert len(set(table["instance_id"].to_pylist())) == 4
    assert table["repetition_id"].to_pylist() == [0, 1] * 4
    assert set(table["is_last_step"].to_pylist()) == {True}


@pytest.mark.parametrize(("size", "named"), [(None, "--group-size"), ("3", "groups of 3")])
def test_outputs_without_ids_name_the_option(tmp_path, capsys, size, named):
    file = write(tmp_path / "out.json", PLAIN)
    arguments = ["convert", file, "--format", "skyrl", "--out", str(tmp_path / "ds")]
    assert run(arguments + (["--group-size", size] if size else [])) == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "ds").exists()


def test_a_group_size_is_refused_for_formats_that_name_their_groups(tmp_path):
    choices = Keywords(group_size=2)
    with pytest.raises(RolloutError, match="group-size"):
        convert([EXAMPLES / "shop.calls.jsonl"], tmp_path / "ds", **choices)


@pytest.mark.parametrize("flags", [None, [True, True, True, True]])
def test_repeated_ids_name_is_last_step(flags):
    output = PLAIN | {"trajectory_ids": [IDS[0]] * 4, "is_last_step": flags}
    with pytest.raises(RolloutError, match="is_last_step") as caught:
        from_generator_output(output)
    assert "is_last_step" in (caught.value.hint or "")
    assert caught.value.rule == "unique_trajectory"


def with_empty(rows, rewards):
    def cut(values):
        return [[] if row in rows else value for row, value in enumerate(values)]

    lists = {name: cut(STEPS[name]) for name in ("response_ids", "loss_masks")}
    return STEPS | lists | {"rewards": rewards, "env_metrics": [None] * 3 + [{"turns": 4.0}]}


@example({3}, [0.0, 0.0, 0.0, 1.0])
@example({3}, [0.0, 0.0, 1.0, 0.0])
@given(
    st.sets(st.integers(0, 3), min_size=1),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4),
)
def test_an_empty_response_costs_its_row_and_never_changes_a_return_silently(rows, rewards):
    output = with_empty(rows, rewards)
    with pytest.warns(UserWarning, match=f"{len(rows)} rows? with an empty response"):
        table = from_generator_output(output)
    if "error" in table.column_names:
        assert 0 in rows or any(rewards[:3])
        assert set(table["reward"].to_pylist()) == {None}
        assert all(table["error"].to_pylist())
    else:
        moved = table["reward"].to_pylist()
        assert moved[-1] == rewards[-1]
        assert sum(moved) == sum(rewards)
        assert table["metrics"].to_pylist()[-1] == [{"key": "turns", "value": 4.0}]
        assert table["step_index"].to_pylist() == list(range(4 - len(rows)))
        assert table["is_last_step"].to_pylist() == [False] * (3 - len(rows)) + [True]


def test_an_empty_response_fails_its_attempt_and_not_its_group():
    output = PLAIN | {"response_ids": [[3], [], [6], [8, 9]], "loss_masks": [[1], [], [1], [1, 1]]}
    with pytest.warns(UserWarning, match="1 trajectory failed"):
        table = from_generator_output(output, group_size=2)
    errors = table["error"].to_pylist()
    assert [error is None for error in errors] == [True, False, True, True]
    assert table["reward"].to_pylist() == [1.0, None, 0.5, 0.25]
    assert to_generator_output(table, failed="trajectory")["rewards"] == [1.0, 0.0, 0.5, 0.25]


def test_rows_with_an_error_have_failed():
    table = from_generator_output(PLAIN | {"error": [None, "crashed", None, None]}, group_size=2)
    assert table["error"].to_pylist()[1] == "crashed"
    assert table["reward"].to_pylist() == [1.0, None, 0.5, 0.25]
