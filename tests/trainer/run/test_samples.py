"""Sampled rollouts in trackers: tables and texts, read back from the trackers' own files."""

import json

import pytest

import trainer
from schemas.errors import ConfigError, RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import save_tiny_model, step, write_dataset
from trainer.config.sections import SAMPLE_CHARS

pytestmark = [pytest.mark.model, pytest.mark.slow]
SECRET = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"


def trained(tmp_path, tokenizer, model, *trackers, **settings):
    """Train on two groups of two attempts, an update each; return the responses."""
    prompt = tokenizer.backend.encode("begin " + "word " * SAMPLE_CHARS + f"my token is {SECRET}!")
    responses = [f"# answer {i}\n<b>bold</b>" + i * 300 * " more" for i in range(4)]
    rows = [
        step(
            f"g{i // 2}",
            i % 2,
            0,
            prompt[-60:],
            tokenizer.backend.encode(text),
            reward=float(i % 2),
            is_last_step=True,
        )
        for i, text in enumerate(responses)
    ]
    dataset = write_dataset(tmp_path / "ds", rows)
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 1, "log_samples": 1} | settings
    config = train_config(
        dataset=dataset, model=str(model), out=str(tmp_path / "run"), trackers=trackers, **settings
    )
    trainer.train(config)
    return responses


def check(sample, number):
    assert sample["trajectory"] == f"g{number}_0"
    assert (sample["return"], sample["advantage"] < 0) == (0.0, True)
    assert SECRET not in sample["prompt"]
    assert "my token is [" in sample["prompt"]
    assert len(sample["response"]) <= SAMPLE_CHARS + 40


def test_tensorboard_shows_texts_of_each_update(tmp_path, tokenizer, small_smollm2):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    responses = trained(tmp_path, tokenizer, small_smollm2, "tensorboard", log_samples=2)
    (file,) = tmp_path.rglob("rollouts/events.out.tfevents.*")
    events = loader.EventAccumulator(str(file), size_guidance={"tensors": 0}).Reload()
    for i in range(2):
        texts = events.Tensors(f"samples/{i}/text_summary")
        assert [event.step for event in texts] == [1, 2]
        for number, event in enumerate(texts):
            text = event.tensor_proto.string_val[0].decode()
            attempt = 2 * number + i
            assert f"**trajectory**: g{number}_{i}" in text
            assert f"    # answer {attempt}\n    <b>bold</b>" in text
            assert SECRET not in text
            whole = len(responses[attempt])
            left_out = f"[{whole - SAMPLE_CHARS:,} characters left out]"
            assert (left_out in text) == (whole > SAMPLE_CHARS)


@pytest.mark.filterwarnings("ignore")  # of MLflow and SQLAlchemy
def test_mlflow_has_a_table_of_each_update(tmp_path, tokenizer, small_smollm2, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    trained(tmp_path, tokenizer, small_smollm2, "mlflow")
    files = sorted(tmp_path.rglob("samples/update_*.json"))
    assert [file.name for file in files] == ["update_1.json", "update_2.json"]
    for number, file in enumerate(files):
        table = json.loads(file.read_text())
        ((*row,),) = table["data"]
        check(dict(zip(table["columns"], row, strict=True)), number)


def test_wandb_has_a_table_of_each_update(tmp_path, tokenizer, small_smollm2, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trained(tmp_path, tokenizer, small_smollm2, "wandb")
    files = sorted(tmp_path.rglob("samples_*.table.json"), key=lambda f: f.stat().st_mtime_ns)
    assert len(files) == 2
    for number, file in enumerate(files):
        table = json.loads(file.read_text())
        (row,) = table["data"]
        check(dict(zip(table["columns"], row, strict=True)), number)


def test_samples_without_a_tracker_of_texts_are_refused(tmp_path):
    for trackers in ((), ("comet_ml",)):
        with pytest.raises(ConfigError, match="log_samples"):
            train_config(
                dataset="ds", model="m", out=str(tmp_path), trackers=trackers, log_samples=1
            )


def test_samples_of_a_model_without_a_tokenizer_are_refused_before_training(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    paths = {"dataset": "ds", "model": model, "out": str(tmp_path / "run")}
    config = train_config(**paths, trackers=("tensorboard",), log_samples=1)
    with pytest.raises(RolloutError, match="tokenizer"):
        trainer.train(config)
    assert not (tmp_path / "run").exists()
