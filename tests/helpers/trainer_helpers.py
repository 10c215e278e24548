"""Tiny models and hand-made rows for the trainer's tests."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from accelerate import Accelerator
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import rollout_io
from schemas.metadata import DatasetMetadata
from tests.helpers.configs import train_config
from trainer.batch import read_rows, to_batch
from trainer.batches.forest import MiniBatch, chain_forests
from trainer.models.policy import Policy
from trainer.run.run import START, Run
from trainer.update import Update, make_update

VOCAB = 61

Row = tuple[list[int], list[int], list[bool]]
"""Prompt, response, loss mask."""


def tiny_llama(seed=0, **settings):
    """Two layers, 61 tokens, weights large enough that every attended token matters."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = LlamaConfig(**(defaults | settings))
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


class Layerless(PreTrainedModel):
    """A model without layers of the usual kind."""

    def __init__(self):
        super().__init__(LlamaConfig())


def tiny_policy(*, chunk=1024, **settings):
    return Policy(tiny_llama(**settings), logprob_chunk_tokens=chunk)


def save_tiny_model(path, **settings):
    tiny_llama(**settings).save_pretrained(path)
    return str(path)


def make_batch(
    rows,
    *,
    advantages=None,
    temperatures=None,
    rollout_logprobs=None,
    trajectories=None,
    rewards=None,
):
    """Rows of the given (group, trajectory), by default each of its own."""
    n = len(rows)
    ids = trajectories or [(f"g{i}", f"g{i}_0") for i in range(n)]
    table = {
        "name": [f"row {i}" for i in range(n)],
        "instance_id": [group for group, _ in ids],
        "trajectory_id": [trajectory for _, trajectory in ids],
        "prompt_token_ids": [r[0] for r in rows],
        "response_ids": [r[1] for r in rows],
        "loss_mask": [r[2] for r in rows],
        "rollout_logprobs": rollout_logprobs or [None] * n,
        "temperature": temperatures or [None] * n,
        "trains": [True] * n,
        "reward": rewards or [0.0] * n,
        "advantage": advantages or [1.0] * n,
        "mini_batch": [0] * n,
    }
    schema = {
        "prompt_token_ids": pl.List(pl.Int32),
        "response_ids": pl.List(pl.Int32),
        "loss_mask": pl.List(pl.Boolean),
        "rollout_logprobs": pl.List(pl.Float32),
        "temperature": pl.Float32,
        "advantage": pl.Float64,
    }
    return to_batch(pl.DataFrame(table, schema_overrides=schema))


def metrics_of(out):
    """The lines of the metrics of a run."""
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


TIMES = {"seconds", "tokens_per_s"}


def lines_of(out):
    """The lines of the metrics of a run, without times."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics_of(out)]


def check_same_checkpoints(out, expected):
    """The files of two runs' checkpoints, and their tensors to 1e-4."""
    folders = [Path(path) / "checkpoints" for path in (out, expected)]
    names = [{str(p.relative_to(folder)) for p in folder.rglob("*")} for folder in folders]
    assert names[0] == names[1]
    for name in sorted(n for n in names[0] if n.endswith(".safetensors")):
        ours, theirs = (load_file(folder / name) for folder in folders)
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
        for key, tensor in theirs.items():
            if tensor.isfinite().all() and tensor.any():
                assert relative_difference(ours[key].double(), tensor.double()) < 1e-4, key


def forests_of(batch, budget=4096, *, targets=None):
    is_target = batch.trains if targets is None else targets
    rows = np.arange(len(batch.names))
    return chain_forests(batch.prompts, batch.responses, is_target, rows, budget)


def run_of(policy, *, corrects=False, reference=None, critic=None, **settings):
    """A run with plain SGD, whose step is the clipped gradient times the learning rate."""
    settings = {"record_tokens": "none"} | settings
    config = train_config(dataset="d", model="m", out="o", **settings)
    rate = config.optimizer.critic_learning_rate
    return Run(
        config=config,
        accelerator=Accelerator(),
        policy=policy,
        optimizer=torch.optim.SGD(policy.parameters(), lr=config.learning_rate),
        reference=reference,
        critic=critic,
        critic_optimizer=critic and torch.optim.SGD(critic.trained_parameters(), lr=rate),
        corrects_for_sampler=corrects,
    )


@st.composite
def row_lists(draw, max_rows=5):
    """Ragged rows with at least one target in all."""
    token = st.integers(0, VOCAB - 1)
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        response = draw(st.lists(token, min_size=1, max_size=6))
        mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
        rows.append((prompt, response, mask))
    if not any(any(mask) for _, _, mask in rows):
        rows[0][2][0] = True
    return rows


def plain_logprobs(model, rows, temperatures=None):
    """[T] log-probabilities of all response tokens: one plain forward per row, full logits."""
    parts = []
    for i, (prompt, response, _) in enumerate(rows):
        ids = torch.tensor([prompt + response])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits / (temperatures[i] if temperatures else 1.0)
        picked = logits[len(prompt) - 1 : -1].log_softmax(-1)
        parts.append(picked.gather(-1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(parts)


def step(instance, repetition, index, prompt, response, **values):
    """One row of a rollout table."""
    return {
        "instance_id": instance,
        "repetition_id": repetition,
        "trajectory_id": f"{instance}_{repetition}",
        "step_index": index,
        "is_last_step": False,
        "prompt_token_ids": prompt,
        "response_ids": response,
        "loss_mask": [True] * len(response),
        "token_source": "engine",
        "reward": None,
        "error": None,
    } | values


def two_step_trajectory(rng, instance, repetition, reward, **values):
    """Two steps, the second of which continues the first after three observation tokens."""
    prompt, first, seen, second = (rng.integers(0, VOCAB, n).tolist() for n in (5, 4, 3, 4))
    return [
        step(instance, repetition, 0, prompt, first, reward=0.0, **values),
        step(
            instance,
            repetition,
            1,
            prompt + first + seen,
            second,
            **({"reward": reward, "is_last_step": True} | values),
        ),
    ]


def one_group(rng, instance, rewards, **values):
    """A trajectory of two steps for each reward."""
    trajectories = (
        two_step_trajectory(rng, instance, repetition, reward, **values)
        for repetition, reward in enumerate(rewards)
    )
    return [row for rows in trajectories for row in rows]


def group_rows(num_groups, rewards, **values):
    """Groups g0, g1, ... of the same rewards."""
    rng = np.random.default_rng(0)
    groups = (one_group(rng, f"g{group}", rewards, **values) for group in range(num_groups))
    return [row for rows in groups for row in rows]


def write_dataset(path, rows, logprobs_mode=None, outcome=None):
    from schemas.columns import arrow_schema

    names = tuple({name for row in rows for name in row})
    schema = arrow_schema(names)
    table = pa.Table.from_pylist(list(rows), schema=schema)
    metadata = DatasetMetadata(logprobs_mode=logprobs_mode, outcome=outcome)
    with rollout_io.RolloutWriter(path, metadata=metadata) as writer:
        writer.write(table)
    return str(path)


def gradients(model):
    """All gradients as one vector."""
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def relative_difference(a, b):
    return float((a - b).norm() / b.norm())


def load_batch(rollouts, plan, groups, config):
    """The rows of the groups as a batch."""
    return to_batch(read_rows(rollouts, plan, groups, config), config.max_row_tokens)


def update_of(batch, forests):
    """A mini-batch of these micro-batches, just before its update."""
    mini_batches = (MiniBatch(forests=list(forests)),)
    return Update(batch=dataclasses.replace(batch, mini_batches=mini_batches))


def update_with(run, batch, forests, old=None, ref=None):
    """An update whose old and reference log-probabilities are these."""
    batch = dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref)
    return make_update(run, update_of(batch, forests), START).metrics


def gradient_of_update(policy, batch, **settings_):
    """The gradient an update leaves, unclipped, without moving the policy."""
    budget, old = settings_.pop("budget", 4096), settings_.pop("old", None)
    ref = settings_.pop("ref", None)
    learner = run_of(policy, max_grad_norm=1e9, learning_rate=1e-30, **settings_)
    kept = []
    hook = learner.optimizer.register_step_pre_hook(lambda *_: kept.append(gradients(policy)))
    update_with(learner, batch, forests_of(batch, budget), old, ref)
    hook.remove()
    return kept[0]
