"""An update with changes: what it would have been without a row, or with another setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import RolloutError
from tests.helpers.configs import dotted
from tests.helpers.replay_helpers import gradient_of, train, weights_of
from tests.helpers.trainer_helpers import (
    group_rows,
    relative_difference,
    save_tiny_model,
    write_dataset,
)
from trainer.forensics.reconstruct import Reconstruction, reconstruct
from trainer.forensics.replay import Replay, prepared, replay, with_batch, without_rows
from trainer.loss import policy_logprobs

EVERY_ROW = [f"g{group}_{number}" for group in (0, 1) for number in range(3)]
REDUCTIONS = ["token_mean", "sequence_mean", "trajectory_mean", "prompt_mean", "token_mean_legacy"]
ON_EVERY_CHANGE = {("token_mean", "merge"), ("sequence_mean", "step"), ("prompt_mean", "tree")}


def rows() -> list[dict[str, Any]]:
    """Three groups; the turns of two trajectories do not continue each other, so stay apart."""
    found = group_rows(3, (1.0, 0.0, 0.5), rollout_logprobs=[-3.0] * 4)
    for row in found:
        if row["trajectory_id"] in ("g0_1", "g1_1") and row["step_index"] == 1:
            row["prompt_token_ids"] = [1, *row["prompt_token_ids"]]
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("start")
    model = save_tiny_model(folder / "m")
    return {"dataset": write_dataset(folder / "ds", rows()), "model": model}


@pytest.fixture(scope="module")
def run(paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return train(paths, folder / "run", save_every_updates=5, groups_per_mini_batch=2)


def gradient(run: Path, update: int, without: Sequence[str]) -> torch.Tensor:
    def change(found: Reconstruction) -> Any:
        return without_rows(found.run, found.pending, without)

    return gradient_of(run, update, change)


def changed(run: Path, update: int, *settings: str, **kept: Any) -> Replay:
    found = replay(run, update, settings=settings, **kept)
    assert found.is_identical
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduction", "layout"),
    [
        pytest.param(*pair, marks=() if pair in ON_EVERY_CHANGE else pytest.mark.nightly)
        for pair in product(REDUCTIONS, ("merge", "step", "tree"))
    ],
)
def test_a_gradient_without_rows_is_that_of_a_batch_built_without_them(
    reduction: str, layout: str, paths: dict[str, str], tmp_path: Path
) -> None:
    """With a loss without advantages, a run on fewer rows has the same loss for the others."""
    settings = {
        "reduction": reduction,
        "sequence_layout": layout,
        "groups_per_mini_batch": 2,
        "policy_loss_type": "cross_entropy",
        "tokens_per_micro_batch": 4096,
        "max_updates": 1,
    }
    run = train(paths, tmp_path / "run", **settings)
    kept = [row for row in rows() if row["trajectory_id"] not in ("g0_1", "g1_2")]
    fewer = paths | {"dataset": write_dataset(tmp_path / "fewer", kept)}
    built = train(fewer, tmp_path / "built", **settings)
    left = gradient(run, 1, ["g0_1", "g1_2"])
    assert relative_difference(left, gradient_of(built, 1)) < 1e-5
    assert relative_difference(left, gradient_of(run, 1)) > 0.05


@pytest.mark.slow
def test_gradients_of_parts_add_up_where_the_denominator_is_fixed(paths, tmp_path):
    fixed = {"reduction": "seq_mean_token_sum_norm", "max_seq_len": 32}
    given = fixed | {"sequence_layout": "step", "groups_per_mini_batch": 2}
    run = train(paths, tmp_path / "run", max_updates=1, **given)
    one = ["g0_1:1"]
    stored = reconstruct(run, 1).pending.batch.origins.rows
    names = [f"{name}:{step}" for name, step in stored.select("trajectory_id", "step_index").rows()]
    others = [name for name in names if name not in one]
    full, without, alone = gradient_of(run, 1), gradient(run, 1, one), gradient(run, 1, others)
    # Each is a mean over the rows that are left: 12 rows, 11 of them, and 1.
    assert relative_difference(11 / 12 * without + 1 / 12 * alone, full) < 1e-5


@pytest.mark.slow
def test_a_row_is_left_out_and_merged_rows_keep_their_context(run):
    by_id = replay(run, 6, without=["g0_1:0"])
    assert by_id.changes == ("without g0_1:0",)
    assert by_id.is_identical
    assert "the recorded tokens" in by_id.compared
    before, after = by_id.replayed, by_id.changed
    assert after["num_trained_tokens"] == before["num_trained_tokens"] - 4
    assert (before["num_rows"], after["num_rows"]) == (8, 7)
    assert (before["num_trajectories"], after["num_trajectories"]) == (6, 6)
    merged = replay(run, 6, without=["g0_0:0"]).changed
    assert merged["num_trained_tokens"] == before["num_trained_tokens"] - 4
    assert merged["num_rows"] == 8
    assert merged["num_forwarded_tokens"] == before["num_forwarded_tokens"]
    gone = replay(run, 6, without=["g0_0", "g0_1", "g0_2"]).changed
    assert (gone["num_rows"], gone["num_trajectories"], gone["num_groups"]) == (4, 3, 1)
    assert gone["return_mean"] == 0.5


def test_advantages_of_other_rows_and_what_the_models_said_stay_as_they_were(run):
    found = reconstruct(run, 6)
    before, step = found.pending.batch, without_rows(found.run, found.pending, ["g0_1"])
    assert torch.equal(step.batch.advantages, before.advantages)
    assert step.batch.old_logprobs is before.old_logprobs is not None
    assert step.batch.ref_logprobs is step.batch.values is None


@pytest.mark.slow
def test_the_model_without_changes_is_that_of_the_run(run, tmp_path):
    found = replay(run, 5, out=tmp_path / "out")
    assert (found.out, found.changed) == (str(tmp_path / "out"), None)
    saved, again = weights_of(run / "checkpoints/global_step_5"), weights_of(tmp_path / "out")
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)


@pytest.mark.slow
def test_a_changed_learning_rate_scales_the_step(run, tmp_path):
    """Without weight decay, AdamW's step is proportional to the rate."""
    both = [
        changed(
            run,
            6,
            "optimizer.weight_decay=0",
            f"optimizer.learning_rate={rate}",
            out=tmp_path / name,
        )
        for name, rate in (("one", 1e-3), ("half", 5e-4))
    ]
    rates = [found.changed["learning_rate"] for found in both]
    assert rates[1] == pytest.approx(rates[0] / 2)
    assert rates[0] == both[0].replayed["learning_rate"]
    start = weights_of(run / "checkpoints/global_step_5")
    one, half = (weights_of(tmp_path / name) for name in ("one", "half"))
    for name, before in start.items():
        moved = (one[name] - before).norm()
        assert torch.allclose(half[name] - before, (one[name] - before) / 2, atol=2e-7)
        assert moved > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"kl_reward_coef": 0.2},
        {"entropy_loss_coef": 0.1, "reduction": "sequence_mean"},
        *(
            pytest.param(other, marks=pytest.mark.nightly)
            for other in (
                {"policy_loss_type": "cispo"},
                {"kl_loss_coef": 0.1},
                {"estimator": "rloo", "batch_normalize": True},
                {"tis_ratio_type": None, "max_grad_norm": 0.1, "betas": (0.5, 0.9)},
            )
        ),
    ],
    ids=lambda other: "-".join(other),
)
def test_another_loss_is_that_of_a_run_with_it(other, paths, tmp_path):
    """The first update of a run does not depend on what was before it."""
    one = {"max_updates": 1, "groups_per_mini_batch": 2, "epochs_per_batch": 1}
    run, there = (
        train(paths, tmp_path / name, **one | o) for name, o in (("run", {}), ("there", other))
    )
    values = {
        key: "none" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in other.items()
    }
    out = tmp_path / "out"
    found = changed(run, 1, *(f"{dotted(key)}={value}" for key, value in values.items()), out=out)
    recorded = replay(there, 1).recorded
    names = recorded.keys() - {"seconds", "tokens_per_s"}
    assert {n: found.changed[n] for n in names} == {n: recorded[n] for n in names}
    saved, here = weights_of(there / "checkpoints/global_step_1"), weights_of(out)
    assert all(torch.equal(saved[name], here[name]) for name in saved)


@pytest.mark.slow
def test_a_loss_that_needs_old_logprobs_gets_those_of_the_start_of_the_batch(paths, tmp_path):
    plain = {"policy_loss_type": "cross_entropy", "save_every_updates": 1}
    run = train(paths, tmp_path / "run", **plain)
    assert reconstruct(run, 3).checkpoint == run / "checkpoints/global_step_2"
    settings = ["loss.policy_loss_type=regular"]
    found = reconstruct(run, 3, at_batch=partial(prepared, settings=settings))
    assert found.checkpoint is None  # the others are within the batch
    step = with_batch(found.run, found.pending, found.prepared[1])
    start = reconstruct(run, 1)
    forests = [forest for one in step.batch.mini_batches for forest in one.forests]
    then = policy_logprobs(start.run, start.pending.batch, forests)
    at = torch.from_numpy(step.batch.trains)
    assert torch.equal(step.batch.outputs["old_logprobs"][at], then[at])
    assert changed(run, 3, "loss.policy_loss_type=regular").changed["is_ratio_mean"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        ({"without": ["g9_0"]}, "replay_without", r"found no such row in the update; expected"),
        ({"without": ["g0_0:7"]}, "replay_without", "such as the rows of g0_0, g0_1, g0_2"),
        ({"without": EVERY_ROW}, "replay_without", "no row of the update remains"),
        ({"settings": ["model.lora_rank=4"]}, "replay_change", "`model.lora_rank`, which cannot"),
        ({"settings": ["batch.sequence_layout=tree"]}, "replay_change", "sequence_layout"),
        ({"settings": ["optimiser=adamw"]}, "config_key", "unknown key `optimiser`"),
        ({"settings": ["optimizer.learning_rate=fast"]}, "config_value", "expected a number"),
        ({"settings": ["advantage.estimator=gae"]}, "replay_change", "gae needs a critic"),
    ],
)
def test_changes_that_mean_nothing_are_refused(changes, rule, message, run):
    with pytest.raises(RolloutError, match=message) as error:
        replay(run, 6, **changes)
    assert error.value.rule == rule


def test_an_output_that_is_taken_or_in_the_run_is_refused_before_anything_is_read(run, tmp_path):
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "there", run / "more", run / "checkpoints" / ".." / "x"):
        with pytest.raises(RolloutError, match="out_is_free"):
            replay(tmp_path / "no_run" if out == tmp_path / "there" else run, 6, out=out)
