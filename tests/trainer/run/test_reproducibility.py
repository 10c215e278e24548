"""The same update has the same bits, however memory is laid out and threads are scheduled."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import trainer
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    VOCAB,
    forests_of,
    make_batch,
    save_tiny_model,
    step,
    tiny_llama,
    write_dataset,
)
from trainer.models.policy import Policy, load_policy


def shifted(model, out, num_bytes):
    """A copy of a model whose weights lie further back in their file."""
    shutil.copytree(model, out)
    file = out / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "note": "x" * num_bytes})
    return str(out)


@pytest.mark.slow
def test_weights_are_the_same_wherever_they_lie_in_their_file(tmp_path):
    """A response of one token makes the head a matrix-vector product."""
    rng = np.random.default_rng(0)
    answers = [
        step(f"g{group}", number, 0, rng.integers(0, VOCAB, 5).tolist(), [number + group],
             reward=float(number), is_last_step=True)
        for group in range(2) for number in range(2)
    ]  # fmt: skip
    dataset = write_dataset(tmp_path / "ds", answers)
    first = Path(save_tiny_model(tmp_path / "start", hidden_size=64))
    models = [shifted(first, tmp_path / f"m{size}", size) for size in (0, 8)]
    offsets, saved = set(), list[bytes]()
    for number, model in enumerate(models):
        loaded = load_policy(model, logprob_chunk_tokens=8)
        offsets |= {parameter.data_ptr() % 16 for parameter in loaded.parameters()}
        config = train_config(
            dataset=dataset, model=model, out=str(tmp_path / f"run{number}"), learning_rate=1e-3,
            groups_per_batch=1, groups_per_mini_batch=1, tokens_per_micro_batch=1, num_epochs=3,
        )  # fmt: skip
        result = trainer.train(config)
        saved.append((Path(result.checkpoint) / "model.safetensors").read_bytes())
    assert offsets == {0, 8}
    assert saved[0] == saved[1]


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_two_threads")
def test_targets_that_share_a_parent_have_the_same_gradient_each_time():
    """In a tree, the first tokens of all responses to a prompt are predicted at its last token."""
    policy = Policy(tiny_llama(hidden_size=256, num_hidden_layers=1), logprob_chunk_tokens=1024)
    batch = make_batch([([1, 2, 3], [n % VOCAB for n in range(100)], [True] * 100)] * 8)
    (forest,) = forests_of(batch)
    shared = torch.full_like(forest.target_parent, 2)
    forest = dataclasses.replace(forest, target_parent=shared)
    weight = torch.randn(len(shared), generator=torch.Generator().manual_seed(0))
    found = set()
    for _ in range(8):
        policy.zero_grad()
        logprobs, _ = policy(forest, batch.temperature[forest.target_slot])
        (logprobs * weight).sum().backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        found.add(b"".join(gradient.numpy().tobytes() for gradient in gradients))
    assert len(found) == 1
