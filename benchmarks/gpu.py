"""Measure what matters on one GPU, the most important first, in eight minutes.

    python -m benchmarks.gpu [--part training profile ...] [--json]
    python -m benchmarks.gpu --device cpu --tiny

The model is a Qwen3-0.6B built from its configuration, with random weights and SmolLM2's tokens
(0.5B parameters), unless `--model` names a directory. Every part has a time limit, and every result
is a line that is written at once; what fails is a line with its reason, and the rest runs. On a GPU,
each part has a process of its own.

- `ceilings`: what the card copies and multiplies at best.
- `training`: one optimizer step on the same rows with the same loss: our packed rows (`step`) and our
  trees, with compiled layers and chunks of the head as docs/gpu.md advises, and without; a padded
  Transformers loop (benchmarks/padded.py); TRL's GRPO trainer. Tokens per second count the tokens of
  the rows, even if fewer or more are forwarded. Memory is the peak above weights and gradients. All
  gradients are compared with the first side's. Utilisation is the fraction of the card's peak
  arithmetic that is spent on tokens that an implementation must forward; padding and recomputation
  do not count.
- `profile`: milliseconds of an update by kind of kernel, launches, and the share in which the card
  waits.
- `micro`: an update with other sizes of micro-batches, and without recomputation.
- `rl`: `rollouts rl` with the embedded engine, from sampling to new weights.
- `attention`: each kernel of attention alone, with gradients: candidates for packed rows too.
- `head`: log-probabilities and their gradient, beside TRL's kernel.
- `recompiles`: updates on trees of different shapes, and the number of graphs compiled for them.
- `engine`: the embedded engine's tokens per second.
- `vllm`, only if it is named: a vLLM server on the same card: seconds to write and load new weights
  and to sample the first token with them, and tokens per second of concurrent calls. `--python` names
  the interpreter of an environment with vLLM. With a second card, and vLLM in this environment too,
  the server runs on that card and gets the weights by transfer.

With `--device cpu --tiny`, every part runs with a model of 2 layers. This shows that the script works;
its figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer

from benchmarks import gpu_parts, training, trees
from benchmarks.gpu_setup import (
    Figures,
    Lines,
    Setup,
    attempted,
    card,
    model_directory,
    opened,
    rows_of,
    update_of,
)
from benchmarks.padded import micro_batches, padded_step
from benchmarks.weight_sync import ON_SECOND_GPU, TRANSFER, can_transfer, timed
from pipelines.generation.engines.base import Sampling
from pipelines.generation.engines.vllm import VllmEngine
from pipelines.generation.processes import VllmServer
from schemas.ragged import IntArray
from trainer import rl
from trainer.batch import Batch, cut_batch
from trainer.config.sections import BatchConfig, ModelConfig, RunConfig
from trainer.engine.nccl_sender import open_nccl_sender
from trainer.models.attention import CHAIN_ATTENTION
from trainer.models.varlen import packed_attention

PEAK_TFLOPS = {
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.1,
    "L4": 121.0,
}
"""Peak of dense bfloat16 matrix products, by a part of the card's name.

Source: NVIDIA's data sheets of these cards (figures "with sparsity" halved). If several names
match, the longest counts.
"""
MOST_GRAPHS = 6
"""Two kinds of masks and the head, with and without gradients."""


def main() -> None:
    arguments = _arguments()
    parts = arguments.part
    if len(parts) == 1 or arguments.device == "cpu":
        failed = [name for part in parts for name in run_part(part, arguments)]
    else:  # an error that loses the CUDA context, or a limit, ends one part
        with model_directory(arguments) as model:
            failed = [part for part in parts if not _in_process(part, model)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run_part(part: str, arguments: argparse.Namespace) -> list[str]:
    """Run one part, and write each result at once; return the names of those that failed."""
    about = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "card": card(arguments.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": arguments.model or ("2 layers" if arguments.tiny else "Qwen3-0.6B"),
        "dtype": arguments.dtype,
        "packed_attention": packed_attention(torch.device(arguments.device), arguments.dtype),
    }
    failed = []
    for name, figures in chain([("about", about)], _until_failure(PARTS[part](arguments))):
        if arguments.json:
            print(json.dumps({"part": part, "name": name} | figures), flush=True)
        else:
            numbers = ((k, f"{v:,.4g}" if isinstance(v, float) else v) for k, v in figures.items())
            print(f"{part}: {name}: {'; '.join(f'{k} {v}' for k, v in numbers)}", flush=True)
        if "failed" in figures:
            failed.append(name)
    return failed


def _until_failure(lines: Iterable[tuple[str, Figures]]) -> Lines:
    """Yield the results of a part; what fails between two measurements is its last result."""
    try:
        yield from lines
    except Exception as error:
        traceback.print_exc()
        yield "part", {"failed": f"{type(error).__name__}: {error}"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [part for part in PARTS if part != "vllm"]
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=usual)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers, and few rows")
    parser.add_argument("--model", help="a model directory instead of one built here")
    parser.add_argument(
        "--tokenizer", default=".cache/smollm2", help="tokenizer of the model built here"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--trajectories", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192, help="tokens of the last prompt")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens per micro-batch")
    parser.add_argument("--batches", type=int, default=30, help="batches of `recompiles`")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peak-tflops", type=float, help="peak of a card that is not in the table")
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU: nothing was measured; --device cpu --tiny runs every part on a CPU")
    if arguments.tiny:
        small = {"trajectories": 3, "turns": 3, "context": 96, "tokens": 256, "batches": 6}
        vars(arguments).update({**small, "rounds": 1})
    if arguments.peak_tflops is None:
        arguments.peak_tflops = peak_tflops(card(arguments.device)) or math.nan
    return arguments


def peak_tflops(name: str) -> float | None:
    """Look up a card's peak, or None if it is not in the table.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA H100 PCIe")
        (989.4, 756.0)
        >>> peak_tflops("NVIDIA L40S"), peak_tflops("CPU")
        (362.1, None)
    """
    known = [part for part in PEAK_TFLOPS if f"{part} " in f"{name} ".replace("-", " ")]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def _in_process(part: str, model: str) -> bool:
    """Run a part in a process of its own, for at most its limit; return whether it succeeded."""
    options = ["--model", model, "--part", part]
    command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], *options]
    try:
        return subprocess.run(command, check=False, timeout=LIMIT_S[part]).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{part}: ended after its limit of {LIMIT_S[part]} s", file=sys.stderr, flush=True)
        return False


def measure_training(arguments: argparse.Namespace) -> Lines:
    """Measure one optimizer step of each implementation on the same rows."""
    limit = 1e-3 if arguments.dtype == "float32" else 0.1
    first: list[torch.Tensor] = []
    # Only on a GPU, everything is compiled in seconds.
    for compiles in (True, False) if arguments.device == "cuda" else (False,):
        with opened(arguments, compiles=compiles) as setup:
            batch = rows_of(setup.arguments)
            num_tokens = int((batch.prompts.lengths + batch.responses.lengths).sum())
            if not first:
                yield "rows", {"rows": len(batch.names), "tokens": num_tokens}
            sides = _sides(setup, batch, compiles=compiles)

            def measured(
                side: Callable[[], Figures], setup: Setup = setup, num_tokens: int = num_tokens
            ) -> Figures:
                found = side()
                found["tokens_per_s"] = num_tokens / found["seconds"]
                parts = [p.grad.flatten() for p in setup.policy.parameters() if p.grad is not None]
                gradient = torch.cat(parts)
                first.append(gradient)
                del first[1:]
                difference = float((gradient - first[0]).norm() / first[0].norm())
                found["gradient_difference"] = difference
                if not difference < limit:
                    found["failed"] = f"the gradient differs from the first side's by {difference}"
                return found

            for _ in range(arguments.rounds):
                for name, side in sides.items():
                    yield attempted(name, lambda side=side: measured(side))  # type: ignore[misc]


def _sides(setup: Setup, batch: Batch, *, compiles: bool) -> dict[str, Callable[[], Figures]]:
    if compiles:
        return {
            "packed, compiled layers": lambda: _ours(setup, batch, "step"),
            "tree, compiled layers": lambda: _ours(setup, batch, "tree_per_group"),
        }
    return {
        "packed": lambda: _ours(setup, batch, "step"),
        "tree": lambda: _ours(setup, batch, "tree_per_group"),
        "padded": lambda: _padded(setup, batch),
        "trl": lambda: _trl(setup, batch),
    }


def _ours(setup: Setup, batch: Batch, layout: str) -> Figures:
    setup.policy.model.set_attn_implementation(CHAIN_ATTENTION)
    return trees.one_step(setup.policy, setup.accelerator, batch, layout, setup.arguments)


def _padded(setup: Setup, batch: Batch) -> Figures:
    model = setup.policy.model
    model.set_attn_implementation("sdpa")

    def step() -> None:
        with setup.accelerator.autocast():
            padded_step(model, batch, setup.arguments.tokens)

    return _with_utilisation(setup, batch, step)


def _trl(setup: Setup, batch: Batch) -> Figures:
    """Step with TRL's own loss, micro-batch by micro-batch, on rows padded as TRL pads them."""
    model = setup.policy.model
    model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _grpo_trainer(setup, folder)
        num_trained = int(batch.trains.sum())

        def step() -> None:
            for rows in micro_batches(batch, setup.arguments.tokens):
                inputs = _trl_inputs(batch, rows, setup.accelerator.device)
                with trainer.compute_loss_context_manager():
                    loss = trainer._compute_loss(model, inputs)
                # TRL's loss is the mean over the tokens of the micro-batch.
                share = float(inputs["tool_mask"].sum()) / num_trained
                setup.accelerator.backward(loss * share)

        return _with_utilisation(setup, batch, step)


def _grpo_trainer(setup: Setup, folder: str) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=folder, beta=0.0, loss_type="bnpo", num_generations=2,
        per_device_train_batch_size=2, bf16=setup.arguments.dtype == "bfloat16",
        use_cpu=setup.arguments.device == "cpu", gradient_checkpointing=False, report_to=[],
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(setup.arguments.model)
    return GRPOTrainer(
        setup.policy.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        processing_class=tokenizer,
    )


def _trl_inputs(batch: Batch, rows: IntArray, device: torch.device) -> dict[str, torch.Tensor]:
    """Pad prompts on the left and completions on the right, as TRL does after sampling."""
    num_prompt, num_response = (
        int(r.lengths[rows].max()) for r in (batch.prompts, batch.responses)
    )
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    widths = [num_prompt] * 2 + [num_response] * 3
    found = {
        name: torch.zeros(len(rows), width, dtype=torch.int64)
        for name, width in zip(names, widths, strict=True)
    }
    advantages = torch.zeros(len(rows), num_response)
    for number, row in enumerate(rows):
        prompt, response = batch.prompts.row(row), batch.responses.row(row)
        first = batch.responses.offsets[row]
        slots = slice(first, first + len(response))
        found["prompt_ids"][number, num_prompt - len(prompt) :] = torch.tensor(prompt)
        found["prompt_mask"][number, num_prompt - len(prompt) :] = 1
        found["completion_ids"][number, : len(response)] = torch.tensor(response)
        found["completion_mask"][number, : len(response)] = 1
        found["tool_mask"][number, : len(response)] = torch.from_numpy(
            batch.trains[slots].astype(np.int64)
        )
        advantages[number, : len(response)] = batch.advantages[slots]
    return {name: t.to(device) for name, t in (found | {"advantages": advantages}).items()}


def _with_utilisation(setup: Setup, batch: Batch, step: Callable[[], Any]) -> Figures:
    """Measure a step that forwards every row, and count its operations as for packed rows."""
    figures = training._measured(setup.policy, step, num_warm=int(torch.cuda.is_available()))
    config = trees._config(setup.arguments, "-", **trees.SIDES["step"])
    (packed,) = cut_batch(batch, config.batch)
    sizes = training._sizes(packed.forests)
    used = training._utilisation(figures | sizes, setup.arguments)
    return figures | used


def count_recompiles(arguments: argparse.Namespace) -> Figures:
    """Update on trees of different shapes; count the graphs compiled for FlexAttention."""
    rng, sizes = np.random.default_rng(0), set()
    counters = torch._dynamo.utils.counters["stats"]
    before, seconds = int(counters["unique_graphs"]), []
    with opened(arguments, compiles=False) as setup:
        for _ in range(arguments.batches):
            shape = argparse.Namespace(**vars(setup.arguments))
            shape.turns = int(rng.integers(1, arguments.turns + 1))
            shape.trajectories = int(rng.integers(2, arguments.trajectories + 1))
            shape.context = int(
                rng.integers(arguments.context // 8 + 16, arguments.context // 2 + 17)
            )
            batch = rows_of(shape)
            update = update_of(setup, batch, "tree_per_group", arguments.tokens)
            sizes |= {forest.num_tokens for forest in update.mini_batch.forests}
            start = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - start)
    num_graphs = int(counters["unique_graphs"]) - before
    found: Figures = {
        "batches": arguments.batches, "shapes": len(sizes), "graphs": num_graphs,
        "first_update_seconds": seconds[0], "median_update_seconds": statistics.median(seconds),
    }  # fmt: skip
    if num_graphs > MOST_GRAPHS:
        found["failed"] = f"{num_graphs} graphs were compiled, expected at most {MOST_GRAPHS}"
    return found


def measure_vllm(arguments: argparse.Namespace) -> Figures:
    """Transfer weights to a vLLM server on the same card, and sample from it."""
    if not Path(arguments.python).exists():
        return {"not_run": f"no {arguments.python}; --python names an interpreter that has vLLM"}
    given = ["--max-model-len", "2048", "--dtype", arguments.dtype]
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if arguments.device == "cpu":
        given += ["--enforce-eager"]
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }  # fmt: skip
    else:
        given += ["--gpu-memory-utilization", "0.4"]
        if can_transfer():
            given, variables = [*given, *TRANSFER], variables | ON_SECOND_GPU
    with opened(arguments, compiles=False) as setup, tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), setup.arguments.model
        with VllmServer(
            model,
            python=arguments.python,
            log=folder / "server.log",
            arguments=given,
            environment=variables,
        ) as server:
            figures = asyncio.run(_use_server(server.url, setup, folder))
            if arguments.device == "cuda":
                free, total = torch.cuda.mem_get_info()
                figures["card_gib_used"] = (total - free) / 2**30
        return figures


async def _use_server(url: str, setup: Setup, folder: Path) -> Figures:
    arguments = setup.arguments
    num_calls, num_tokens = (4, 8) if arguments.tiny else (256, 256)
    rounds = []
    async with VllmEngine(url, senders={"nccl": open_nccl_sender}) as engine:
        for number in range(arguments.rounds + 1):
            path, source = folder / str(number), Path(arguments.model)
            rounds.append(await timed(engine, setup.policy, path, source, as_adapter=False))
        start = time.perf_counter()
        sampling = Sampling(max_tokens=num_tokens)
        calls = [engine.sample([1, 2, 3, 10 + n], sampling) for n in range(num_calls)]
        sampled = await asyncio.gather(*calls)
        seconds = time.perf_counter() - start
    later = rounds[1:]  # the first one warms up
    parts = {f"{k} seconds": statistics.median(r[k] for r in later) for k in later[0]}
    tokens = sum(len(each.response_ids) for each in sampled)
    way = "transfer" if can_transfer() else "files"
    return {
        "weights by": way,
        **parts,
        "sampled_tokens": tokens,
        "sampled_tokens_per_s": tokens / seconds,
    }


class Length:
    """An environment of one turn; the reward depends on the length of the action."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        del env_config, extras

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        """Keep the prompt."""
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """End the trajectory."""
        return {"observations": [], "reward": len(action) % 7 / 6, "done": True}

    def close(self) -> None:
        """Do nothing."""


def measure_rl(arguments: argparse.Namespace) -> Figures:
    """Run two iterations of the loop with the embedded engine."""
    num_groups, group_size, num_tokens = (2, 3, 6) if arguments.tiny else (16, 8, 128)
    with model_directory(arguments) as model, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = [{"prompt": f"Say {n}.", "instance_id": f"t{n}"} for n in range(num_groups)]
        lines = "".join(json.dumps(task) + "\n" for task in tasks)
        (folder / "tasks.jsonl").write_text(lines, encoding="utf-8")
        config = rl.RlConfig(
            loop=rl.LoopConfig(tasks=str(folder / "tasks.jsonl"), num_iterations=2),
            run=RunConfig(out=str(folder / "run")),
            model=ModelConfig(path=model, dtype=arguments.dtype, gradient_checkpointing=True),
            batch=BatchConfig(
                groups_per_batch=num_groups, groups_per_mini_batch=num_groups,
                tokens_per_micro_batch=arguments.tokens,
            ),
            generate={
                "environment": "benchmarks.gpu:Length", "group_size": group_size,
                "dtype": arguments.dtype,
                "max_response_tokens": num_tokens, "max_concurrency": num_groups * group_size,
            },
        )  # fmt: skip
        start = time.perf_counter()
        result = rl.run(config)
        seconds = time.perf_counter() - start
        text = (folder / "run/metrics.jsonl").read_text(encoding="utf-8")
    updates = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
    assert result.num_updates == len(updates) == 2, "each iteration makes one update"
    last = updates[-1]
    peak = torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else math.nan
    figures = {
        "seconds": seconds,
        "wait_seconds": last["wait_seconds"],
        "update_seconds": last["seconds"],
        "sync_seconds": last["sync_seconds"],
        "rollout_logprobs_abs_diff_mean": last["rollout_logprobs_abs_diff_mean"],
        "peak_gib": peak,
    }
    return {name: value for name, value in figures.items() if not math.isnan(value)}


PARTS: dict[str, Callable[[argparse.Namespace], Iterable[tuple[str, Figures]]]] = {
    "ceilings": gpu_parts.ceilings,
    "training": measure_training,
    "profile": gpu_parts.profile,
    "micro": gpu_parts.micro,
    "rl": lambda arguments: [attempted("iterations", lambda: measure_rl(arguments))],
    "attention": gpu_parts.kernels_of_attention,
    "head": gpu_parts.head,
    "recompiles": lambda arguments: [attempted("updates", lambda: count_recompiles(arguments))],
    "engine": gpu_parts.engine,
    "vllm": lambda arguments: [attempted("server", lambda: measure_vllm(arguments))],
}
LIMIT_S = {
    "ceilings": 20, "training": 150, "profile": 50, "micro": 60, "rl": 70, "attention": 40, "head": 30,
    "recompiles": 35, "engine": 25, "vllm": 900,
}  # fmt: skip
"""Longest time of each part: 8 minutes without `vllm`."""


if __name__ == "__main__":
    main()
