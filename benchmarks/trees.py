"""Compare one training step in each layout: tokens, seconds, memory, gradient.

    python -m benchmarks.trees [--groups shop-11] [--calls FILE --rewards FILE] [--json]
    python -m benchmarks.trees --turns 32 --context 32768 --trajectories 8 --dtype bfloat16 --tokens 65536
    python -m benchmarks.trees --turns 32 --context 32768 --tokens 65536 --packing

Model, steps, advantages (alternating 1 and -1), loss (clipped, mean over trained tokens) and tokens
per micro-batch are the same, so the gradients must agree. Rows of `step` and `merge` are packed
without padding. Layouts alternate; the output is the median of the rounds, for wall time and CPU
time. Forests are built again in every round and timed separately. `--turns` generates rollouts
instead of reading logs; each prompt omits the agent's earlier thinking. On a GPU, the utilisation
of its peak arithmetic (see `--peak-tflops`) and the mean log-probability of each layout are printed
too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import polars as pl
import torch
from accelerate import Accelerator

from benchmarks import training
from rollout_io.cli.main import run as rollouts_command
from trainer.batch import Batch, cut_batch, to_batch
from trainer.batches.forest import MiniBatch
from trainer.config.train_config import TrainConfig, load_config
from trainer.loss import policy_logprobs
from trainer.models.layers import recompute_layers
from trainer.models.policy import Policy, load_policy
from trainer.run.run import START, Run
from trainer.update import make_update

SIDES: dict[str, dict[str, Any]] = {
    "step": {"sequence_layout": "step"},
    "merge": {"sequence_layout": "merge"},
    "tree_per_trajectory": {"sequence_layout": "tree", "tree_scope": "trajectory"},
    "tree_per_group": {"sequence_layout": "tree", "tree_scope": "group"},
}
Figures = dict[str, float]


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        batches = _made_up(arguments) if arguments.turns else _recorded(arguments, f"{folder}/ds")
    if arguments.packing and batches["step"]:
        _show_packing(batches["step"], arguments)
        return
    if batches["merge"] is None:
        del SIDES["merge"]
    policy = load_policy(arguments.model, logprob_chunk_tokens=1024, trees=True)
    accelerator = Accelerator(mixed_precision="bf16" if arguments.dtype == "bfloat16" else "no")
    policy.to(accelerator.device)
    if arguments.dtype == "bfloat16":
        policy = accelerator.prepare_model(policy)
    if arguments.layers:
        del policy.model.base_model.layers[arguments.layers :]
    if arguments.dtype == "bfloat16" or arguments.recompute:
        recompute_layers(policy.model)
    rounds: dict[str, list[Figures]] = {name: [] for name in SIDES}
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(arguments.rounds):
        for name, found in rounds.items():
            batch = batches["merge" if name == "merge" else "step"]
            found.append(one_step(policy, accelerator, batch, name, arguments))
            grads = [p.grad.flatten().cpu() for p in policy.parameters() if p.grad is not None]
            gradients[name] = torch.cat(grads)
    figures = {
        name: {key: statistics.median(f[key] for f in found) for key in found[0]}
        for name, found in rounds.items()
    }
    for name, gradient in gradients.items():
        difference = (gradient - gradients["step"]).norm() / gradients["step"].norm()
        figures[name]["gradient_difference"] = float(difference)
    _show(figures, as_json=arguments.json)
    if arguments.dtype == "float32":
        assert max(f["gradient_difference"] for f in figures.values()) < 1e-4


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--calls", default=training.LOGS[0])
    parser.add_argument("--rewards", default=training.LOGS[2])
    parser.add_argument("--groups", nargs="+", default=["shop-11"])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per micro-batch")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--layers", type=int, help="number of layers to keep, from the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, help="generate rollouts with this many turns each")
    parser.add_argument("--packing", action="store_true", help="only build forests; run no model")
    parser.add_argument("--context", type=int, default=32_768, help="tokens of the last prompt")
    parser.add_argument("--trajectories", type=int, default=8, help="trajectories to generate")
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="peak TFLOP/s of the GPU; H100: 989"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _config(arguments: argparse.Namespace, dataset: str, **settings: Any) -> TrainConfig:
    options = {
        "data.dataset": dataset,
        "data.failed": "trajectory",
        "model.path": arguments.model,
        "model.dtype": arguments.dtype,
        "run.out": "-",
        "run.record_tokens": "none",
        "batch.tokens_per_micro_batch": arguments.tokens,
        "optimizer.max_grad_norm": 1e30,
    }
    options |= {f"batch.{key}": value for key, value in settings.items()}
    return load_config(None, ["loss.tis_ratio_type=none"], options)


def _recorded(arguments: argparse.Namespace, dataset: str) -> dict[str, Batch | None]:
    logs = (arguments.calls, "--rewards", arguments.rewards, "--format", "calls")
    assert rollouts_command(["convert", *logs, "--out", dataset]) == 0
    config = _config(arguments, dataset)
    names = "step", "merge"
    return {name: _alternating(training._batch(config, arguments.groups, name)) for name in names}


def _alternating(batch: Batch) -> Batch:
    """Set advantages to 1 and -1 in turn, because equal rewards would give no gradient."""
    row = np.repeat(np.arange(len(batch.names)), batch.responses.lengths)
    advantages = torch.from_numpy(1.0 - 2.0 * (batch.trajectory[row] % 2)).float()
    return dataclasses.replace(batch, advantages=advantages)


def _made_up(arguments: argparse.Namespace) -> dict[str, Batch | None]:
    """Generate one group of random trajectories, as batches by layout.

    Each prompt keeps a fifth of the previous response, without its reasoning, and adds tool output.
    """
    rng = np.random.default_rng(0)
    per_turn = arguments.context // (arguments.turns + 1)
    vocab_size = training.read_config(arguments.model)["vocab_size"]

    def tokens(number: int) -> list[int]:
        found: list[int] = rng.integers(0, vocab_size, number).tolist()
        return found

    rows, start = [], tokens(per_turn)
    for trajectory in range(arguments.trajectories):
        prompt = start
        for _ in range(arguments.turns):
            thinking, answer = tokens(per_turn * 2 // 5), tokens(per_turn // 10)
            rows.append((trajectory, prompt, thinking + answer))
            prompt = prompt + answer + tokens(per_turn - per_turn // 10)
    table = pl.DataFrame(
        {
            "name": [f"row {number}" for number in range(len(rows))],
            "instance_id": ["made up"] * len(rows),
            "trajectory_id": [f"made up_{trajectory}" for trajectory, _, _ in rows],
            "prompt_token_ids": pl.Series([p for _, p, _ in rows], dtype=pl.List(pl.Int32)),
            "response_ids": pl.Series([r for _, _, r in rows], dtype=pl.List(pl.Int32)),
            "loss_mask": [[True] * len(r) for _, _, r in rows],
            "rollout_logprobs": pl.Series([None] * len(rows), dtype=pl.List(pl.Float32)),
            "temperature": pl.Series([None] * len(rows), dtype=pl.Float32),
            "reward": [0.0] * len(rows),
            "trains": [True] * len(rows),
            "advantage": [0.0] * len(rows),
            "mini_batch": [0] * len(rows),
        }
    )
    return {
        "step": _alternating(to_batch(table)),
        "merge": None,
    }  # no step continues all of the previous one, so there is nothing to merge


def one_step(
    policy: Policy, accelerator: Accelerator, batch: Batch | None, side: str, arguments: Any
) -> Figures:
    """Measure the seconds, memory and tokens of one step, and leave its gradient in the policy."""
    assert batch is not None
    config = _config(arguments, "-", **SIDES[side])
    learner = Run(
        accelerator=accelerator,
        policy=policy,
        optimizer=training._Kept(policy.parameters(), lr=1.0),
        config=config,
        corrects_for_sampler=False,
    )
    mini_batch, packing = _packed(batch, config)
    ready = training.update_of(batch, mini_batch.forests)
    step = lambda: make_update(learner, ready, START)  # noqa: E731
    figures = training._measured(policy, step, num_warm=int(torch.cuda.is_available()))
    figures |= training._sizes(mini_batch.forests)
    figures |= {
        "packing_seconds": packing,
        "repeated_share": mini_batch.metrics.get("repeated_share", 0.0),
    }
    num_tokens = batch.prompts.lengths.sum() + batch.responses.lengths.sum()
    figures["packed_tokens_per_s"] = float(num_tokens) / packing
    if torch.cuda.is_available():
        figures["logprob"] = float(policy_logprobs(learner, batch, mini_batch.forests).nanmean())
    return figures | training._utilisation(figures, arguments)


def _packed(batch: Batch, config: TrainConfig) -> tuple[MiniBatch, float]:
    """Build the only mini-batch of a batch five times; return it, and the shortest time."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        (mini_batch,) = cut_batch(batch, config.batch)
        seconds.append(time.perf_counter() - start)
    return mini_batch, min(seconds)


def _show_packing(batch: Batch, arguments: argparse.Namespace) -> None:
    mini_batch, seconds = _packed(batch, _config(arguments, "-", **SIDES["tree_per_group"]))
    num_tokens = int(batch.prompts.lengths.sum() + batch.responses.lengths.sum())
    print(
        f"{num_tokens:,} tokens in steps, {sum(forest.num_tokens for forest in mini_batch.forests):,} in forests",
        end=", ",
    )
    print(f"built in {seconds * 1e3:.1f} ms: {num_tokens / seconds / 1e6:.0f} M tokens/s")


def _show(figures: dict[str, Figures], *, as_json: bool) -> None:
    steps, best = figures["step"], figures["tree_per_group"]
    if as_json:
        print(json.dumps(figures))
        return
    header = ["", "tokens", "forwards", "seconds", "CPU s", "peak MiB", "packing", "gradient"]
    print("".join(text.rjust(12) if text else " " * 20 for text in header))
    for name, f in figures.items():
        numbers = [
            f"{f['num_forwarded_tokens']:,.0f}", f"{f['num_micro_batches']:.0f}",
            f"{f['seconds']:.1f}", f"{f['cpu_seconds']:.1f}", f"{f['peak_bytes'] / 2**20:,.0f}",
            f"{f['packing_seconds'] / f['seconds']:.3%}", f"{f['gradient_difference']:.1e}",
        ]  # fmt: skip
        print(f"{name:20}{''.join(number.rjust(12) for number in numbers)}")
        if "utilisation" in f:
            print(
                f"{'':20}{f['utilisation']:.1%} of the GPU's peak; mean log-probability {f['logprob']:.5f}"
            )
    for name in ("step", "merge"):
        if name in figures:
            seconds, cpu, tokens = (
                figures[name][key] / best[key]
                for key in ("seconds", "cpu_seconds", "num_forwarded_tokens")
            )
            print(
                f"tree_per_group over {name}: {seconds:.2f}x ({cpu:.2f}x CPU); "
                f"limit {tokens:.2f}x (ratio of forwarded tokens)"
            )
    per_s = best["packed_tokens_per_s"] / 1e6
    print(
        f"forests are built at {per_s:.0f} M tokens/s; {best['repeated_share']:.1%} of tokens are repeated"
    )
    if not torch.cuda.is_available():
        print("no GPU: speed, memory and utilisation of FlexAttention were not measured")
    assert steps["num_targets"] == best["num_targets"]


if __name__ == "__main__":
    main()
