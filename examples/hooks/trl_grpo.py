"""Train with TRL's GRPO and keep every rollout: python examples/hooks/trl_grpo.py MODEL DATASET."""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rollout_io.hooks.trl import record
from schemas.metadata import DatasetMetadata

model, dataset = sys.argv[1:]
questions = [f"What is {a} + {b}?" for a in range(8) for b in range(8)]


def short(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    return [-float(len(message["content"])) for (message,) in completions]


trainer = GRPOTrainer(
    model,
    short,
    args=GRPOConfig("runs/trl", use_vllm=True, vllm_mode="colocate", max_steps=10),
    train_dataset=Dataset.from_list(
        [{"prompt": [{"role": "user", "content": q}]} for q in questions]
    ),
)
# TRL's vLLM reports log-probabilities after temperature and truncation.
record(trainer, dataset, DatasetMetadata(logprobs_mode="processed"))
trainer.train()
