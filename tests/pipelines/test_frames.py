"""The namespace `rollouts` of Polars frames, and paths in place of frames."""

import subprocess
import sys

import polars as pl
import pytest

import pipelines
import rollout_io
import schemas
from tests.conftest import EXAMPLES


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    out = tmp_path_factory.mktemp("frames") / "shop"
    rewards = EXAMPLES / "shop.rewards.jsonl"
    rollout_io.convert(EXAMPLES / "shop.calls.jsonl", out, rewards=rewards)
    return out


@pytest.mark.parametrize("is_lazy", [True, False])
def test_the_namespace_does_what_the_functions_do(dataset, *, is_lazy):
    steps = rollout_io.scan(dataset)
    frame = steps if is_lazy else steps.collect()
    rules = [pipelines.where("return > 0"), pipelines.zero_variance()]
    outcomes = pipelines.trajectory_returns(steps).rename({"return": "reward"})
    pairs = [
        (frame.rollouts.merge(), pipelines.merge(steps)),
        (frame.rollouts.merge().rollouts.unmerge(), pipelines.unmerge(pipelines.merge(steps))),
        (frame.rollouts.place_rewards(), pipelines.place_rewards(steps)),
        (frame.rollouts.returns(), pipelines.trajectory_returns(steps)),
        (frame.rollouts.stats(), pipelines.dataset_metrics(steps)),
        (frame.rollouts.messages(), pipelines.messages(steps)),
        (
            frame.rollouts.filter(pipelines.zero_variance()),
            pipelines.apply_filters(steps, rules[1:])[0],
        ),
        (frame.rollouts.filter("return > 0"), pipelines.apply_filters(steps, rules[0])[0]),
        (frame.rollouts.place_outcomes(outcomes), pipelines.place_outcomes(steps, outcomes)),
    ]
    for ours, theirs in pairs:
        assert isinstance(ours, pl.LazyFrame)
        assert ours.collect().equals(theirs.collect())


def test_scan_alone_registers_the_namespace(dataset):
    code = "import rollout_io, sys; print(rollout_io.scan(sys.argv[1]).rollouts.returns().collect().height)"
    command = [sys.executable, "-c", code, str(dataset)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "48\n"


def test_a_path_a_frame_and_a_table_are_taken_alike(dataset):
    table = rollout_io.read(dataset)
    forms = [
        dataset,
        str(dataset),
        [dataset],
        table,
        rollout_io.scan(dataset),
        pl.from_arrow(table),
    ]
    for transform in (pipelines.merge, pipelines.trajectory_returns, pipelines.dataset_metrics):
        first, *others = [transform(form).collect() for form in forms]
        assert all(first.equals(other) for other in others)
    assert all(rollout_io.check(form).is_empty() for form in forms)
    assert all(rollout_io.to_hf(form).num_rows == 205 for form in forms)


def test_one_filter_is_a_list_of_one(dataset):
    rule = pipelines.zero_variance()
    for apply in (pipelines.apply_filters, pipelines.apply_masks):
        (one, counts), (several, same) = apply(dataset, rule), apply(dataset, [rule])
        assert (one.collect().equals(several.collect()), counts.equals(same)) == (True, True)
    assert pipelines.judge(dataset, rule).equals(pipelines.judge(dataset, [rule]))


def test_dir_lists_the_exports_of_each_package():
    for package in (schemas, rollout_io, pipelines):
        assert dir(package) == sorted(package.__all__)
