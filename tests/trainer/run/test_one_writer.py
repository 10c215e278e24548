"""Whatever generates, records or trains takes the lock that all other writers take."""

import asyncio

import pytest

import trainer
from pipelines.generation.config import GenerateConfig
from pipelines.generation.run import generate
from pipelines.record.shards import lock_dataset
from rollout_io.cli.main import run
from rollout_io.dataset.locking import Destination
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.rl_helpers import HERE, config_of, save_model, write_tasks
from trainer import rl
from trainer.engine import open_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


def write_with(verb, model, dataset, folder):
    """Write to `folder / "run"` as the verb does."""
    out = str(folder / "run")
    if verb == "generate":
        tasks = write_tasks(folder / "tasks.jsonl", 1)
        sampling = {"environment": f"{HERE}:Length", "max_response_tokens": 2}
        config = GenerateConfig(tasks=tasks, model=model, out=out, **sampling)
        asyncio.run(generate(config, open_engine))
    elif verb == "record":
        lock_dataset(out).release()
    elif verb == "rl":
        rl.run(config_of(folder, model, num_iterations=1))
    else:
        train = train_config(
            dataset=str(dataset), model=model, out=out, max_updates=1, max_row_tokens=64
        )
        trainer.train(train)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "record", "rl", "train"])
def test_a_destination_that_another_writer_holds_is_refused_and_stays_as_it_is(
    verb, model, shop_dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr("pipelines.record.shards._LOCK_WAIT_S", 0.0)
    held = Destination(tmp_path / "run")
    with pytest.raises(RolloutError) as raised:
        write_with(verb, model, shop_dataset, tmp_path)
    held.release()
    assert raised.value.rule in {"out_is_free", "run_in_use"}
    written = [p for p in (tmp_path / "run").glob("**/*") if p.is_file() and "lock" not in p.name]
    assert not written


SECONDS = [
    "filter {ds} --where step_index>=0 --out {out}",
    "merge {ds} --out {out}",
    "merge --undo {ds} --out {out}",
    "export {ds} --format parquet --out {out}",
]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "record", "rl", "train"])
def test_other_writers_are_refused_until_a_writer_has_ended(
    verb, model, shop_dataset, tmp_path, monkeypatch, capsys
):
    release, codes = Destination.release, list[int]()

    def released(self):
        if self._path == tmp_path / ".run.lock" and not codes:
            codes.append(0)
            names = {"ds": shop_dataset, "out": tmp_path / "run"}
            codes.extend(run(line.format(**names).split()) for line in SECONDS)
        release(self)

    monkeypatch.setattr(Destination, "release", released)
    write_with(verb, model, shop_dataset, tmp_path)
    assert codes == [0, *[1] * len(SECONDS)]
    said = capsys.readouterr().err
    assert said.count("another process is writing to this directory") == len(SECONDS)
