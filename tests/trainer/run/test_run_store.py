"""Runs in an object store: what is published, and what fresh machines resume from."""

import fsspec
import pytest

from schemas.errors import InputError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from tests.trainer.run.test_resume import lines_of
from trainer.training import train

URL = "memory://bucket/run"
SETTINGS = {
    "groups_per_batch": 2,
    "groups_per_mini_batch": 1,
    "learning_rate": 3e-4,
    "tis_ratio_type": None,
    "save_every_updates": 2,
    "keep_checkpoints": 2,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    dataset = write_dataset(folder / "ds", group_rows(8, (1.0, 0.0, 0.5)))
    return {"dataset": dataset, "model": save_tiny_model(folder / "model")}


@pytest.fixture
def store():
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/bucket", recursive=True)


def fetched(store, folder):
    store.get("/bucket/run", str(folder), recursive=True)
    return folder


@pytest.mark.slow
def test_a_run_in_a_store_resumes_without_anything_local_and_equals_a_local_one(
    paths, store, tmp_path
):
    local = train(train_config(**paths, **SETTINGS, out=str(tmp_path / "local")))
    first = train(train_config(**paths, **SETTINGS, out=URL, max_updates=5))
    assert first.checkpoint == f"{URL}/checkpoints/global_step_5"
    last = train(train_config(**paths, **SETTINGS, out=URL), resume=True)
    assert (last.num_updates, last.num_trained_groups) == (8, local.num_trained_groups)
    out = fetched(store, tmp_path / "fetched")
    assert lines_of(out) == lines_of(tmp_path / "local")
    names = {path.name for path in (out / "checkpoints").iterdir()}
    assert names == {"global_step_6", "global_step_8", "latest"}
    checkpoints = [run / "checkpoints" / "global_step_8" for run in (out, tmp_path / "local")]
    for file in ("model.safetensors", "state/optimizer.safetensors"):
        assert (checkpoints[0] / file).read_bytes() == (checkpoints[1] / file).read_bytes()
    assert len(list((out / "tokens").iterdir())) == 8
    assert URL in (out / "config.json").read_text()


def test_a_store_with_a_run_is_not_trained_in_again(paths, store):
    store.pipe("/bucket/run/config.json", b"{}")
    with pytest.raises(InputError) as error:
        train(train_config(**paths, **SETTINGS, out=URL))
    assert error.value.rule == "existing_run"
    assert store.find("/bucket") == ["/bucket/run/config.json"]
