"""Which sequences are trained: by which rule steps merge, and datasets that were merged before."""

import json

import pytest

import pipelines
import rollout_io
import trainer
from rollout_io.cli.main import run
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import save_tiny_model, step, write_dataset
from trainer.reports.dry_run import dry_run


def trajectory(repetition, reward):
    """Three steps that continue each other; a sub-agent's call lies between the last two."""
    first = [1, 2, 3, 4 + repetition]
    second = [*first, 5, 6, 7]
    steps = [
        step("a", repetition, 0, first[:2], first[2:], reward=0.0),
        step("a", repetition, 1, [*first, 5], [6, 7], reward=0.0),
        step("a", repetition, 2, [30, 31], [32], reward=0.0),
        step("a", repetition, 3, [*second, 8], [9], reward=reward),
    ]
    steps[-1]["is_last_step"] = True
    return steps


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The model; the steps; merged by either rule; merged without a word of it in the metadata."""
    folder = tmp_path_factory.mktemp("merge")
    steps = write_dataset(folder / "steps", [*trajectory(0, 1.0), *trajectory(1, 0.0)])
    for rule in ("consecutive", "lineage"):
        assert run(["merge", steps, "--rule", rule, "--out", str(folder / rule)]) == 0
    merged = pipelines.merge(rollout_io.scan(steps), "consecutive").collect()
    with rollout_io.RolloutWriter(folder / "unsaid") as writer:
        writer.write(merged)
    names = ("steps", "consecutive", "lineage", "unsaid")
    return {name: str(folder / name) for name in names} | {
        "model": save_tiny_model(folder / "model")
    }


def config_of(paths, dataset, out, **settings):
    return train_config(dataset=paths[dataset], model=paths["model"], out=str(out), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "rule", "num_rows"),
    [
        ("steps", None, 4),
        ("steps", "consecutive", 6),
        ("steps", "keep", 8),
        ("consecutive", None, 6),
        ("consecutive", "lineage", 4),
        ("lineage", None, 4),
        ("lineage", "consecutive", 6),
        ("unsaid", None, 6),
    ],
)
def test_sequences_are_merged_as_asked_and_a_merged_dataset_is_trained_as_it_is(
    paths, tmp_path, dataset, rule, num_rows
):
    config = config_of(paths, dataset, tmp_path / "run", merge_rule=rule)
    metrics = trainer.train(config).metrics
    assert metrics["num_rows"] == metrics["generate/num_seq_after_merge"] == num_rows
    assert metrics["generate/num_seq_before_merge"] == 8
    assert (
        dry_run(config_of(paths, dataset, tmp_path / "dry", merge_rule=rule))
        .layouts["merge"]
        .num_sequences
        == num_rows
    )
    saved = json.loads((tmp_path / "run/config.json").read_text())["batch"]["merge_rule"]
    assert saved == (rule or ("lineage" if dataset == "steps" else "keep"))


@pytest.mark.slow
def test_every_rule_gives_the_same_loss(paths, tmp_path):
    found = [
        trainer.train(config_of(paths, "steps", tmp_path / rule, merge_rule=rule)).metrics
        for rule in ("lineage", "consecutive", "keep")
    ]
    norms = [metrics["grad_norm"] for metrics in found]
    assert norms[0] > 0.1
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
