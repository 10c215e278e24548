"""Blame of updates of whole runs."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner

import trainer
from rollout_io.cli.main import run as command
from schemas.errors import RolloutError
from schemas.records import UPDATE_SHARE_COLUMNS
from tests.helpers.blame_helpers import check_blame, recorded_norm
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    one_group,
    save_tiny_model,
    write_dataset,
)
from tests.helpers.view_helpers import Asked
from trainer.cli.forensics import blame as verb
from trainer.forensics.blame import blame, finding

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "groups_per_batch": 4,
    "groups_per_mini_batch": 2,
    "tokens_per_micro_batch": 48,
    "num_epochs": 2,
    "tis_ratio_type": None,
    "weight_decay": 0.0,
}


def make_run(path: Path, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
    dataset = write_dataset(path / "ds", rows or group_rows(4, (1.0, 0.0, 0.5)))
    model = save_tiny_model(path / "model")
    given = SETTINGS | {"dataset": dataset, "model": model} | settings
    trainer.train(train_config(out=str(path / "run"), **given))
    return path / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("blame"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["merge", "tree"])
def test_shares_of_rows_and_tokens_sum_to_1(tmp_path: Path, layout: str) -> None:
    run = make_run(tmp_path, sequence_layout=layout, tree_scope="trajectory")
    found = blame(run, 3)
    assert found.gradient_norm == pytest.approx(recorded_norm(run, 3), rel=1e-4)
    assert len(found.rows) == (6 if layout == "merge" else 12)
    assert len(found.shares) == 12
    names = [column.name for column in UPDATE_SHARE_COLUMNS]
    assert found.shares.columns[: len(names)] == names
    for shares in (found.rows, found.trajectories, found.groups, found.shares):
        assert shares["share"].sum() == pytest.approx(1, abs=1e-4)
    of_tokens = found.shares["token_shares"].list.sum()
    np.testing.assert_allclose(of_tokens, found.shares["share"], atol=1e-5)
    joined = found.shares.join(
        pl.read_parquet(f"{tmp_path}/ds/*.parquet"), on=["trajectory_id", "step_index"]
    )
    assert len(joined) == 12
    assert (joined["token_shares"].list.len() == joined["response_ids"].list.len()).all()


@pytest.mark.slow
def test_a_run_is_only_read(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    blame(run, 2)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


HERE = "tests.trainer.forensics.blame.test_blame"


def own_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """Squared mean ratio of the row, as a loss of its own by sequence."""
    sums = torch.zeros(int(row.max()) + 1).index_add(0, row, logprobs - old_logprobs)
    mean = sums / torch.bincount(row)
    return -advantages * (mean.exp() ** 2)[row]


def coupled_loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Compares each token with the others of its micro-batch."""
    return -advantages * (logprobs - logprobs.mean()).square()


def own_reduction(row: Any, micro_batch: Any) -> Any:
    """Longer rows count less, and so do those of later micro-batches."""
    return 1 / (1.0 + np.bincount(row)[row]) / (1.0 + micro_batch)


UNEQUAL: list[dict[str, Any]] = [
    {"reduction": "token_mean_legacy"},
    {"sequence_layout": "step", "policy_loss_type": "gspo", "reduction": "prompt_mean"},
    {"sequence_layout": "step", "reduction": "trajectory_mean"},
    {"reduction": f"{HERE}:own_reduction"},
    {"policy_loss_type": "kl_cov", "kl_cov_frac": 0.2, "learning_rate": 0.1},
    {"policy_loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -9.0},
]
"""Settings with which a row's weight depends on the other rows."""
ON_EVERY_CHANGE: list[dict[str, Any]] = [
    {"sequence_layout": "tree", "policy_loss_type": "gspo"},
]
NIGHTLY: list[dict[str, Any]] = [
    *UNEQUAL,
    # test_blame_rl has a critic on every change
    {"estimator": "gae", "critic_learning_rate": 1e-3},
    {"lora_rank": 2, "policy_loss_type": "cross_entropy"},
    {"sequence_layout": "step", "reduction": "sequence_mean"},
    {"sequence_layout": "merge", "policy_loss_type": "gspo"},
    {"policy_loss_type": f"{HERE}:own_loss", "sequence_layout": "step"},
    {"policy_loss_type": "sapo", "tis_ratio_type": "sequence"},
    {"kl_loss_coef": 0.1, "entropy_loss_coef": 0.01},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [*ON_EVERY_CHANGE, *(pytest.param(one, marks=pytest.mark.nightly) for one in NIGHTLY)],
    ids=str,
)
def test_rows_add_up_to_the_gradient_that_the_run_recorded(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    rows = group_rows(4, (1.0, 0.0, 0.5), rollout_logprobs=[-3.0] * 4)
    check_blame(make_run(tmp_path, rows, **settings), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduction", "layout"),
    [
        ("sequence_mean", "merge"),
        pytest.param("prompt_mean", "step", marks=pytest.mark.nightly),
        pytest.param("sequence_mean", "step", marks=pytest.mark.nightly),
        pytest.param("prompt_mean", "merge", marks=pytest.mark.nightly),
        pytest.param("trajectory_mean", "merge", marks=pytest.mark.nightly),
        pytest.param("trajectory_mean", "step", marks=pytest.mark.nightly),
    ],
)
def test_steps_without_targets_are_not_blamed(tmp_path: Path, layout: str, reduction: str) -> None:
    rows = group_rows(4, (1.0, 0.0, 0.5))
    for row in rows[1::4]:
        row["loss_mask"] = [False] * len(row["loss_mask"])
    run = make_run(tmp_path, rows, sequence_layout=layout, reduction=reduction)
    found = check_blame(run, 4)
    assert found.rows["selectors"].list.len().max() == 1
    assert len(found.rows) == (6 if layout == "merge" else 9)


@pytest.mark.slow
def test_a_loss_that_compares_rows_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, policy_loss_type=f"{HERE}:coupled_loss", num_epochs=1)
    with pytest.raises(RolloutError, match="depends on other rows of its micro-batch") as error:
        blame(run, 1)
    assert error.value.rule == "blame_rows"
    assert error.value.where == f"loss.policy_loss_type {HERE}:coupled_loss"


def poisoned_rows(prefix: str = "g") -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = [
        row for g in range(4) for row in one_group(rng, f"{prefix}{g}", (1.0, 0.0, 0.9, 0.1, 0.5))
    ]
    bad = [row for row in rows if row["trajectory_id"] == f"{prefix}1_2"]
    bad[-1]["reward"] = -60.0
    return rows


@pytest.mark.slow
def test_a_row_with_a_huge_advantage_stands_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, poisoned_rows(), groups_per_mini_batch=4, normalize_by_std=False)
    found = blame(run, 1)
    assert found.rows["row"][0] == "g1_2, steps 0-1"
    assert finding(found).startswith("g1_2, steps 0-1 stands out: it accounts for ")
    assert found.groups["instance_id"][0] == "g1"


@pytest.mark.slow
def test_the_verb_prints_a_screen_or_json_and_writes_shares(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "shares.parquet"
    result = CliRunner().invoke(verb, [str(run), "--update", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "update 2: 6 rows, 2 groups" in result.stdout
    assert pl.read_parquet(out)["share"].sum() == pytest.approx(1, abs=1e-4)
    check_viewed(run, out)
    result = CliRunner().invoke(verb, [str(run), "--update", "2", "--top", "3", "--json"])
    shown = json.loads(result.stdout)
    assert [len(shown["rows"]), shown["num_rows"], shown["update"]] == [3, 6, 2]


@pytest.mark.slow
def test_the_printed_command_replays_the_update_without_the_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the dataset and the model of the run have moved."""
    rows = poisoned_rows(prefix="-")  # as an option starts
    run = make_run(tmp_path, rows, normalize_by_std=False, max_updates=1)
    places = []
    for name in ("ds", "model"):
        moved = (tmp_path / name).rename(tmp_path / f"moved {name}")
        key = "data.dataset" if name == "ds" else "model.path"
        places.append(f"--set={key}={moved}")
    assert command(["blame", str(run), "--update", "1", *places, "--json"]) == 0
    screen = capsys.readouterr()
    (line,) = [line for line in screen.err.splitlines() if line.startswith("next: ")]
    program, *arguments = shlex.split(line.removeprefix("next: "))
    assert program == "rollouts"
    assert command([*arguments, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["changes"] == ["without -1_2"]


def check_viewed(run: Path, out: Path) -> None:
    """The viewer joins the shares of update 2 with the run and with the tokens of its rows."""
    ask, written = Asked(run, out), pl.read_parquet(out)
    (entry,) = ask("/api/sources")["shares"]
    assert (entry["run"], entry["update"]) == ("r0", 2)
    shown = ask("/api/shares/s0")
    assert set(shown["share"]) == set(written["share"])
    assert set(shown["dataset"]) == {"d0"}
    for row in shown.rows(named=True):
        of = {"trajectory_id": row["trajectory_id"], "step_index": row["step_index"]}
        tokens = ask("/api/datasets/d0/tokens", **of)["share_of_update_2"]
        assert tokens.sum() == pytest.approx(row["share"], abs=1e-5)
    totals = written.group_by("trajectory_id").agg(pl.col("share").sum()).rows()
    table = ask("/api/datasets/d0/trajectories", where="share_of_update_2 IS NOT NULL")
    assert dict(table.select("trajectory_id", "share_of_update_2").rows()) == pytest.approx(
        dict(totals)
    )


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--update", "99"], "replay_update"),
        (["--update", "1", "--set", "optimizer.learning_rate=1"], "config_key"),
        (["--update", "1", "--out", "shares.csv"], "output_file"),
    ],
)
def test_refusals(run: Path, arguments: list[str], rule: str) -> None:
    with pytest.raises(RolloutError) as error:
        CliRunner().invoke(verb, [str(run), *arguments], catch_exceptions=False)
    assert error.value.rule == rule
