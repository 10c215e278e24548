"""`record_tokens`: the files hold what entered the loss, at the rows of the dataset."""

import re

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

import pipelines
import rollout_io
import trainer
from rollout_io.cli.main import run as main
from schemas.errors import RolloutError
from schemas.records import (
    TOKEN_RECORD_COLUMNS,
    token_record_path,
    token_record_schema,
    token_record_steps,
)
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from tests.helpers.own_functions import SEEN
from tests.helpers.trainer_helpers import (
    VOCAB,
    lines_of,
    plain_logprobs,
    save_tiny_model,
    step,
    write_dataset,
)
from trainer.run.token_records import SAMPLED_GROUPS

MINE = "tests.helpers.own_functions"
KEYS = ("trajectory_id", "step_index")
LISTS = [c.name for c in TOKEN_RECORD_COLUMNS if c.length.value == "response"]
COMMON = {
    "record_tokens": "all",
    "groups_per_batch": 4,
    "groups_per_mini_batch": 2,
    "epochs_per_batch": 2,
    "learning_rate": 3e-3,
    "tokens_per_micro_batch": 60,
    "save_every_updates": 1,
    "failed": "trajectory",
    "partial_groups": "train",
    "token_mask_is_threshold_low": 0.2,
    "token_mask_is_threshold_high": 5.0,
}
UPDATES = [("g0", "g1"), ("g2", "g3")] * 2 + [("g4", "g5")] * 2
"""Groups of each update with these settings."""
RUNS = {
    "steps": ("steps", {"sequence_layout": "step", "kl_loss_coef": 0.1}),
    "merged rows of steps": ("steps", {"entropy_loss_coef": 0.01, "reduction": "prompt_mean"}),
    "tree": ("steps", {"sequence_layout": "tree", "lora_rank": 2, "kl_loss_coef": 0.1}),
    "merged rows as they are": (
        "merged",
        {"estimator": "gae", "kl_reward_coef": 0.1, "policy_loss_type": "cispo"},
    ),
    "steps of merged rows": ("merged", {"sequence_layout": "step"}),
    "tree of merged rows": ("merged", {"sequence_layout": "tree", "policy_loss_type": "gspo"}),
    "merged rows of merged rows": ("merged", {"merge_rule": "consecutive"}),
    "merged rows of some merged rows": ("mixed", {"tis_ratio_type": "sequence"}),
    "steps of some merged rows": ("mixed", {"sequence_layout": "step", "max_row_tokens": 11}),
    "supervised": (
        "steps",
        {
            "policy_loss_type": "cross_entropy",
            "tis_ratio_type": None,
            "token_mask_is_threshold_low": None,
            "token_mask_is_threshold_high": None,
        },
    ),
}


def trajectory(rng, group, repetition):
    """Four steps of an agent and its sub-agent, by turns; some response tokens are not trained."""
    lanes = [rng.integers(0, VOCAB, n).tolist() for n in (5, 3)]
    rows = []
    for index in range(4):
        prompt, response = lanes[index % 2], rng.integers(0, VOCAB, 2 + index).tolist()
        values = {
            "reward": float(rng.normal()) if index == 3 else 0.0,
            "is_last_step": index == 3,
            "loss_mask": [bool(n) for n in rng.integers(0, 4, len(response))],
            "rollout_logprobs": rng.uniform(-8.0, -2.0, len(response)).tolist(),
        }
        rows.append(step(group, repetition, index, prompt, response, **values))
        lanes[index % 2] = prompt + response + rng.integers(0, VOCAB, 2).tolist()
    return rows


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Six groups of two trajectories and a failed one: as steps, merged, and half of them merged."""
    folder, rng = tmp_path_factory.mktemp("start"), np.random.default_rng(3)
    rows = [row for g in range(6) for r in range(2) for row in trajectory(rng, f"g{g}", r)]
    failed = {"error": "timeout", "is_last_step": True, "rollout_logprobs": [-3.0]}
    rows.insert(8, step("g0", 2, 0, [1], [2], **failed))
    rows.append(step("g5", 2, 0, [1], [2], **failed))
    steps = rollout_io.scan(write_dataset(folder / "steps", rows))
    merged = pipelines.merge(steps)
    half = pl.col("repetition_id") == 0
    mixed = pl.concat([merged.filter(half), steps.filter(~half)], how="diagonal_relaxed")
    for name, frame in {"merged": merged, "mixed": mixed}.items():
        with rollout_io.RolloutWriter(folder / name) as writer:
            writer.write(frame.sort("instance_id", maintain_order=True).collect())
    return {
        "model": save_tiny_model(folder / "model"),
        **{name: str(folder / name) for name in ("steps", "merged", "mixed")},
    }


def run(paths, out, dataset="steps", **settings):
    given = {"dataset": paths[dataset], "model": paths["model"], "out": str(out)}
    trainer.train(train_config(**given, **COMMON | settings))
    return out


def records_of(out, global_step):
    return pl.read_parquet(token_record_path(out, global_step))


def targets_of(records):
    """One row per target: its keys, its position in the response, and its values."""
    position = pl.int_ranges(pl.col("loss_mask").list.len()).alias("position")
    lists = [name for name in LISTS if records[name].null_count() == 0]
    one_each = records.select(*KEYS, "dataset", "instance_id", position, *lists)
    return one_each.explode("position", *lists).filter("loss_mask")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_target_is_recorded_once_with_the_numbers_of_the_loss(name, paths, tmp_path):
    dataset, settings = RUNS[name]
    out = run(paths, tmp_path / "run", dataset, **settings)
    stored = rollout_io.scan(paths[dataset]).collect()
    lines = lines_of(out)
    assert token_record_steps(out) == [line["global_step"] for line in lines] == [*range(1, 7)]
    models = [paths["model"], *(str(out / f"checkpoints/global_step_{n}") for n in range(1, 6))]
    rejected, clipped = 0, 0
    for line, groups, model in zip(lines, UPDATES, models, strict=True):
        records = records_of(out, line["global_step"])
        assert records["dataset"].unique().to_list() == [paths[dataset]]
        check_rows(records, stored, groups, cut_at=settings.get("max_row_tokens"))
        targets = targets_of(records)
        assert len(targets) == line["num_trained_tokens"]
        check_numbers(targets, line, settings)
        check_logprobs(records, stored, model)
        rejected += int(targets["rejected"].sum()) if "rejected" in targets else 0
        clipped += int(targets["clipped"].sum())
    assert (rejected > 0) == (name != "supervised")
    assert (clipped > 0) == (name != "supervised")


def check_rows(records, stored, groups, cut_at):
    """Every stored row of the groups with a target is there, in order, and marks its targets."""
    rows = stored.filter(pl.col("instance_id").is_in(groups), pl.col("error").is_null())
    rows = rows.filter(pl.col("loss_mask").list.any())
    if cut_at is None:
        columns = ("instance_id", *KEYS, "loss_mask")
        assert records.select(columns).rows() == rows.select(columns).rows()
        return
    # Rows are cut as they are trained, which are steps: the cut is at the same token of either.
    position = pl.col("prompt_token_ids").list.len() + pl.int_ranges(
        pl.col("response_ids").list.len()
    )
    kept = rows.select(*KEYS, "loss_mask", at=position).explode("loss_mask", "at")
    kept = kept.filter("loss_mask", pl.col("at") < cut_at)
    assert 0 < len(kept) < rows["loss_mask"].list.sum().sum()
    assert records["loss_mask"].list.sum().sum() == len(kept)
    assert set(records.select(KEYS).rows()) == set(kept.select(KEYS).rows())


def check_numbers(targets, line, settings):
    """The reported loss, divergence, entropy and shares are those of the recorded numbers."""
    shares = targets["weights"].to_numpy() * targets["losses"].to_numpy()
    has_terms = {"kl_loss_coef", "entropy_loss_coef"} & settings.keys()
    assert shares.sum(dtype=float) == pytest.approx(line["loss"], rel=1e-5 if has_terms else 1e-12)
    assert targets["entropy"].cast(float).mean() == pytest.approx(line["policy_entropy"])
    assert targets["clipped"].mean() == pytest.approx(line["clip_ratio"])
    if "ref_logprobs" in targets and "kl_loss_coef" in settings:
        apart = targets["logprobs"].cast(float) - targets["ref_logprobs"].cast(float)
        k3 = ((-apart).exp() + apart - 1).clip(upper_bound=10)
        reported = line["policy_kl"]
        assert (k3 * targets["weights"]).sum() == pytest.approx(reported, rel=1e-4, abs=1e-7)
    if "correction_weights" in targets:
        assert (targets["correction_weights"] == 0).to_list() == targets["rejected"].to_list()
        assert line["token_mask_ratio"] == pytest.approx(targets["rejected"].mean())
        ratio = (targets["logprobs"] - targets["old_logprobs"]).clip(-20, 20).exp()
        assert ratio.to_numpy() == pytest.approx(targets["importance_weights"].to_numpy(), rel=1e-6)
    else:
        assert settings["policy_loss_type"] == "cross_entropy"
        assert not {"advantages", "old_logprobs", "importance_weights"} & set(targets.columns)
        assert targets["losses"].to_list() == (-targets["logprobs"]).to_list()
    has_reference = {"kl_loss_coef", "kl_reward_coef"} & settings.keys()
    assert ("ref_logprobs" in targets.columns) == bool(has_reference)


def check_logprobs(records, stored, model):
    """The log-probabilities are those of a plain forward of the stored row, before the step."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = records.join(stored, on=KEYS, maintain_order="left")
    with torch.no_grad():
        plain = plain_logprobs(
            policy,
            [
                (prompt, response, [])
                for prompt, response in rows.select("prompt_token_ids", "response_ids").rows()
            ],
        )
    found = records["logprobs"].explode().to_numpy()
    known = records["loss_mask"].explode().to_numpy()
    assert np.isnan(found[~known]).all()
    assert np.abs(found[known] - plain.numpy()[known]).max() < 1e-5


@pytest.mark.slow
def test_the_values_are_bit_for_bit_those_that_the_loss_was_given(paths, tmp_path):
    SEEN.clear()
    settings = {"token_mask_is_threshold_low": None, "token_mask_is_threshold_high": None}
    own = {"policy_loss_type": f"{MINE}:watched", "reduction": f"{MINE}:trajectory_mean"}
    out = run(paths, tmp_path / "run", tis_ratio_type=None, **settings, **own)
    names = ["logprobs", "old_logprobs", "advantages", "losses", "clipped"]
    given = pl.DataFrame({n: torch.cat([part[n] for part in SEEN]).numpy() for n in names})
    files = [targets_of(records_of(out, number)) for number in range(1, 7)]
    recorded = pl.concat([targets.select(names) for targets in files])
    assert 0 < given["clipped"].sum() < len(given)
    assert recorded.sort(names).equals(given.sort(names))
    for targets, num_trajectories in zip(files, (5, 4, 5, 4, 5, 5), strict=True):
        weight = 1 / (num_trajectories * pl.len().over("trajectory_id"))
        assert targets.select((weight.cast(pl.Float32) == pl.col("weights")).all()).item()


@pytest.mark.slow
def test_recording_changes_no_result_and_a_sample_is_a_part_of_all(paths, tmp_path):
    settings = {"groups_per_batch": 6, "groups_per_mini_batch": 6, "epochs_per_batch": 3}
    outs = {
        how: run(paths, tmp_path / how, record_tokens=how, kl_loss_coef=0.1, **settings)
        for how in ("none", "sampled", "all")
    }
    weights = [
        [(out / f"checkpoints/global_step_{n}/model.safetensors").read_bytes() for n in (1, 2, 3)]
        for out in outs.values()
    ]
    assert weights[0] == weights[1] == weights[2]
    assert lines_of(outs["none"]) == lines_of(outs["sampled"]) == lines_of(outs["all"])
    assert not (outs["none"] / "tokens").exists()
    chosen = set()
    for number in (1, 2, 3):
        sampled, whole = (records_of(outs[how], number) for how in ("sampled", "all"))
        groups = sampled["instance_id"].unique().sort().to_list()
        assert len(groups) == SAMPLED_GROUPS < whole["instance_id"].n_unique() == 6
        assert sampled.equals(whole.filter(pl.col("instance_id").is_in(groups)))
        chosen.add(tuple(groups))
    assert len(chosen) > 1
    again = run(paths, tmp_path / "again", seed=1, record_tokens="sampled", **settings)
    other = {tuple(records_of(again, n)["instance_id"].unique().sort()) for n in (1, 2, 3)}
    assert other != chosen


def test_the_files_have_the_declared_schema_and_the_log_says_their_size(paths, tmp_path, capfd):
    import pyarrow.parquet as pq

    out = run(paths, tmp_path / "run", max_updates=2)
    assert pq.read_schema(token_record_path(out, 1)).equals(token_record_schema())
    size = sum(path.stat().st_size for path in (out / "tokens").iterdir())
    said = f"recorded the tokens of 2 updates in {out}/tokens ({size / 1000:.0f} kB)"
    assert said in capfd.readouterr().err


def test_a_skipped_mini_batch_has_no_file_and_the_next_update_takes_its_number(tmp_path):
    rows = [
        step(f"g{g}", r, 0, [1, 2], [3 + r, 4], reward=float(r), is_last_step=True)
        for g in range(3)
        for r in range(2)
    ]
    rows[2] |= {"error": "timeout", "reward": None}
    given = {
        "dataset": write_dataset(tmp_path / "ds", rows),
        "model": save_tiny_model(tmp_path / "model"),
        "out": str(tmp_path / "run"),
    }
    trainer.train(train_config(**given, groups_per_batch=1, groups_per_mini_batch=1))
    assert [line["skipped"] for line in lines_of(tmp_path / "run")] == [0, 1, 0]
    assert token_record_steps(tmp_path / "run") == [1, 2]
    groups = [records_of(tmp_path / "run", n)["instance_id"].unique().to_list() for n in (1, 2)]
    assert groups == [["g0"], ["g2"]]


def test_a_new_run_removes_the_records_of_a_run_that_was_deleted(paths, tmp_path):
    (tmp_path / "run" / "tokens").mkdir(parents=True)
    for name in (
        "global_step_1.parquet",
        "global_step_9.parquet",
        ".global_step_2.parquet.partial",
    ):
        (tmp_path / "run" / "tokens" / name).write_bytes(b"old")
    out = run(paths, tmp_path / "run", max_updates=1)
    assert [path.name for path in (out / "tokens").iterdir()] == ["global_step_1.parquet"]
    assert len(records_of(out, 1)) > 0


@pytest.mark.slow
def test_all_updates_are_scanned_in_order_and_the_example_of_the_documentation_runs(
    paths, tmp_path, monkeypatch, capsys
):
    out = run(paths, tmp_path / "run", num_epochs=2)
    scanned = pipelines.scan_token_records(out).collect()
    wanted = [records_of(out, number) for number in range(1, 13)]
    assert scanned.drop("global_step").equals(pl.concat(wanted))
    assert scanned["global_step"].unique(maintain_order=True).to_list() == [*range(1, 13)]
    one = pipelines.scan_token_records(str(out), 12).collect()
    assert one.drop("global_step").equals(wanted[-1])
    with pytest.raises(RolloutError, match="no token records of update 13"):
        pipelines.scan_token_records(out, 13)
    with pytest.raises(RolloutError, match="no token records of any update"):
        pipelines.scan_token_records(tmp_path)
    page = (ROOT / "docs" / "training.md").read_text().partition("## What each token")[2]
    (code,) = re.findall(r"```python\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    (tmp_path / "shop").symlink_to(paths["steps"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLARS_FMT_MAX_ROWS", "-1")
    exec(code, {})
    printed = capsys.readouterr().out
    assert "shape: (10, 10)" in printed
    targets = targets_of(wanted[0])
    largest = (targets["weights"] * targets["losses"]).abs().sort(descending=True)
    assert f"{largest[0]:.6f}"[:7] in printed


def test_an_unknown_value_is_refused_by_name(paths, capfd):
    command = ["train", paths["steps"], "--model", paths["model"], "--out", "x"]
    assert main([*command, "--set", "run.record_tokens=some"]) == 1
    assert "record_tokens" in capfd.readouterr().err
