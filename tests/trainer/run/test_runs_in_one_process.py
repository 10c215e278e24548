"""Runs of one process that differ in their precision, and launch settings that compile."""

import gc
import sys

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from tests.trainer.run.test_start_processes import launched, lines_of
from trainer.distributed import accelerator as launching
from trainer.distributed.accelerator import make_accelerator
from trainer.training import train

SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture
def alone():
    """Other tests' state of Accelerate is put away."""
    made, kept = list(launching._MADE), dict(AcceleratorState._shared_state)
    launching._MADE.clear()
    AcceleratorState._reset_state()
    yield
    launching._MADE[:] = made
    AcceleratorState._reset_state()
    AcceleratorState._shared_state.update(kept)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_runs_of_one_process_may_differ_in_their_precision(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    dataset = write_dataset(tmp_path / "ds", group_rows(2, (1.0, 0.0), **SAMPLED))
    norms = []
    for number, dtype in enumerate(("float32", "bfloat16", "float32")):
        out = str(tmp_path / str(number))
        config = train_config(dataset=dataset, model=model, out=out, dtype=dtype)  # type: ignore[arg-type]
        norms.append(train(config).metrics["grad_norm"])
    assert norms[0] == norms[2] != norms[1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("owner", ["run", "user"])
def test_a_precision_that_is_still_in_use_is_not_changed(owner, tmp_path):
    given = {"out": str(tmp_path), "dtype": "float32"}
    held = (
        make_accelerator(train_config(**given))
        if owner == "run"
        else Accelerator(mixed_precision="no")
    )
    with pytest.raises(RolloutError, match=r"in use by another run.*\[launch\]"):
        make_accelerator(train_config(out=str(tmp_path), dtype="bfloat16"))
    assert held.mixed_precision == "no"
    del held
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [["loss.kl_loss_coef=0.1"], ["loss.kl_loss_coef=0.1", "model.lora_rank=2"]]
)
@pytest.mark.skipif(sys.platform == "win32", reason="torch.compile")
def test_a_launcher_that_compiles_trains_with_a_reference_like_one_that_does_not(
    settings, tmp_path, monkeypatch
):
    model = save_tiny_model(tmp_path / "model")
    dataset = write_dataset(tmp_path / "ds", group_rows(2, (1.0, 0.0), **SAMPLED))
    keys = [part for setting in settings for part in ("--set", setting)]
    found = []
    for backend in ("NO", "EAGER"):
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
        out = tmp_path / backend
        process = launched("train", dataset, "--model", model, "--out", str(out), "-q", *keys)
        said = process.communicate(timeout=300)[1]
        assert process.returncode == 0, said
        found += [line["grad_norm"] for line in lines_of(out)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
