"""Predict the memory of large models and long rows from their configurations, and compare it with a card.

    python -m benchmarks.gpu_sizes [--case NAME ...]           # predictions, without a GPU or weights
    python -m benchmarks.gpu_sizes --train [--case NAME ...]   # one update each, with random weights

A case is a model, how it is trained, and one group of two trajectories: their steps have as many tokens
as the case says. A prediction is that of `rollouts train --dry-run`, for compiled layers that are recomputed;
with `--train`, the peak of torch's memory stands beside it. Every case is a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import step, write_dataset
from trainer import training
from trainer.reports.dry_run import dry_run

SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
LARGE = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
"""Shapes of Qwen3-0.6B and Qwen3-4B."""
LORA = {"lora_rank": 32}
TREE = {"sequence_layout": "tree", "tokens_per_micro_batch": 2**18}
CASES: dict[str, tuple[dict[str, int], dict[str, Any], int]] = {
    "4B in full, rows of 8k": (LARGE, {}, 8192),
    "4B with LoRA, rows of 8k": (LARGE, LORA, 8192),
    "4B with LoRA, rows of 64k": (LARGE, LORA, 65_536),
    "0.6B in full, rows of 64k": (SMALL, {}, 65_536),
    "0.6B in full, trees of 256k": (SMALL, TREE, 163_840),
}
"""Model, settings, and tokens of each of two rows, which begin with the same `SHARED` tokens."""
SHARED, TRAINED = 65_536, 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    if len(arguments.case) == 1:
        print(json.dumps(measured(arguments.case[0], trains=arguments.train)), flush=True)
        return
    for case in arguments.case:
        train = ["--train"] if arguments.train else []
        subprocess.run([sys.executable, "-m", "benchmarks.gpu_sizes", "--case", case, *train])


def measured(case: str, *, trains: bool) -> dict[str, Any]:
    """Return the predicted memory of a case, in GiB, and the measured peak if it `trains`."""
    shape, settings, num_tokens = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        rows = [_row(number, num_tokens) for number in range(2)]
        config = Qwen3Config(
            vocab_size=151_936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
            max_position_embeddings=2**18, **shape,
        )  # fmt: skip
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(path / "model")
        run = train_config(
            dataset=write_dataset(path / "dataset", rows), model=str(path / "model"), out=str(path / "run"),
            dtype="bfloat16", compile_layers=True, gradient_checkpointing=True, record_tokens="none",
            sampling_defaults="neutral", **({"tokens_per_micro_batch": num_tokens} | settings),
        )  # fmt: skip
        memory = dry_run(run).memory
        sizes = dataclasses.asdict(memory) | {"total": memory.total}
        figures: dict[str, Any] = {"case": case} | {
            name: round(size / 2**30, 2) for name, size in sizes.items() if size
        }
        if trains:
            with torch.device("cuda"):
                AutoModelForCausalLM.from_config(config).save_pretrained(path / "model")
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            training.train(run)
            figures["peak"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return figures


def _row(number: int, num_tokens: int) -> dict[str, Any]:
    """A row of `num_tokens` tokens to forward; the last `TRAINED` are trained."""
    tokens = [n % 1000 + (1000 * number if n >= SHARED else 0) for n in range(num_tokens + 1)]
    prompt, response = tokens[:-TRAINED], tokens[-TRAINED:]
    return step("g", number, 0, prompt, response, reward=float(number), is_last_step=True)


if __name__ == "__main__":
    main()
