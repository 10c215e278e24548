import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from schemas.errors import MissingExtra
from trainer.engine.nccl_sender import ModelTensors, open_nccl_sender


def test_a_checkpoint_yields_the_tensors_that_its_index_lists(tmp_path):
    saved = {
        "model.a": torch.arange(6.0).view(2, 3),
        "model.b": torch.ones(4, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros((), dtype=torch.float16),
    }
    shards = {name: f"model-{number}.safetensors" for number, name in enumerate(saved)}
    for name, file in shards.items():
        save_file({name: saved[name]}, tmp_path / file)
    source = ModelTensors(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert "other" in dict(source)
    index = {"weight_map": shards}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for _ in range(2):
        found = dict(source)
        assert found.keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in found.items())
    described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert source.metadata() == described


def test_the_error_without_vllm_names_both_remedies(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match="needs vLLM in the trainer's environment") as error:
        open_nccl_sender("http://localhost:1", lambda *_: b"")
    assert error.value.hint is not None
    assert "install the servers' version of vLLM" in error.value.hint
    assert "without --weight-transfer-config" in error.value.hint
