"""A checkpoint has every file of the model directory that is not weights, or says what it left out."""

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rollout_io.cli.main import run
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from trainer.run.checkpoint import other_files

KEPT = (
    "tokenizer.json",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "spiece.model",
    "modeling_own.py",
    "LICENSE",
    "a/b/c.txt",
)
NOT_KEPT = (
    ".git/config",
    ".cache/huggingface/x.metadata",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.SAFETENSORS",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "model-Q4.gguf",
    "state/run.json",
    "critic/config.json",
    "adapter/adapter_config.json",
)


def fill(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(name)


def trained(folder, model):
    dataset = write_dataset(folder / "ds", group_rows(1, (1.0, 0.0), temperature=1.0))
    assert run(["train", dataset, "--model", model, "--out", str(folder / "run")]) == 0
    return folder / "run" / "checkpoints" / "global_step_1"


def test_a_checkpoint_has_every_file_that_is_not_weights(tmp_path, capfd):
    model = save_tiny_model(tmp_path / "model")
    fill(Path(model), KEPT)
    # Not as Transformers writes it, which below 5.23 refuses a temperature without do_sample.
    (Path(model) / "generation_config.json").write_text('{"temperature":0.6, "eos_token_id":1}')
    saved = trained(tmp_path, model)
    for name in KEPT:
        assert (saved / name).read_bytes() == (Path(model) / name).read_bytes(), name
    assert "leave out" not in capfd.readouterr().err
    name = "generation_config.json"
    assert (saved / name).read_bytes() == (Path(model) / name).read_bytes()
    again = trained(tmp_path / "again", str(saved))
    ours = {path.relative_to(saved) for path in saved.rglob("*")}
    assert {path.relative_to(again) for path in again.rglob("*")} == ours


def test_weights_hidden_files_and_state_are_not_copied(tmp_path):
    fill(tmp_path, (*KEPT, *NOT_KEPT))
    copied, left_out = other_files(tmp_path)
    assert {str(path) for path in copied} == set(KEPT)
    assert left_out == []


def test_a_run_inside_the_model_directory_and_links_out_of_it_are_left_out_and_said(
    tmp_path, capfd
):
    model = Path(save_tiny_model(tmp_path / "model"))
    fill(model, KEPT)
    fill(model, ("runs/1/config.json", "runs/1/metrics.jsonl"))
    (tmp_path / "secret").write_text("x")
    (model / "link").symlink_to(tmp_path / "secret")
    (model / "folder").symlink_to(tmp_path, target_is_directory=True)
    (model / "gone").symlink_to(tmp_path / "nothing")
    (model / "near").symlink_to("tokenizer.json")
    os.mkfifo(model / "pipe")
    saved = trained(tmp_path, str(model))
    assert (saved / "near").read_text() == "tokenizer.json"
    for name in ("link", "folder", "gone", "pipe", "runs/1"):
        assert not (saved / name).exists(), name
    said = capfd.readouterr().err
    assert "note: checkpoints leave out 5 entries" in said
    assert "folder, gone, link, pipe, runs/1" in said


def test_a_snapshot_of_the_hubs_cache_is_copied_through_its_links(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "123"
    fill(tmp_path / "models--a--b" / "blobs", ("1", "2"))
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    assert other_files(snapshot) == ([Path("tokenizer.json")], [])


NAMES = st.text("ab.- é", min_size=1, max_size=6).filter(lambda n: not n.startswith("."))


@given(st.sets(NAMES.filter(lambda name: Path(name).suffix not in {".bin", ".pt"}), max_size=6))
def test_any_name_is_copied(names):
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), tuple(names))
        copied, left_out = other_files(Path(folder))
        found = {path.name for path in copied}
        assert found == names
        assert not left_out
