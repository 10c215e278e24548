"""What a run or a recorder cleans up is its own: forged names and links delete nothing of others."""

import dataclasses
from contextlib import suppress

import pytest

from pipelines.record.journal import Journal
from schemas.errors import RolloutError
from tests.helpers.rl_helpers import config_of, save_model
from trainer import rl
from trainer.run.checkpoint import discard_after
from trainer.run.token_records import discard_token_records


@pytest.fixture
def others(tmp_path):
    folder = tmp_path / "others"
    folder.mkdir()
    for name in ("calls.jsonl", "model.safetensors", "global_step_00009.parquet"):
        (folder / name).write_text("precious")
    return folder


def check_untouched(others):
    assert [path.read_text() for path in sorted(others.iterdir())] == ["precious"] * 3


def forge(link, target):
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("checkpoints/global_step_9", lambda out: discard_after(out, 1)),
        ("checkpoints/.global_step_9.removed", lambda out: discard_after(out, 1)),
        ("tokens/.global_step_9.parquet.partial", lambda out: discard_token_records(out, 1)),
        ("tokens/global_step_00009.parquet", lambda out: discard_token_records(out, 1)),
    ],
)
def test_a_link_in_a_run_is_removed_and_what_it_names_stays(name, clean, others, tmp_path):
    is_file = name.startswith("tokens")
    forge(tmp_path / "run" / name, others / "global_step_00009.parquet" if is_file else others)
    clean(tmp_path / "run")
    check_untouched(others)


def test_files_of_others_in_the_folders_of_a_run_stay(tmp_path):
    kept = ["checkpoints/notes", "checkpoints/global_step_best", "tokens/mine.parquet"]
    for name in kept:
        (tmp_path / name).mkdir(parents=True)
    discard_after(tmp_path, 0)
    discard_token_records(tmp_path, 0)
    assert all((tmp_path / name).is_dir() for name in kept)


@pytest.mark.parametrize("name", ["00000", "00001.done", "notes.done"])
def test_links_in_a_journal_delete_nothing(name, others, tmp_path):
    forge(tmp_path / "ds" / ".recording" / name, others)
    with suppress(RolloutError):  # a link in place of a numbered folder is refused
        Journal(tmp_path / "ds").recover()
    check_untouched(others)


@pytest.mark.slow
def test_a_loop_deletes_only_its_own_versions_of_the_weights(tokenizer, others, tmp_path):
    model = save_model(tmp_path / "model", tokenizer)
    config = config_of(tmp_path, model, num_iterations=1, keep_weights=1)
    rl.run(config)
    weights = tmp_path / "run" / "weights"
    (weights / "version_best").mkdir()
    forge(weights / ".version_7", others)
    forge(weights / "version_0", others)
    loop = dataclasses.replace(config.loop, num_iterations=2)
    rl.run(dataclasses.replace(config, loop=loop), resume=True)
    check_untouched(others)
    assert sorted(path.name for path in weights.iterdir()) == ["version_2", "version_best"]
