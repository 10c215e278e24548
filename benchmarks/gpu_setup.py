"""What every part of `benchmarks.gpu` measures with: a model, its rows, and a run that trains it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from benchmarks import training, trees
from trainer.batch import Batch, cut_batch
from trainer.batches.forest import MiniBatch
from trainer.models.layers import compile_layers, recompute_layers
from trainer.models.policy import Policy, load_policy
from trainer.run.run import START, Run
from trainer.update import make_update

Figures = dict[str, Any]
Lines = Iterator[tuple[str, Figures]]


def attempted(name: str, work: Callable[[], Figures]) -> tuple[str, Figures]:
    """Return the figures of a measurement; a failure is one of them, and others still run."""
    try:
        found = work()
    except ModuleNotFoundError as error:
        found = {"not_run": str(error)}
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}"}
    return name, {k: v for k, v in found.items() if not (isinstance(v, float) and math.isnan(v))}


def card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU, no GPU"


@contextmanager
def model_directory(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield `--model`, or a temporary directory with a model built from its configuration."""
    if arguments.model:
        yield arguments.model
        return
    kind = "2-layers" if arguments.tiny else "Qwen3-0.6B"
    with tempfile.TemporaryDirectory(prefix=f"random-{kind}-") as folder:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        tiny = arguments.tiny
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64 if tiny else 1024,
            intermediate_size=128 if tiny else 3072,
            num_hidden_layers=2 if tiny else 28,
            num_attention_heads=4 if tiny else 16,
            num_key_value_heads=2 if tiny else 8,
            head_dim=32 if tiny else 128,
            max_position_embeddings=2048 if tiny else 40_960,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A policy on the device, and the arguments that `benchmarks.trees` expects."""

    arguments: argparse.Namespace
    accelerator: Accelerator
    policy: Policy


@contextmanager
def opened(
    arguments: argparse.Namespace, *, compiles: bool, recomputes: bool = True
) -> Iterator[Setup]:
    mixed = "bf16" if arguments.dtype == "bfloat16" else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=arguments.device == "cpu")
    with model_directory(arguments) as model:
        policy = load_policy(model, logprob_chunk_tokens=4096 if compiles else 1024, trees=True)
        # Without it, the policy would compute in float32 while TRL and the padded loop do not.
        policy = accelerator.prepare_model(policy)
        if compiles:
            compile_layers(policy.model, recomputes=recomputes)
        elif recomputes:
            recompute_layers(policy.model)
        settings = argparse.Namespace(**vars(arguments) | {"model": model})
        yield Setup(arguments=settings, accelerator=accelerator, policy=policy)


def rows_of(arguments: argparse.Namespace) -> Batch:
    batch = trees._made_up(arguments)["step"]
    assert batch is not None
    return batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """An update of a batch in one layout, ready to run; gradients accumulate and nothing steps."""

    run: Run
    mini_batch: MiniBatch
    batch: Batch

    def __call__(self) -> None:
        """Make the update."""
        make_update(self.run, training.update_of(self.batch, self.mini_batch.forests), START)


def update_of(setup: Setup, batch: Batch, layout: str, tokens: int) -> Update:
    arguments = argparse.Namespace(**vars(setup.arguments) | {"tokens": tokens})
    config = trees._config(arguments, "-", **trees.SIDES[layout])
    run = Run(
        accelerator=setup.accelerator,
        policy=setup.policy,
        optimizer=training._Kept(setup.policy.parameters(), lr=1.0),
        config=config,
        corrects_for_sampler=False,
    )
    (mini_batch,) = cut_batch(batch, config.batch)
    return Update(run=run, mini_batch=mini_batch, batch=batch)


def wait() -> None:
    """Wait for the card."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], rounds: int = 3) -> float:
    """Return the shortest time of some rounds, after one that does not count."""
    work()
    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)
