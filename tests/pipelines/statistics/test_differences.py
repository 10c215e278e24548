"""Differences of two datasets: planted regressions are found, and nothing is found by chance."""

import json
import math
import shlex

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from benchmarks.diff_errors import SHAPES, measured
from pipelines import merge
from pipelines.cli.diff import suspected
from pipelines.statistics import differences as comparison
from pipelines.statistics.attempts import attempts, broken_prefixes, greedy_partings
from pipelines.statistics.differences import (
    DIRECTIONS,
    differences,
    discoveries,
    least_changed,
    mean_intervals,
    permutation_test,
    suspicions,
)
from rollout_io import RolloutWriter, scan
from rollout_io.cli.main import run
from tests.helpers.filter_helpers import one_step, table


def lines(returns, **numbers):
    """Lines of `attempts`: returns by task, and other numbers, the same for all attempts."""
    rows = [
        {"instance_id": f"t{task}", "trajectory_id": f"t{task}_{n}", "return": value, "error": None}
        for task, values in enumerate(returns)
        for n, value in enumerate(values)
    ]
    schema = {"instance_id": pl.String, "trajectory_id": pl.String, "return": pl.Float64}
    kinds = {
        "tools": pl.List(pl.String),
        "failed_tools": pl.List(pl.String),
        "stop_reason": pl.String,
    }
    kinds["environment"] = pl.List(pl.Struct({"key": pl.String, "value": pl.Float64}))
    frame = pl.DataFrame(rows, {**schema, "error": pl.String})
    empty = {name: pl.lit(None, kind) for name, kind in kinds.items()}
    given_numbers = {
        name: pl.Series([v for task in values for v in task], dtype=pl.Float64)
        for name, values in numbers.items()
    }
    unknown = {"version": pl.lit(None, pl.Int32), "greedy": pl.lit(None, pl.String)}
    return frame.with_columns(**unknown, **empty, **given_numbers)


def passes(rng, rates, num):
    return (rng.random((len(rates), num)) < np.array(rates)[:, None]).astype(float)


def numbers_of(found):
    return {line["name"]: line for line in found.numbers.to_dicts()}


def test_all_planted_regressions_are_found_and_few_others():
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rates = rng.uniform(0.5, 1.0, 200)
        before, after = passes(rng, rates, 16), passes(rng, rates, 16)
        before[:20], after[:20] = passes(rng, [0.95] * 20, 16), passes(rng, [0.05] * 20, 16)
        tasks = differences(lines(before), lines(after)).tasks
        certain = set(tasks.filter(is_certain=True)["instance_id"])
        planted = {f"t{n}" for n in range(20)}
        assert planted <= certain
        assert len(certain - planted) <= 0.05 * len(certain) + 1
        losses = tasks.filter(pl.col("instance_id").is_in(list(planted)))["verdict"]
        assert set(losses) == {"loss"}


@pytest.mark.slow
def test_intervals_of_splits_without_a_difference_contain_0_in_95_percent():
    rng = np.random.default_rng(7)
    inside = dict.fromkeys((8, 30, 120), 0)
    for num in inside:
        rates = rng.uniform(0.0, 1.0, num)
        for _ in range(500):
            both = passes(rng, rates, 8)
            change = both[:, 4:].mean(axis=1) - both[:, :4].mean(axis=1)
            ((low, high),) = mean_intervals(change[:, None])
            inside[num] += low <= 0 <= high
    assert all(0.93 <= number / 500 <= 0.97 for number in inside.values()), inside


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_test_of_successes_is_fishers_exact_test(num, other, data):
    a, b = data.draw(st.integers(0, num)), data.draw(st.integers(0, other))
    first, second = (np.array([1.0] * x + [0.0] * (n - x)) for x, n in ((a, num), (b, other)))
    ways = {
        x: math.comb(num, x) * math.comb(other, a + b - x)
        for x in range(max(0, a + b - other), min(num, a + b) + 1)
    }

    def change(x):
        return abs(x / num - (a + b - x) / other)

    extreme = sum(n for x, n in ways.items() if change(x) >= change(a) - 1e-9)
    assert permutation_test(first, second) == pytest.approx(extreme / math.comb(num + other, a + b))


@pytest.mark.parametrize("unit", [1e-300, 1e-10, 1.0, 1e308])
@pytest.mark.parametrize("base", [-1.0, 0.0])
def test_the_unit_of_returns_does_not_matter(unit, base):
    first, second = np.full(4, base * unit), np.full(4, (base + 1) * unit)
    assert permutation_test(first, second) == pytest.approx(2 / 70)


def test_a_constant_in_all_returns_does_not_matter_until_the_difference_is_rounding():
    assert permutation_test(np.full(4, 1e5), np.full(4, 1e5 + 1)) == pytest.approx(2 / 70)
    assert permutation_test(np.full(4, 1e12), np.full(4, 1e12 + 1)) == 1


def test_tasks_with_different_numbers_of_attempts_keep_their_own_probabilities():
    before, after = [[0.0] * 4, [0.0] * 2, [0.0] * 3], [[1.0] * 4, [1.0] * 2, [1.0] * 3]
    found = differences(lines(before), lines(after)).tasks
    assert found["p"].to_list() == pytest.approx([2 / 70, 2 / 6, 2 / 20])


def test_large_groups_are_tested_with_random_splits():
    rng = np.random.default_rng(0)
    same = permutation_test(rng.normal(size=40), rng.normal(size=40))
    other = permutation_test(rng.normal(size=40), rng.normal(2.0, size=40))
    assert same > 0.05
    assert other == pytest.approx(1 / 20_001)


@given(st.lists(st.floats(0, 1), max_size=30))
def test_discoveries_are_those_of_benjamini_and_hochberg(p):
    ordered = sorted(p)
    most = max((k for k, one in enumerate(ordered, 1) if one <= 0.05 * k / len(p)), default=0)
    assert sum(discoveries(p)) == sum(one <= ordered[most - 1] for one in p) * bool(most)


def test_one_task_or_none_in_both_has_no_interval():
    found = differences(lines([[1.0, 0.0]]), lines([[1.0, 1.0], [0.0]]))
    assert (found.num_only_a, found.num_only_b) == (0, 1)
    assert numbers_of(found)["return"]["change"] == 0.5
    assert numbers_of(found)["return"]["low"] is None
    assert differences(lines([]), lines([[1.0]])).tasks.is_empty()


def test_ids_that_end_in_a_version_are_different_tasks(tmp_path, capsys):
    def write(name, **groups):
        with RolloutWriter(tmp_path / name) as writer:
            writer.write(table(*(x for i, r in groups.items() for x in one_step(*r, instance=i))))
        return str(tmp_path / name)

    a = write("a", **{"react": [0.0] * 4, "react@18": [1.0] * 4})
    b = write("b", **{"react": [1.0] * 4, "react@18": [0.0] * 4})
    assert run(["diff", a, b, "--json"]) == 0
    verdicts = {
        x["instance_id"]: x["verdict"] for x in json.loads(capsys.readouterr().out)["tasks"]
    }
    assert verdicts == {"react": "win", "react@18": "loss"}


def test_every_number_says_how_many_tasks_attempts_and_unknowns_it_rests_on():
    """B crashes at 7 of 10 tasks, and solves the other 3."""
    before = [[float(task < 5)] * 4 for task in range(10)]
    after = [[1.0] * 4 if task in (4, 5, 6) else [None] * 4 for task in range(10)]
    crashed = pl.when(pl.col("return").is_null()).then(pl.lit("crash")).alias("error")
    found = differences(lines(before), lines(after).with_columns(crashed))
    numbers = numbers_of(found)
    names = ("a", "b", "num_tasks", "num_attempts_a", "num_attempts_b", "num_unknown_a")
    facts = {
        name: (*(round(one[x], 4) for x in names), one["num_unknown_b"])
        for name, one in numbers.items()
    }
    assert facts == {
        "return": (0.3333, 1.0, 3, 12, 12, 0, 28),
        "pass rate": (0.3333, 1.0, 3, 12, 12, 0, 28),
        "pass rate, failed as 0": (0.5, 0.3, 10, 40, 40, 0, 0),
        "failed": (0.0, 0.7, 10, 40, 40, 0, 0),
    }
    assert found.tasks["verdict"].value_counts().sort("verdict").rows() == [
        ("tie", 1), ("unknown", 7), ("win", 2),
    ]  # fmt: skip
    assert found.tasks["num_unknown_b"].to_list() == [4] * 4 + [0] * 3 + [4] * 3


def test_an_attempt_without_a_return_that_did_not_fail_stays_unknown():
    found = numbers_of(differences(lines([[1.0, None]] * 2), lines([[None, None], [1.0, 0.0]])))
    assert (found["pass rate"]["num_tasks"], found["pass rate"]["num_unknown_b"]) == (1, 2)
    assert "pass rate, failed as 0" not in found


@pytest.mark.parametrize(
    ("before", "after"),
    [([0.3] * 5, [0.1 + 0.2] * 5), ([0.1] * 3, [0.1]), ([1e6, 1e6], [1e6 + 1e-5] * 2)],
)
def test_returns_that_differ_by_rounding_tie(before, after):
    found = differences(lines([before] * 6), lines([after] * 6))
    assert set(found.tasks["verdict"]) == {"tie"}
    assert found.tasks["p"].to_list() == [1.0] * 6
    one = numbers_of(found)["return"]
    assert (one["change"], one["low"], one["is_certain"]) == (0.0, None, False)


def test_a_return_that_is_0_but_for_rounding_does_not_pass():
    found = differences(lines([[0.3 - 0.2 - 0.1]]), lines([[1.0]]))
    assert numbers_of(found)["pass rate"]["a"] == 0.0


def test_what_a_dataset_does_not_record_is_unknown_and_not_0():
    said = [{"role": "assistant", "tool_calls": [{"function": {"name": "calc"}}]}]
    step = {"messages": json.dumps(said), "stop_reason": "stop", "reward": 1.0}
    b = table(*[(f"t{n}", 0, [step]) for n in range(3)], optional=("messages",))
    a = table(*[(f"t{n}", 0, [{"reward": 1.0}]) for n in range(3)])
    found = numbers_of(differences(attempts(a), attempts(b)))
    for name in ("calls of calc", "stopped: stop"):
        one = found[name]
        assert (one["a"], one["b"], one["change"], one["num_tasks"]) == (None, None, None, 0)
        assert (one["num_unknown_a"], one["num_unknown_b"]) == (3, 0)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1, "temperature": 1.0}])
def test_copies_of_a_greedy_attempt_are_one_attempt(sampling):
    def side(value, **step):
        trajectories = [
            (f"t{t}", n, [step | {"reward": value}]) for t in range(9) for n in range(8)
        ]
        return attempts(table(*trajectories, optional=tuple(sampling)))

    found = differences(side(0.0, **sampling), side(1.0, **sampling))
    assert (found.num_copies_a, found.num_copies_b) == (63, 63)
    assert set(found.tasks.select("num_a", "num_b", "is_certain").rows()) == {(1, 1, False)}
    assert found.least_changed is None
    other = {"temperature": 1.0}
    sampled = differences(side(0.0, **other), side(1.0, **other))
    assert sampled.num_copies_a == 0
    assert sampled.tasks["is_certain"].all()


def test_a_rising_return_with_a_worse_witness_is_suspicious():
    rng = np.random.default_rng(1)
    before, after = passes(rng, [0.3] * 30, 8), passes(rng, [0.9] * 30, 8)
    calm, wild = rng.normal(0.1, 0.01, (30, 8)), rng.normal(0.4, 0.01, (30, 8))
    found = differences(
        lines(before, **{"repeated 4-grams": calm, "tool errors": calm}),
        lines(after, **{"repeated 4-grams": wild, "tool errors": calm}),
    )
    (one,) = found.suspicions
    assert (one["name"], one["num_tasks"], len(one["tasks"])) == ("repeated 4-grams", 30, 5)
    assert 0.28 < one["low"] < one["change"] < one["high"] < 0.32
    same = differences(lines(before), lines(after))
    assert same.suspicions == []


def test_tasks_of_a_suspicion_are_those_whose_return_rose_and_whose_witness_worsened():
    rng = np.random.default_rng(1)
    rose = [[0.0] * 8] * 28
    unchanged = [[1.0] * 8] * 2
    calm = np.full((30, 8), 0.1)
    wild = rng.normal(0.4, 0.01, (30, 8)) + np.where(np.arange(30) < 28, 0, 0.5)[:, None]
    found = differences(
        lines([*rose, *unchanged], **{"repeated 4-grams": calm}),
        lines([[1.0] * 8] * 30, **{"repeated 4-grams": wild}),
    )
    (one,) = found.suspicions
    worst = wild[:28].mean(axis=1).argsort()[::-1][:5].tolist()
    assert one["tasks"] == [found.tasks["instance_id"][i] for i in worst]


def test_a_suspicion_names_no_task_whose_witness_did_not_move():
    numbers = pl.DataFrame(
        {
            "name": ["return", "tool errors"],
            "direction": [1, -1],
            "change": [0.5, 0.2],
            "is_certain": [True, True],
        }
    )
    moved = {"return": [0.5, 0.5, 0.5], "tool errors": [0.6, 0.0, -0.1]}
    both = pl.DataFrame(
        [(name, f"t{i}", change) for name, by in moved.items() for i, change in enumerate(by)],
        ["name", "instance_id", "change"],
        orient="row",
    )
    (one,) = suspicions(numbers, both)
    assert one["tasks"] == ["t0"]


def test_a_number_is_a_witness_only_if_its_direction_is_given():
    before, after = lines([[0.0] * 4] * 12), lines([[1.0] * 4] * 12)

    def with_tests(side, value):
        pairs = [{"key": "tests_failed", "value": value}]
        kind = pl.List(pl.Struct({"key": pl.String, "value": pl.Float64}))
        return side.with_columns(environment=pl.lit(pl.Series([pairs], dtype=kind)).first())

    sides = with_tests(before, 1.0), with_tests(after, 3.0)
    name = "environment/tests_failed"
    assert differences(*sides).suspicions == []
    assert numbers_of(differences(*sides))[name]["direction"] is None
    given_directions = DIRECTIONS | {name: -1}
    assert [x["name"] for x in differences(*sides, directions=given_directions).suspicions] == [
        name
    ]
    assert differences(*sides, directions=DIRECTIONS | {name: 1}).suspicions == []


def test_a_direction_of_an_unknown_number_is_refused(shop_dataset, capsys):
    arguments = ["diff", str(shop_dataset), str(shop_dataset)]
    assert run([*arguments, "--lower", "steps"]) == 0
    assert run([*arguments, "--lower", "stepz"]) == 2
    assert "'stepz'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_suspicions_and_certain_numbers_are_false_in_at_most_5_percent(shape):
    for num_tasks in (5, 20):
        same = measured(shape, num_tasks, 120, seed=3)[:6]
        _, _, any_certain, suspected_any, any_task, _ = same
        assert max(any_certain, suspected_any, any_task) <= 0.05 + 0.05  # two standard errors


@pytest.mark.parametrize("free", [1, 2, 3, 4, 10, 49, 1000])
@pytest.mark.parametrize("level", [0.95, 0.997])
def test_quantiles_are_those_of_students_t(free, level):
    """By numerical integration of the density."""
    q = comparison._student_quantile(level, free)
    x = np.linspace(0.0, q, 200_001)
    log = math.lgamma((free + 1) / 2) - math.lgamma(free / 2) - math.log(free * math.pi) / 2
    density = np.exp(log - (free + 1) / 2 * np.log1p(x**2 / free))
    assert 2 * np.trapezoid(density, x) == pytest.approx(level, abs=1e-8)


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=20), st.floats(1e-3, 1e300))
def test_intervals_contain_the_mean_and_scale_with_the_unit(values, unit):
    column = np.array(values)[:, None]
    ((low, high),) = mean_intervals(column)
    ((other_low, other_high),) = mean_intervals(column * unit)
    if np.isfinite(low) and np.ptp(column) > 1e-3 and np.isfinite(column * unit).all():
        assert low <= column.mean() <= high
        assert [other_low, other_high] == pytest.approx([low * unit, high * unit], rel=1e-6)


def test_equal_changes_and_single_tasks_claim_no_exact_interval():
    ((low, high),) = mean_intervals(np.ones((12, 1)))
    assert 0.7 < low < 0.9 < high < 1.2
    for column in ([0.0] * 12, [1.0], [1.0, np.nan]):
        assert np.isinf(mean_intervals(np.array(column)[:, None])).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_least_number_of_changed_tasks_is_where_discoveries_begin(sizes):
    least = [permutation_test(np.zeros(n), np.ones(m)) for n, m in sizes]
    order = np.argsort(least)

    def num_found(num):
        p = np.ones(len(sizes))
        p[order[:num]] = np.array(least)[order[:num]]
        return sum(discoveries(p))

    enough = [num for num in range(1, len(sizes) + 1) if num_found(num)]
    assert least_changed(sizes) == (enough[0] if enough else None)


def test_merging_changes_no_number(shop_dataset):
    steps = scan(shop_dataset)
    one, other = attempts(steps), attempts(merge(steps))
    assert_frame_equal(one, other, rel_tol=1e-12)


def test_numbers_of_attempts_are_what_their_rows_say():
    said = [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}] * 2,
        },
        {"role": "tool", "content": "Error: no such file"},
        {"role": "tool", "content": "ok"},
    ]
    steps = [
        {"response_ids": [1, 2, 3, 4, 1, 2, 3, 4], "loss_mask": [True] * 8, "messages": None},
        {
            "response_ids": [5],
            "loss_mask": [True],
            "messages": json.dumps(said),
            "stop_reason": "stop",
        },
    ]
    rows = table(
        ("a", 0, steps),
        ("a", 1, [{"messages": '[broken "tool_calls'}]),
        ("a", 2, [{"messages": json.dumps(said[:1])}]),
        ("a", 3, [{"messages": json.dumps([{"role": "user", "content": "Hi"}])}]),
        optional=("messages",),
    )
    first, second, unanswered, silent = attempts(rows).to_dicts()
    assert first["tools"] == ["bash", "bash"]
    assert first["tool errors"] == 0.5
    assert (first["steps"], first["response tokens"]) == (2, 9)
    assert first["repeated 4-grams"] == pytest.approx(1 / 5)
    assert first["stop_reason"] == "stop"
    assert (second["tools"], second["tool errors"]) == (None, None)
    assert unanswered["tools"] == ["bash", "bash"]
    assert (unanswered["failed_tools"], unanswered["tool errors"]) == (None, None)
    assert (silent["tools"], silent["failed_tools"], silent["tool errors"]) == ([], [], None)


def test_greedy_attempts_part_at_the_first_other_token():
    def greedy(*responses, temperature=0.0):
        step = {"temperature": temperature, "prompt_token_ids": [1, 2]}
        return [
            (f"t{n}", 0, [{**step, "response_ids": r, "loss_mask": [True] * len(r)}])
            for n, r in enumerate(responses)
        ]

    a = table(*greedy([5, 6], [5], [7]), optional=("temperature",))
    b = table(*greedy([5, 9], [5], [8]), optional=("temperature",))
    found = greedy_partings(pl.from_arrow(a).lazy(), pl.from_arrow(b).lazy())
    assert found.select("instance_id", "row", "token").rows() == [
        ("t0", 0, 3), ("t1", None, None), ("t2", 0, 2),
    ]  # fmt: skip
    ((task, number, warm),) = greedy([5, 6], temperature=1.0)
    for steps in (warm, [*greedy([5, 6])[0][2], *warm]):
        sampled = table((task, number, steps), optional=("temperature",))
        assert greedy_partings(pl.from_arrow(a).lazy(), pl.from_arrow(sampled).lazy()).is_empty()


@pytest.mark.parametrize("layout", ["prefix", "full"])
def test_rows_that_keep_only_a_part_of_an_earlier_row_are_counted(tmp_path, layout):
    kept = [([1, 2], [3]), ([1, 2, 3, 9], [4]), ([1, 2, 3, 9, 4, 5], [6])]
    cut = [([1, 2], [3]), ([1, 2, 9], [4]), ([7], [4])]
    steps = [
        [{"prompt_token_ids": p, "response_ids": r, "loss_mask": [True]} for p, r in one]
        for one in (kept, cut)
    ]
    with RolloutWriter(tmp_path / "ds", layout=layout) as writer:
        writer.write(table(("a", 0, steps[0]), ("a", 1, steps[1])))
    assert broken_prefixes(tmp_path / "ds")["broken prefixes"].to_list() == [0, 1]


def test_the_screen_names_what_got_worse_for_certain(tmp_path, capsys):
    def write(name, *groups):
        with RolloutWriter(tmp_path / name) as writer:
            writer.write(table(*(one for group in groups for one in group)))
        return str(tmp_path / name)

    a = write("a", one_step(*[1.0] * 8), one_step(0.0, 1.0, instance="b"))
    b = write(
        "b", one_step(*[0.0] * 8), one_step(1.0, 0.0, instance="b"), one_step(1.0, instance="c")
    )
    assert run(["diff", a, f"{b}*"]) == 0
    printed, said = capsys.readouterr()
    assert "2 tasks in both, 1 only in B" in printed
    assert shlex.split(said.splitlines()[-1]) == ["next:", "rollouts", "view", a, f"{b}*"]
    assert f"'{b}*'" in said
    assert "tasks, for B: 0 win, 1 tie, 1 loss, 0 unknown" in printed
    assert "worse for certain: 1 of 1\n  a: 1 -> 0 in 8 and 8 attempts" in printed
    assert run(["diff", a, b, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"][0]["p"] == pytest.approx(2 / math.comb(16, 8))
    other = write("other", one_step(1.0, instance="z"))
    assert run(["diff", a, other]) == 1
    assert "[same_tasks]" in capsys.readouterr().err


def test_the_share_of_positive_returns_is_a_pass_rate_only_if_returns_are_0_or_1(tmp_path, capsys):
    def label(*rewards):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        with RolloutWriter(path) as writer:
            writer.write(table(*one_step(*rewards)))
        assert run(["diff", str(path), str(path)]) == 0
        return next(x for x in capsys.readouterr().out.splitlines() if "100.0 %" in x)

    assert label(1.0, 1.0).startswith("pass rate ")
    assert label(0.05, 1.0).startswith("share with return > 0 ")


def test_a_bound_that_is_not_0_does_not_look_like_0():
    one = {"name": "tool errors", "num_tasks": 9, "change": 0.009, "tasks": ["a"]}
    (line,) = suspected([one | {"low": 0.00034, "high": 0.018}])
    assert "changed by +0.9 % (+0.03 % .. +1.8 %)" in line
    (line,) = suspected([one | {"change": -0.009, "low": -0.018, "high": -0.00006}])
    assert "changed by -0.9 % (-1.8 % .. -0.006 %)" in line


@pytest.mark.parametrize("num", [200, 300])
def test_splits_in_blocks_are_those_of_one_block(monkeypatch, num):
    rng = np.random.default_rng(3)
    first, second = rng.normal(size=num), rng.normal(0.15, size=num)
    monkeypatch.setattr(comparison, "MOST_SPLITS", 2000)
    monkeypatch.setattr(comparison, "_MOST_KEPT", 10_000)
    comparison._splits.cache_clear()
    whole = permutation_test(first, second)
    monkeypatch.setattr(comparison, "_MOST_KEPT", 0)
    monkeypatch.setattr(comparison, "_BLOCK", 7 * num)
    sizes = [len(block) for block in comparison._blocks(num, num)]
    comparison._splits.cache_clear()
    assert sum(sizes) == 2000
    assert max(sizes) * 2 * num <= 7 * num
    assert permutation_test(first, second) == whole
    assert 0 < whole < 1


def test_two_runs_of_training_name_the_verbs_that_compare_them(tmp_path, capsys):
    runs = [tmp_path / "a", tmp_path / "b c"]
    for path in runs:
        path.mkdir()
        (path / "metrics.jsonl").write_text("{}\n")
    assert run(["diff", *map(str, runs)]) == 1
    said = capsys.readouterr().err
    for verb in ("plot", "view"):
        assert f"`rollouts {verb} {runs[0]} '{runs[1]}'`" in said
    assert "[dataset_exists]" in said
