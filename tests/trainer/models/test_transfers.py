"""Copies and synchronisations of a micro-batch on a device that is not the CPU."""

import dataclasses
import types
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.gpu_claims import TINY, model_of, turns
from tests.helpers.trainer_helpers import run_of, update_of
from tests.helpers.tree_helpers import batch_of, mini_batch_of
from trainer import update as updates
from trainer.models import attention, tree_attention, varlen
from trainer.models.policy import Policy
from trainer.run.run import START

MOST = 5
META = torch.device("meta")
SYNCHRONISES = {"_local_scalar_dense", "nonzero", "unique_consecutive", "equal", "is_nonzero"}


class Transfers(TorchDispatchMode):
    """Lists operations on the device that wait for it or copy to or from the CPU.

    Tensors of the device "meta" have no values; what is copied from them to the CPU is zero.
    """

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        given = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [
            t for t in torch.utils._pytree.tree_leaves((args, given)) if isinstance(t, torch.Tensor)
        ]
        on_device = any(t.is_meta for t in tensors)
        if name == "_to_copy" and tensors[0].is_meta != (
            torch.device(given.get("device", tensors[0].device)) == META
        ):
            self.found.append(f"{name} of {list(tensors[0].shape)}")
            if on_device:
                return torch.zeros(tensors[0].shape, dtype=given.get("dtype") or tensors[0].dtype)
        elif name == "copy_" and args[0].is_meta != args[1].is_meta:
            self.found.append(name)
            return args[0]
        elif on_device and name in SYNCHRONISES:
            self.found.append(name)
            if name == "_local_scalar_dense":
                return 0
        return func(*args, **given)


@pytest.mark.parametrize("layout", ["step", "tree"])
def test_a_micro_batch_needs_at_most_five_copies_and_waits(layout, monkeypatch):
    """All copies to and from the device count, and all operations that wait for it."""

    def like_query(query, *_, **__):
        return query * 1

    monkeypatch.setattr(attention, "runs_varlen", lambda *_: True)
    monkeypatch.setattr(varlen, "VARLEN_ATTN", like_query)
    monkeypatch.setattr(tree_attention, "uses_blocks", lambda _: True)
    monkeypatch.setattr(tree_attention, "compiled", lambda: like_query)
    for module in (attention, tree_attention, varlen):  # autocast does not know the device "meta"
        monkeypatch.setattr(module, "autocast_dtype", lambda tensor: tensor.dtype)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    batch = batch_of(turns(TINY, 0))
    forests = mini_batch_of(batch, sequence_layout=layout, tokens_per_micro_batch=64).forests
    with torch.device("meta"):
        policy = Policy(model_of(TINY), logprob_chunk_tokens=64)
    learner = run_of(policy, kl_loss_coef=0.1)
    accelerator = types.SimpleNamespace(
        device=META, num_processes=1, process_index=0, backward=lambda loss: loss.backward()
    )
    learner = dataclasses.replace(learner, accelerator=accelerator)
    monkeypatch.setattr(updates, "clip_and_step", lambda *_: 1.0)
    with Transfers() as transfers:
        known = torch.zeros(len(batch.trains))
        batch = dataclasses.replace(batch, old_logprobs=known, ref_logprobs=known)
        updates.make_update(learner, update_of(batch, forests), START)
    assert len(forests) > 1
    assert len(transfers.found) <= MOST * len(forests), transfers.found
    assert len(transfers.found) >= 2 * len(forests)  # tokens to the device, metrics to the CPU
