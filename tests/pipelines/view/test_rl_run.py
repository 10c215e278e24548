"""The viewer on a run of `rollouts rl`: several datasets, whose trajectories may have the same names."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from pipelines import scan_token_records
from rollout_io import RolloutWriter, read_metadata, scan
from tests.helpers.rl_helpers import config_of, lines_of, rows_of, save_model, write_tasks
from tests.helpers.view_helpers import Asked
from trainer import rl

NUM_ITERATIONS = 4
pytestmark = pytest.mark.slow
UPDATES = range(1, 2 * NUM_ITERATIONS + 1)
RECORDED = {"advantage": "advantages", "logprob": "logprobs", "loss": "losses"}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tokenizer):
    """Four iterations of two groups, of three tasks: each task comes back."""
    folder = tmp_path_factory.mktemp("rl")
    config = config_of(
        folder,
        save_model(folder / "model", tokenizer),
        num_tasks=3,
        num_iterations=NUM_ITERATIONS,
        max_staleness=1,
        evaluate={"tasks": write_tasks(folder / "eval.jsonl", 2), "every_iterations": 2},
        train={"record_tokens": "all"},
    )
    rl.run(config)
    return config


@pytest.fixture(scope="module")
def ask(config):
    return Asked(config.run.out)


def without_fingerprints(folder):
    """Make datasets forget which tokenizer they have."""
    for path in sorted(folder.iterdir()):
        rows = scan(path).collect()
        metadata = dataclasses.replace(
            read_metadata(path), tokenizer=None, tokenizer_fingerprint=None, vocab_size=None
        )
        shutil.rmtree(path)
        with RolloutWriter(path, metadata=metadata) as writer:
            writer.write(rows)


def iteration_of(update):
    return (update - 1) // 2


def test_the_run_and_its_datasets_are_told(ask, config):
    told = ask("/api/sources")
    names = [dataset["name"] for dataset in told["datasets"]]
    assert names == [f"iteration_{k:05d}" for k in range(NUM_ITERATIONS)]
    assert told["warnings"] == []
    assert {dataset["tokenizer"] for dataset in told["datasets"]} == {config.model.path}
    (run,) = told["runs"]
    assert run["updates"] == run["token_updates"] == list(UPDATES)
    assert run["token_datasets"] == [f"d{iteration_of(update)}" for update in UPDATES]


def test_each_update_leads_to_the_rows_of_its_iteration(ask, config):
    seen = set()
    for update in UPDATES:
        iteration = iteration_of(update)
        stored, rows = rows_of(config, iteration), ask(f"/api/runs/r0/updates/{update}")
        records = scan_token_records(config.run.out, update).collect()
        assert set(rows["dataset"]) == {f"d{iteration}"}
        keys = ["trajectory_id", "step_index"]
        assert set(rows.select(keys).rows()) == set(records.select(keys).rows())
        assert len(rows.join(stored, on=keys, how="semi")) == len(rows) == 3
        seen |= {(iteration, name) for name in rows["trajectory_id"]}
        for name in rows["trajectory_id"].to_list():
            of = {"trajectory_id": name, "run": "r0", "update": update}
            tokens = ask(f"/api/datasets/d{iteration}/tokens", **of, step_index=0)
            row = stored.filter(trajectory_id=name).row(0, named=True)
            record = records.filter(trajectory_id=name).row(0, named=True)
            assert tokens["id"].to_list() == row["prompt_token_ids"] + row["response_ids"]
            own = tokens.filter("is_response")
            assert own["rollout_logprob"].to_list() == row["rollout_logprobs"]
            assert set(own["policy_version"]) == {row["policy_version"]}
            for column, list_name in RECORDED.items():
                assert own[column].to_list() == record[list_name]
        targets = ask(f"/api/runs/r0/updates/{update}/targets")
        assert len(targets) == 18
    assert len(seen) == 6 * NUM_ITERATIONS


def test_the_same_names_in_another_dataset_have_nothing_of_the_update(config, tmp_path):
    """A copy is not what the run trained on, and may hold other tokens."""
    shutil.copytree(f"{config.run.out}/rollouts/iteration_00000", tmp_path / "copy")
    ask = Asked(config.run.out, tmp_path / "copy")
    (record, *_) = scan_token_records(config.run.out, 1).collect().to_dicts()
    name, of = record["trajectory_id"], {"run": "r0", "update": 1}
    for root, is_there in (("/api/datasets/d0", True), (f"/api/datasets/d{NUM_ITERATIONS}", False)):
        tokens = ask(f"{root}/tokens", trajectory_id=name, **of)
        assert (tokens["logprob"].null_count() < len(tokens)) == is_there
        attempts = ask(f"{root}/group", instance_id=record["instance_id"], **of)["attempts"]
        assert (attempts[0]["advantage"] is not None) == is_there
        nodes = ask(f"{root}/tree", trajectory_id=name, **of)["nodes"]
        assert (nodes[-1]["advantage"] is not None) == is_there


def test_curves_hold_updates_evaluations_and_staleness(ask, config):
    told = ask("/api/runs/r0/metrics")
    steps, metrics = told["global_step"], told["metrics"]
    assert steps == [0, *UPDATES]
    assert told["updates"] == list(UPDATES)

    def points(name):
        return {s: v for s, v in zip(steps, metrics[name], strict=True) if v is not None}

    lines = lines_of(config.run.out)
    for name in ("loss", "return_mean", "grad_norm", "iteration"):
        expected = {line["global_step"]: line[name] for line in lines}
        assert {s: v for s, v in points(name).items() if s > 0} == expected
    text = Path(config.run.out, "metrics.jsonl").read_text()
    stored = [json.loads(line) for line in text.splitlines()]
    evaluated = {x["global_step"]: x["evaluation/return_mean"] for x in stored if "loss" not in x}
    assert set(evaluated) == {0, 4, 8}
    assert points("evaluation/return_mean") == evaluated
    stale = {
        line["global_step"]: line["staleness_mean"] for line in lines if "staleness_mean" in line
    }
    assert points("staleness_mean") == stale
    for step, mean in stale.items():
        rows = rows_of(config, iteration_of(step))
        assert mean == pytest.approx((iteration_of(step) - rows["policy_version"]).mean())
    assert max(stale.values()) > 0


def test_a_tokenizer_that_cannot_be_used_is_named(config, tmp_path):
    """Where the dataset knows none: the run's model is absent, or without a tokenizer."""
    run = tmp_path / "run"
    shutil.copytree(config.run.out, run)
    settings = json.loads((run / "config.json").read_text())

    def told(model):
        (run / "config.json").write_text(json.dumps(settings | {"model": {"path": str(model)}}))
        ask = Asked(run)
        first = rows_of(config, 0)["trajectory_id"][0]
        tokens = ask.table("/api/datasets/d0/tokens", trajectory_id=first)
        return ask("/api/sources")["warnings"], tokens.schema.metadata[b"decoded"]

    without_fingerprints(run / "rollouts")
    (absent,), decoded = told(tmp_path / "none")
    assert decoded == b"0"
    assert absent.startswith("iteration_00000 and 3 more: tokens are shown as ids because")
    assert f"the run's model {tmp_path / 'none'} is not on this machine" in absent
    assert absent.endswith("Pass --tokenizer DIR to decode them.")
    (tmp_path / "bare").mkdir()
    assert "has no tokenizer" in told(tmp_path / "bare")[0][0]
    assert told(config.model.path) == ([], b"1")


def test_another_tokenizer_than_the_datasets_is_not_used(config, tmp_path, tokenizer):
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(config.run.out, run)
    tokenizer.backend.save_pretrained(other)
    stored = json.loads((other / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    a, b = list(vocabulary)[:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(stored))
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"model": {"path": str(other)}}))
    for path in sorted((run / "rollouts").iterdir()):  # its own tokenizer is not here either
        rows, metadata = scan(path).collect(), read_metadata(path)
        shutil.rmtree(path)
        gone = dataclasses.replace(metadata, tokenizer="/gone/model")
        with RolloutWriter(path, metadata=gone) as writer:
            writer.write(rows)
    (warning,) = Asked(run)("/api/sources")["warnings"]
    assert "/gone/model is not on this machine" in warning
    assert "has a different tokenizer" in warning
    (run / "config.json").write_text(json.dumps(settings))
    told = Asked(run)("/api/sources")
    assert (told["warnings"], told["datasets"][0]["tokenizer"]) == ([], config.model.path)
