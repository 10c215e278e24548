"""Compare one training step with a plain padded Transformers loop: seconds, memory, gradient.

    python -m benchmarks.training [--model DIR] [--groups shop-0 shop-1 shop-6] [--json]
    python -m benchmarks.training --long          # one micro-batch of 100,000 tokens, ours alone

Model, steps, advantages, loss (GRPO, clipped, mean over trained tokens), tokens per micro-batch and
gradient checkpointing are the same, so the gradients must agree. The padded loop works like common
trainers: every step is a row, rows are sorted by length and padded on the right to the longest of
their micro-batch, with logits and log-softmax at every position (benchmarks/padded.py). Our trainer
merges the same steps and packs them as chains. The two sides alternate in separate processes, and
the fastest round of each counts. Peak memory is the memory that a step needs in addition to weights
and gradients; on a CPU, it is the high-water mark of the process, and CPU seconds are printed
next to wall time. The limit of each ratio of times is the ratio of the tokens that the two sides
forward. On a GPU, the utilisation of its peak arithmetic is printed too (see `--peak-tflops`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

import pipelines
import rollout_io
from benchmarks.padded import micro_batches, padded_step
from pipelines.statistics.flops import read_model_shape
from pipelines.statistics.savings import Cost
from rollout_io.cli.main import run as rollouts_command
from tests.helpers.trainer_helpers import load_batch
from trainer.batch import Batch
from trainer.batches.forest import Forest, MiniBatch, chain_forest, chain_forests, chain_lengths
from trainer.batches.plan import make_plan
from trainer.config.train_config import TrainConfig, load_config
from trainer.models.layers import recompute_layers
from trainer.models.policy import Policy, load_policy
from trainer.run.run import START, Run
from trainer.update import Update, make_update

LOGS = ("examples/shop.calls.jsonl", "--rewards", "examples/shop.rewards.jsonl")
LONG_TOKENS = 100_000
Figures = dict[str, float]


def main() -> None:
    arguments = _arguments()
    if arguments.side:
        print(json.dumps(one_side(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        dataset = f"{folder}/steps"
        assert rollouts_command(["convert", *LOGS, "--format", "calls", "--out", dataset]) == 0
        common = [*sys.argv[1:], "--dataset", dataset]
        if arguments.long:
            _show_long(_in_process([*common, "--side", "long"]), as_json=arguments.json)
            return
        rounds: dict[str, list[Figures]] = {"padded": [], "ours": []}
        for _ in range(arguments.rounds):
            for side, figures in rounds.items():
                gradient = f"{folder}/{side}"
                figures.append(_in_process([*common, "--side", side, "--gradient", gradient]))
        difference = _relative_difference(f"{folder}/ours", f"{folder}/padded")
    best = {side: min(found, key=lambda f: f["seconds"]) for side, found in rounds.items()}
    _show(best, difference, as_json=arguments.json)
    assert difference < (1e-3 if arguments.dtype == "float32" else 0.1), difference


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--groups", nargs="+", default=["shop-0", "shop-1", "shop-6"])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per micro-batch")
    parser.add_argument(
        "--chunk", type=int, default=1024, help="logprob_chunk_tokens of this trainer"
    )
    parser.add_argument(
        "--keep-activations", action="store_true", help="no gradient checkpointing on either side"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="peak TFLOP/s of the GPU; H100: 989"
    )
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--layers", type=int, help="number of layers to keep, from the first")
    parser.add_argument("--json", action="store_true")
    for name in ("--side", "--dataset", "--gradient"):  # internal: arguments of a side's process
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_process(arguments: list[str]) -> Figures:
    command = [sys.executable, "-m", "benchmarks.training", *arguments]
    # Make the C library return freed memory, which would otherwise count as in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def one_side(arguments: argparse.Namespace) -> Figures:
    """Measure seconds, peak memory and tokens of one step; save its gradient if requested."""
    config = load_config(
        None,
        ["loss.tis_ratio_type=none"],
        {
            "data.dataset": arguments.dataset,
            "model.path": arguments.model,
            "run.out": "-",
            "run.record_tokens": "none",
            "model.dtype": arguments.dtype,
            "model.logprob_chunk_tokens": arguments.chunk,
            "batch.tokens_per_micro_batch": LONG_TOKENS if arguments.long else arguments.tokens,
            "optimizer.max_grad_norm": 1e30,
        },
    )
    accelerator = Accelerator(mixed_precision="bf16" if config.model.dtype == "bfloat16" else "no")
    policy = load_policy(config.model.path, logprob_chunk_tokens=config.model.logprob_chunk_tokens)
    policy.to(accelerator.device)
    if arguments.layers:
        del policy.model.base_model.layers[arguments.layers :]
    if not arguments.keep_activations:
        recompute_layers(policy.model)  # still in evaluation mode: no dropout on either side
    prepare = _padded if arguments.side == "padded" else _ours
    step, sizes = prepare(policy, config, arguments, accelerator)
    figures = _measured(policy, step, num_warm=int(torch.cuda.is_available())) | sizes
    if arguments.gradient:
        found = {n: p.grad.cpu() for n, p in policy.named_parameters() if p.grad is not None}
        save_file(found, arguments.gradient)
    return figures | _utilisation(figures, arguments)


def _padded(
    policy: Policy, config: TrainConfig, arguments: argparse.Namespace, accelerator: Accelerator
) -> tuple[Callable[[], Any], Figures]:
    batch, model = _batch(config, arguments.groups, "step"), policy.model
    model.set_attn_implementation("sdpa")

    def step() -> None:
        with accelerator.autocast():
            padded_step(model, batch, config.batch.tokens_per_micro_batch)

    lengths = batch.prompts.lengths + batch.responses.lengths
    parts = micro_batches(batch, config.batch.tokens_per_micro_batch)
    sizes = {
        "num_step_tokens": int(lengths.sum()),
        "num_forwarded_tokens": sum(len(rows) * int(lengths[rows].max()) for rows in parts),
    }
    return step, sizes


def _ours(
    policy: Policy, config: TrainConfig, arguments: argparse.Namespace, accelerator: Accelerator
) -> tuple[Callable[[], Any], Figures]:
    steps = _batch(config, arguments.groups, "step")
    batch = _batch(config, arguments.groups, "merge")
    rows = np.arange(len(batch.names))
    tokens = (batch.prompts, batch.responses, batch.trains)
    if arguments.side == "long":
        num = LONG_TOKENS // int(chain_lengths(*tokens).sum())
        forests = [chain_forest(*tokens, np.tile(rows, num))]
    else:
        forests = chain_forests(*tokens, rows, config.batch.tokens_per_micro_batch)
    prepared = accelerator.prepare_model(policy)
    optimizer = _Kept(policy.parameters(), lr=1.0)
    learner = Run(
        accelerator=accelerator,
        policy=prepared,
        optimizer=optimizer,
        config=config,
        corrects_for_sampler=False,
    )
    lengths = steps.prompts.lengths + steps.responses.lengths
    sizes = {"num_step_tokens": int(lengths.sum())} | _sizes(forests)
    update = update_of(batch, forests)
    return lambda: make_update(learner, update, START), sizes


def update_of(batch: Batch, forests: Sequence[Forest]) -> Update:
    """Return a batch of one mini-batch, just before its update."""
    mini_batches = (MiniBatch(forests=list(forests)),)
    return Update(batch=dataclasses.replace(batch, mini_batches=mini_batches))


class _Kept(torch.optim.SGD):
    """An optimizer whose `step` and `zero_grad` do nothing, so that gradients can be read later."""

    def step(self, closure: Any = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001
        pass


def _batch(config: TrainConfig, groups: list[str], layout: Any) -> Batch:
    rollouts = rollout_io.scan(config.data.dataset)
    returns = pipelines.trajectory_returns(rollouts, config.data.outcome).collect()
    plan = make_plan(returns, config)
    wanted = dataclasses.replace(config.batch, sequence_layout=layout)
    return load_batch(rollouts, plan, groups, wanted)


def _sizes(forests: list[Forest]) -> Figures:
    return {
        "num_forwarded_tokens": sum(f.num_tokens for f in forests),
        "num_attended": sum(int((f.position_ids + 1).sum()) for f in forests),
        "num_targets": sum(f.num_targets for f in forests),
        "num_micro_batches": len(forests),
    }


def _measured(policy: Policy, step: Callable[[], Any], *, num_warm: int) -> Figures:
    """Measure the seconds and peak memory of a training step, with gradients already allocated."""
    tokens = torch.arange(8, device=policy.model.device)[None]
    policy.model(
        input_ids=tokens, use_cache=False
    ).logits.sum().backward()  # some libraries are loaded at first use
    for _ in range(1 + num_warm):
        for parameter in policy.parameters():
            parameter.grad = torch.empty_like(parameter).zero_()
        before = _bytes(reset=True)
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        peak = _bytes(reset=False) - before  # waits for the GPU
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": float(peak)}


def _bytes(*, reset: bool) -> int:
    """Return the peak memory in bytes since the last reset; with `reset`, reset it first.

    On a CPU, this is the memory of the process.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.max_memory_allocated())
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kib,) = re.findall(rf"Vm{'RSS' if reset else 'HWM'}:\s+(\d+) kB", status)
    return int(kib) * 1024


def _utilisation(figures: Figures, arguments: argparse.Namespace) -> Figures:
    """Compute the utilisation of the GPU's peak FLOPS; recomputed activations do not count."""
    if not torch.cuda.is_available() or "num_targets" not in figures:
        return {}
    shape, config = read_model_shape(arguments.model), read_config(arguments.model)
    head = config["vocab_size"] * config["hidden_size"]
    tokens, attended = int(figures["num_forwarded_tokens"]), int(figures["num_attended"])
    flops = shape.training_flops(Cost(num_tokens=tokens, num_attended=attended))
    flops -= 6.0 * head * (tokens - figures["num_targets"])
    return {"utilisation": flops / figures["seconds"] / (arguments.peak_tflops * 1e12)}


def read_config(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return found


def _relative_difference(ours: str, theirs: str) -> float:
    a, b = load_file(ours), load_file(theirs)
    assert a.keys() == b.keys()
    squares = [((a[n] - b[n]).double().square().sum(), b[n].double().square().sum()) for n in a]
    return float(sum(s for s, _ in squares) ** 0.5 / sum(s for _, s in squares) ** 0.5)


def _show(best: dict[str, Figures], difference: float, *, as_json: bool) -> None:
    ours, padded = best["ours"], best["padded"]
    faster = padded["seconds"] / ours["seconds"]
    smaller = padded["peak_bytes"] / ours["peak_bytes"]
    if as_json:
        ratios = {"faster": faster, "smaller": smaller, "gradient_difference": difference}
        print(json.dumps(best | ratios))
        return
    print(f"{ours['num_step_tokens']:,.0f} tokens in steps", end=", ")
    print(f"{ours['num_forwarded_tokens']:,.0f} after merging\n")
    print(f"{'':8}{'seconds':>10}{'CPU s':>10}{'step tokens/s':>16}{'peak MiB':>22}")
    for side, found in best.items():
        per_s, peak = found["num_step_tokens"] / found["seconds"], found["peak_bytes"] / 2**20
        seconds, cpu_seconds = found["seconds"], found["cpu_seconds"]
        print(f"{side:8}{seconds:10.1f}{cpu_seconds:10.1f}{per_s:16.1f}{peak:22.0f}")
    cpu = padded["cpu_seconds"] / ours["cpu_seconds"]
    limit = padded["num_forwarded_tokens"] / ours["num_forwarded_tokens"]
    print(f"{'ratio':8}{faster:9.1f}x{cpu:9.1f}x{'':16}{smaller:21.1f}x")
    print(f"{'limit':8}{limit:9.1f}x{limit:9.1f}x   (ratio of forwarded tokens, with padding)")
    print(f"relative difference of the gradients: {difference:.1e}")
    if "utilisation" in ours:
        print(f"ours uses {ours['utilisation']:.1%} of the GPU's peak arithmetic")


def _show_long(figures: Figures, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    tokens, targets = figures["num_forwarded_tokens"], figures["num_targets"]
    print(f"one micro-batch of {tokens:,.0f} tokens, {targets:,.0f} of them predicted")
    print(f"{figures['seconds']:.0f} s, {tokens / figures['seconds']:.0f} tokens/s", end=", ")
    print(f"peak {figures['peak_bytes'] / 1e9:.1f} GB above weights and gradients")


if __name__ == "__main__":
    main()
