"""`--resume`: what a run goes on from, what may change, and what is refused."""

import dataclasses
import json
import os
import random
import resource
import shutil
import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

import trainer
from rollout_io.cli.main import run as main
from schemas.errors import InputError, RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    lines_of,
    run_of,
    save_tiny_model,
    tiny_policy,
    write_dataset,
)
from trainer import training
from trainer import update as updates
from trainer.batch import index_rows
from trainer.config.sections import AdvantageConfig, BatchConfig
from trainer.run.directory import alone_in
from trainer.run.resume import (
    find_checkpoint,
    load_progress,
    optimizer_tensors,
    restore,
    save_state,
)
from trainer.run.run import Position, Progress
from trainer.training import Stop


def rows(last_reward=0.5):
    return group_rows(2, (1.0, 0.0, last_reward))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    dataset = write_dataset(folder / "ds", rows())
    return {"dataset": dataset, "model": save_tiny_model(folder / "model")}


def run(paths, out, *, resume=True, **settings):
    """Four updates, all of one batch, unless something else is asked for."""
    defaults = {"learning_rate": 1e-3, "groups_per_batch": 2, "groups_per_mini_batch": 1}
    given = paths | defaults | {"epochs_per_batch": 2, "save_every_updates": 1} | settings
    return trainer.train(train_config(**given, out=str(out)), resume=resume)


@pytest.fixture(scope="module")
def whole(paths, tmp_path_factory):
    """A run of four updates that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(paths, out, resume=False)
    return out


@pytest.fixture
def out(whole, tmp_path):
    """A copy of it that was stopped after two updates and some more of the third."""
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    (copy / "checkpoints" / "latest").write_text("global_step_2\n")
    text = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(text[:3]) + text[3][:20])
    return copy


def files_of(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def checkpoints_of(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_goes_on_within_a_batch_as_if_it_had_not_stopped(paths, whole, out):
    assert (
        json.loads((out / "checkpoints/global_step_2/state/run.json").read_text()).items()
        >= {"batch": 0, "mini_batch": 2, "global_step": 2}.items()
    )
    (out / "tokens" / "global_step_9.parquet").write_bytes(b"later")
    (out / "tokens" / "global_step_3.parquet").write_bytes(b"other")
    (out / "tokens" / ".global_step_4.parquet.partial").write_bytes(b"half")
    result = run(paths, out)
    assert (result.num_updates, result.num_trained_groups) == (4, 2)
    assert lines_of(out) == lines_of(whole)
    assert files_of(out / "checkpoints") == files_of(whole / "checkpoints")
    assert files_of(out / "tokens") == files_of(whole / "tokens")
    assert len(files_of(whole / "tokens")) == 4


def test_recording_may_change_from_there_on(paths, whole, out):
    run(paths, out, record_tokens="none")
    kept = ["global_step_1.parquet", "global_step_2.parquet"]
    assert sorted(files_of(out / "tokens")) == kept
    assert lines_of(out) == lines_of(whole)


def test_files_of_updates_that_are_made_are_left_if_the_run_is_refused(paths, out):
    before = files_of(out)
    with pytest.raises(RolloutError, match="learning_rate"):
        run(paths, out, learning_rate=0.1)
    assert files_of(out) == before


def test_without_a_pointer_the_newest_checkpoint_is_the_latest(paths, whole, out):
    shutil.copy(whole / "metrics.jsonl", out)
    (out / "checkpoints" / "latest").unlink()
    before = files_of(out / "checkpoints" / "global_step_4")
    result = run(paths, out)
    assert result.metrics["global_step"] == result.num_updates == 4
    assert files_of(out / "checkpoints" / "global_step_4") == before
    assert (out / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_run_with_more_updates_is_the_run_that_had_them_from_the_start(paths, whole, tmp_path):
    for max_updates in (1, 3, None):
        run(paths, tmp_path, max_updates=max_updates, save_every_updates=None)
    assert lines_of(tmp_path) == lines_of(whole)
    assert json.loads((tmp_path / "config.json").read_text())["batch"]["max_updates"] is None
    assert checkpoints_of(tmp_path) == checkpoints_of(whole)[:1] + checkpoints_of(whole)[2:]


def test_only_the_newest_checkpoints_are_kept_and_nothing_half_removed(paths, out):
    (out / "checkpoints" / ".global_step_1.removed").mkdir()
    (out / "checkpoints" / ".global_step_3.partial").mkdir()
    run(paths, out, keep_checkpoints=2)
    assert checkpoints_of(out) == ["global_step_3", "global_step_4", "latest"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 1e-4}, r"learning_rate: found 0\.0001; expected 0\.001, as in .*config"),
        ({"betas": (0.8, 0.9)}, r"betas: found \[0\.8, 0\.9\]; expected \[0\.9, 0\.999\]"),
        ({"kl_loss_coef": 0.1}, r"kl_loss_coef: found 0\.1; expected 0\.0"),
        ({"max_updates": 1}, "max_updates: found 1; expected at least 2"),
        (
            {"seed": 7, "gamma": 0.9},
            r"advantage.gamma: found 0.9; expected 1.0(.|\n)*also different: run.seed",
        ),
    ],
)
def test_another_configuration_is_refused_by_the_name_of_its_key(settings, message, paths, out):
    before = files_of(out)
    with pytest.raises(RolloutError, match=message) as error:
        run(paths, out, **settings)
    assert error.value.rule == "resume_config"
    assert files_of(out) == before


def test_fewer_epochs_are_refused(paths, out):
    config = json.loads((out / "config.json").read_text())
    config["batch"]["num_epochs"] = 2
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(RolloutError, match="num_epochs: found 1; expected at least 2"):
        run(paths, out)


def test_a_dataset_with_other_returns_is_refused(paths, out, tmp_path):
    changed = {**paths, "dataset": write_dataset(tmp_path / "ds", rows(0.25))}
    config = json.loads((out / "config.json").read_text())
    config["data"]["dataset"] = changed["dataset"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(RolloutError, match="resume_dataset"):
        run(changed, out)


@pytest.mark.parametrize(
    ("file", "text", "rule"),
    [
        ("metrics.jsonl", "{}\n{", ".* found 1 line; expected 2"),
        ("config.json", "{", "resume_config"),
        ("checkpoints/latest", "global_step_9\n", ".*'global_step_9'"),
        ("checkpoints/latest", "../..\n", "checkpoint_latest"),
        ("checkpoints/latest", "\xff\xfe", "checkpoint_latest"),
        ("checkpoints/global_step_2/state/run.json", "{}", "checkpoint_state"),
        ("checkpoints/global_step_2/state/rng.json", "[]", "checkpoint_state"),
        ("checkpoints/global_step_2/state/optimizer.safetensors", "", "checkpoint_state"),
        ("checkpoints/global_step_2/model.safetensors", "", "checkpoint_state"),
        ("checkpoints/global_step_2/state/files.json", "{", "checkpoint_state"),
        ("checkpoints/global_step_2/added.json", "{}", "checkpoint_state"),
    ],
)
def test_a_damaged_run_is_refused_and_left_alone(file, text, rule, paths, out):
    (out / file).write_text(text, encoding="latin-1")
    before = files_of(out)
    with pytest.raises(RolloutError, match=rule):
        run(paths, out)
    assert files_of(out) == before


def test_a_checkpoint_without_state_is_refused_and_left_alone(paths, out):
    shutil.rmtree(out / "checkpoints" / "global_step_2" / "state")
    before = files_of(out)
    with pytest.raises(RolloutError, match=r".* has no state/.*\[checkpoint_state\]"):
        run(paths, out)
    assert files_of(out) == before


def test_an_edited_configuration_of_the_run_is_refused(paths, out):
    config = json.loads((out / "config.json").read_text())
    config["optimizer"]["learning_rate"] = 0.1
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(RolloutError, match=r"optimizer.learning_rate: .*\[resume_config\]"):
        run(paths, out, learning_rate=0.1)


def zeros_of(path):
    content = bytearray(path.read_bytes())
    content[-4096:] = bytes(4096)
    path.write_bytes(content)


def rope_of(path):
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


def of_another_step(path):
    shutil.copy(path.parents[2] / "global_step_1" / "state" / path.name, path)


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("model.safetensors", zeros_of),
        ("config.json", rope_of),
        ("state/optimizer.safetensors", of_another_step),
    ],
)
def test_a_checkpoint_whose_files_were_edited_is_refused(file, edit, paths, out):
    path = out / "checkpoints" / "global_step_2" / file
    edit(path)
    before = files_of(out)
    with pytest.raises(InputError) as caught:
        run(paths, out)
    assert (caught.value.rule, caught.value.where) == ("checkpoint_state", str(path))
    assert files_of(out) == before


def permuted(table, name):
    values = [v[::-1] for v in table.column(name).to_pylist()]
    kind = table.schema.field(name).type
    return table.set_column(table.column_names.index(name), name, pa.array(values, kind))


@pytest.mark.parametrize(
    "name", ["prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "rewards"]
)
def test_each_value_that_trains_is_in_the_digest(name):
    made = [row | {"rollout_logprobs": [-0.1, -0.2, -0.3, -0.4]} for row in rows()]
    made = [row | {"loss_mask": [True, True, True, False]} for row in made]
    made = [row | {"prompt_token_ids": [1, 2], "rewards": [0.0, 0.0, 0.25, 0.5]} for row in made]
    table = pl.DataFrame(made).to_arrow()
    digests = [
        index_rows(pl.from_arrow(t).lazy())["digest"] for t in (table, permuted(table, name))
    ]
    assert (digests[0] != digests[1]).all()
    told = table.append_column("response_text", pa.array(["x"] * table.num_rows))
    assert index_rows(pl.from_arrow(told).lazy())["digest"].equals(digests[0])


@pytest.mark.parametrize("change", [{"response_ids": [7, 7, 7]}, {"prompt_token_ids": [9]}])
def test_a_dataset_with_other_tokens_is_refused(change, paths, out, tmp_path):
    changed = rows()
    changed[-1] |= change | {"loss_mask": [True] * len(change.get("response_ids", [0] * 4))}
    shutil.copytree(paths["dataset"], tmp_path / "kept")
    shutil.rmtree(paths["dataset"])
    try:
        write_dataset(Path(paths["dataset"]), changed)
        with pytest.raises(
            RolloutError, match=r"dataset: its trajectories, .* changed.*\[resume_dataset\]"
        ):
            run(paths, out)
    finally:
        shutil.rmtree(paths["dataset"])
        shutil.move(tmp_path / "kept", paths["dataset"])


def test_checkpoints_without_their_configuration_are_refused(paths, out):
    (out / "config.json").unlink()
    with pytest.raises(
        RolloutError, match=r".*config.json: the file is missing.*\[resume_config\]"
    ):
        run(paths, out, learning_rate=0.1)


def test_a_run_of_an_earlier_version_goes_on(paths, tmp_path):
    config = train_config(**paths, out=str(tmp_path))
    older = dataclasses.asdict(config)
    del older["loss"]["own"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert find_checkpoint(config) is None
    own = dataclasses.replace(config, advantage=AdvantageConfig(gamma=0.5))
    del older["advantage"]["gamma"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    with pytest.raises(RolloutError, match="gamma"):
        find_checkpoint(own)


@pytest.mark.slow
def test_a_run_that_goes_on_is_left_alone(paths, out):
    before = files_of(out)
    with (
        alone_in(out),
        pytest.raises(RolloutError, match=r".* another process is training in.*\[run_in_use\]"),
    ):
        run(paths, out)
    assert files_of(out) == before
    assert run(paths, out).num_updates == 4


def draws():
    return [random.random(), np.random.random(), float(torch.rand(1))]  # noqa: NPY002


def test_generators_of_random_numbers_go_on_where_they_were(tmp_path):
    run, progress = run_of(tiny_policy()), Progress(position=Position(kl_coef=0.1))
    tensors = optimizer_tensors(run.optimizers, keep=True)
    save_state(tmp_path / "state", tensors, "digest", progress)
    drawn = draws()
    assert draws() != drawn
    restore(tmp_path / "state", run.optimizers)
    assert draws() == drawn
    assert load_progress(tmp_path / "state", "digest") == progress


@contextmanager
def no_file_larger_than(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [1000, 40_000, 120_000])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_one_message(num_bytes, whole, out, capfd):
    good = files_of(out / "checkpoints" / "global_step_2")
    assert len(good["model.safetensors"]) in range(40_000, 120_000)
    with no_file_larger_than(num_bytes):
        code = main(["train", "--resume", str(out)])
    printed = capfd.readouterr().err
    assert code == 1
    assert "unexpected" not in printed
    assert printed.count("\nError: ") == 1
    assert f"Error: {out}" in printed
    assert f"--resume {out} from {out}/checkpoints/global_step_2" in printed
    assert files_of(out / "checkpoints" / "global_step_2") == good
    assert not list((out / "checkpoints").glob(".global_step_*"))
    assert main(["train", "--resume", str(out)]) == 0
    assert lines_of(out) == lines_of(whole)


def test_micro_batches_stay_as_they_are_where_the_loss_depends_on_them(tmp_path):
    settings = {"dataset": "d", "model": "m", "out": str(tmp_path)}
    legacy = train_config(**settings, reduction="token_mean_legacy")
    for config, refused in ((train_config(**settings), False), (legacy, True)):
        (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        changed = dataclasses.replace(config, batch=BatchConfig(tokens_per_micro_batch=64))
        with (
            pytest.raises(RolloutError, match="tokens_per_micro_batch")
            if refused
            else nullcontext()
        ):
            find_checkpoint(changed)


def test_resuming_where_there_is_no_run_is_an_error_that_names_similar_runs(tmp_path, capfd):
    (tmp_path / "opposites").mkdir()
    (tmp_path / "opposites" / "config.json").write_text("{}")
    for verb in ("train", "rl"):
        for name, hint in (("oposites", f"did you mean {tmp_path}/opposites?"), ("x", "leave out")):
            assert main([verb, "--resume", str(tmp_path / name)]) == 1
            printed = capfd.readouterr().err
            assert f"Error: {tmp_path}/{name}: no run to resume" in printed
            assert hint in printed
            assert not (tmp_path / name).exists()
    assert main(["train", "ds", "--resume", str(tmp_path / "opposites")]) == 2
    assert "leave out DS" in capfd.readouterr().err


def test_resuming_needs_only_the_run_and_may_change_what_may_change(
    paths, tmp_path, whole, out, capfd
):
    moved = out.rename(tmp_path / "moved")
    assert main(["train", "--resume", str(moved), "--lr", "0.5"]) == 1
    assert "optimizer.learning_rate: found 0.5; expected 0.001" in capfd.readouterr().err
    assert main(["train", "--resume", str(moved), "--set", "run.keep_checkpoints=1"]) == 0
    assert lines_of(moved) == lines_of(whole)
    assert checkpoints_of(moved) == ["global_step_4", "latest"]
    config = json.loads((moved / "config.json").read_text())
    assert config["data"]["dataset"] == paths["dataset"]
    assert config["run"]["out"] == str(moved)


def test_another_number_of_processes_is_noted(out, capfd):
    starts = json.loads((out / "starts.jsonl").read_text())
    (out / "starts.jsonl").write_text(json.dumps(starts | {"num_processes": 2}) + "\n")
    assert main(["train", "--resume", str(out)]) == 0
    said = "note: training in 1 process; the run used 2 processes so far (--num-processes)\n"
    assert capfd.readouterr().err.count(said) == 1
    (out / "checkpoints" / "latest").write_text("global_step_2\n")
    assert main(["train", "--resume", str(out)]) == 0
    assert "so far" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_after_the_current_update(
    number, paths, whole, tmp_path, monkeypatch
):
    made = updates.make_update

    def interrupted(*given):
        found = made(*given)
        if "global_step_1" not in str(list((tmp_path / "run").rglob("*"))):
            os.kill(os.getpid(), number)
        return found

    monkeypatch.setattr(updates, "make_update", interrupted)
    ended = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}[number]
    before = signal.getsignal(number)
    with pytest.raises(ended):
        run(paths, tmp_path / "run", save_every_updates=None)
    assert signal.getsignal(number) == before
    assert checkpoints_of(tmp_path / "run") == ["global_step_1", "latest"]
    run(paths, tmp_path / "run", save_every_updates=None)
    assert lines_of(tmp_path / "run") == lines_of(whole)


def test_a_signal_repeated_within_a_second_is_one_and_a_later_one_stops_at_once(monkeypatch):
    stop, seconds = Stop(), iter([0.0, 0.9, 1.1])
    monkeypatch.setattr(training.time, "monotonic", lambda: next(seconds))
    with stop.requested_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_during_the_exchange_of_signals_counts_the_next_time(monkeypatch):
    stop = Stop()

    def interrupted(_, data):
        os.kill(os.getpid(), signal.SIGTERM)
        return [data]

    monkeypatch.setattr(training, "gather_bytes", interrupted)
    with stop.requested_by_signals():
        assert not stop.is_requested(None)  # type: ignore[arg-type]
        stop.raise_if_stopped()
        assert stop.is_requested(None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        stop.raise_if_stopped()
