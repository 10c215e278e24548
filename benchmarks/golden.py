"""Whether training comes to the same bits as before a change: `make golden`, or BASE=REVISION.

    python -m benchmarks.golden [--base REVISION] [--only NAME ...]

Trains small configurations with this tree and with another revision, through the command alone, and
compares what the runs left: metrics, weights, optimizer and random state, and token records. Times
are left out. Bits depend on the machine and on torch, so both trees run here, one after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 61
NUM_LAYERS, NUM_EXPERTS, TOPK = 2, 8, 2
TIME = re.compile(r"seconds$|_per_s$|_bytes$")
"""Names of metrics that differ from run to run."""
TREE = Path(__file__).parents[1]

CPU = ["batch.tokens_per_micro_batch=64", "batch.groups_per_batch=4", "run.record_tokens=all"]
USUAL = [*CPU, "batch.groups_per_mini_batch=2", "optimizer.learning_rate=1e-3"]
CRITIC = ["advantage.estimator=gae", "model.critic_model={critic}", "advantage.gae_lambda=0.9"]
KL = "loss.reference_model={reference}"
RL = [
    *("generate.environment=golden_functions:Length", "generate.group_size=3", "data.outcome=last"),
    *("generate.max_concurrency=1", "generate.seed=0"),
    *("generate.max_response_tokens=6", "batch.groups_per_batch=2", "loop.num_iterations=2"),
    *("batch.groups_per_mini_batch=1", "optimizer.learning_rate=1e-3", "loop.tasks={tasks}"),
]
RUNS: dict[str, list[str]] = {
    "ppo": ["batch.epochs_per_batch=2"],
    "ppo, step by step": ["batch.sequence_layout=step", "loss.reduction=sequence_mean"],
    "dual clip, trees": ["batch.sequence_layout=tree", "loss.policy_loss_type=dual_clip"],
    "gspo, rloo": ["loss.policy_loss_type=gspo", "advantage.estimator=rloo"],
    "cispo, maxrl": ["loss.policy_loss_type=cispo", "advantage.estimator=maxrl"],
    "sapo, reinforce++": ["loss.policy_loss_type=sapo", "advantage.estimator=reinforce++"],
    "clip_cov": ["loss.policy_loss_type=clip_cov", "loss.clip_cov_lb=-1"],
    "dppo": ["loss.policy_loss_type=dppo", "loss.reduction=trajectory_mean"],
    "cross entropy": ["loss.policy_loss_type=cross_entropy", "loss.reduction=prompt_mean"],
    "kl in the loss": [KL, "loss.kl_loss_coef=0.1", "loss.entropy_loss_coef=0.01"],
    "kl in the reward": [KL, "loss.kl_reward_coef=0.1", "loss.kl_ctrl_type=adaptive"],
    "critic": [*CRITIC, "advantage.gamma=0.99", "batch.epochs_per_batch=2"],
    "corrected": ["loss.tis_ratio_type=sequence", "loss.sequence_mask_metric=geometric"],
    "lora": ["model.lora_rank=2", KL, "loss.kl_loss_coef=0.1"],
    "sets": ["data.dataset={sets}"],
    "routing": ["data.dataset={routed}", "model.path={experts}"],
    "distill": ["data.dataset={taught}", "loss.policy_loss_type=distill"],
    "own functions": [
        *("loss.policy_loss_type=golden_functions:loss", "loss.own.scale=0.5"),
        *("advantage.estimator=golden_functions:centred", "loss.reduction=golden_functions:mean"),
    ],
    "two processes": ["--two", "batch.sequence_layout=tree", KL, "loss.kl_loss_coef=0.1"],
    "two processes, critic": ["--two", *CRITIC],
    "sharded": ["--sharded", "batch.epochs_per_batch=2"],
    "resumed": ["--resumed", "batch.epochs_per_batch=2", *CRITIC],
    "rl": ["--rl", *RL],
}
"""Settings of each run, beside `USUAL`; with them options of the command, and how it is run."""

FUNCTIONS = """
import numpy as np


class Length:
    def __init__(self, env_config, extras):
        pass

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        return {"observations": [], "reward": len(action) % 7 / 6, "done": True}


def loss(logprobs, old_logprobs, advantages, scale):
    return -scale * advantages * (logprobs - old_logprobs).exp()


def centred(returns, group_index):
    means = np.bincount(group_index, returns) / np.bincount(group_index)
    return returns - means[group_index]


def mean(num_targets):
    return np.full(num_targets, 1 / num_targets)
"""

SHARDED = """
import sys
import accelerate
from rollout_io.cli.main import run
from tests.helpers.process_server import shard

accelerate.Accelerator.prepare = shard
sys.exit(run(sys.argv[1:]))
"""
"""Accelerate's FSDP2, which it does not do on a CPU, as the tests have it."""


def make_inputs(folder: Path) -> dict[str, str]:
    """Write models, datasets, tasks and own functions; return their paths by name."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 256, "initializer_range": 0.2}
    sizes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    experts: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOPK,
        "head_dim": 8,
    }
    experts |= {"moe_intermediate_size": 16}
    _save(LlamaForCausalLM(LlamaConfig(**sizes)), folder / "model", 0)
    _save(LlamaForCausalLM(LlamaConfig(**sizes)), folder / "reference", 1)
    _save(LlamaForCausalLM(LlamaConfig(**sizes)), folder / "critic", 2)
    _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)), folder / "experts", 3)
    spoken = sizes | {"vocab_size": 49152, "hidden_size": 16, "tie_word_embeddings": True}
    _save(LlamaForCausalLM(LlamaConfig(**spoken)), folder / "speaker", 4)
    AutoTokenizer.from_pretrained(TREE / ".cache/smollm2").save_pretrained(folder / "speaker")
    tasks = [{"prompt": f"Say {n}.", "instance_id": f"t{n}"} for n in range(4)]
    lines = "".join(json.dumps(task) + "\n" for task in tasks)
    (folder / "tasks.jsonl").write_text(lines, encoding="utf-8")
    loop = [f"[model]\npath = {str(folder / 'speaker')!r}\n", '[run]\nrecord_tokens = "all"\n']
    (folder / "loop.toml").write_text("".join(loop), encoding="utf-8")
    (folder / "golden_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    (folder / "sharded.py").write_text(SHARDED, encoding="utf-8")
    for name in ("rows", "sets", "taught", "routed"):
        (folder / name).mkdir()
        _write_rows(folder / name, name)
    names = ("model", "reference", "critic", "experts", "rows", "sets", "taught", "routed")
    files = {"tasks": "tasks.jsonl", "loop": "loop.toml"}
    return {name: str(folder / path) for name, path in ({n: n for n in names} | files).items()}


def _save(model: PreTrainedModel, path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)


def _write_rows(folder: Path, kind: str) -> None:
    """Write 8 groups of 4 trajectories of 2 steps, the second of which continues the first."""
    import rollout_io
    from schemas.columns import arrow_schema, routing_type

    rng = np.random.default_rng(0)
    rows = [
        row
        for group in range(8)
        for attempt in range(4)
        for row in _trajectory(rng, f"g{group}", attempt, kind)
    ]
    schema = arrow_schema(
        tuple({name for row in rows for name in row} - {"rollout_expert_indices"})
    )
    if kind == "routed":
        schema = schema.append(pa.field("rollout_expert_indices", routing_type(NUM_LAYERS, TOPK)))
    with rollout_io.RolloutWriter(folder) as writer:
        writer.write(pa.Table.from_pylist(rows, schema=schema))


def _trajectory(
    rng: np.random.Generator, group: str, attempt: int, kind: str
) -> Iterator[dict[str, Any]]:
    shared = np.random.default_rng(int(group[1:])).integers(0, VOCAB, 6).tolist()
    prompt = shared
    for step in range(2):
        response = rng.integers(0, VOCAB, int(rng.integers(2, 9))).tolist()
        row = {
            "instance_id": group,
            "repetition_id": attempt,
            "trajectory_id": f"{group}_{attempt}",
            "step_index": step,
            "is_last_step": step == 1,
            "prompt_token_ids": prompt,
            "response_ids": response,
            "loss_mask": [bool(rng.random() < 0.9) for _ in response],
            "rollout_logprobs": rng.normal(-4.0, 0.3, len(response)).tolist(),
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "token_source": "engine",
            "reward": float(rng.integers(0, 3)) if step else 0.0,
        }
        others = [sorted({*rng.integers(0, VOCAB, 5).tolist(), token}) for token in response]
        if kind == "sets":
            row |= {"sampling_support": others, "top_k": 6}
        if kind == "taught":
            row |= {"teacher_token_ids": others}
            row |= {"teacher_logprobs": [[-float(np.log(8))] * len(ids) for ids in others]}
        if kind == "routed":
            num = len(prompt) + len(response)
            chosen = [
                [rng.permutation(NUM_EXPERTS)[:TOPK].tolist() for _ in range(NUM_LAYERS)]
                for _ in range(num)
            ]
            row |= {"rollout_expert_indices": chosen}
        yield row
        prompt = prompt + response + rng.integers(0, VOCAB, 3).tolist()


def run(tree: Path, name: str, inputs: dict[str, str], out: Path) -> dict[str, str]:
    """Make one run with the sources of a tree; return the digest of each thing that it left."""
    settings = [text.format(**inputs) for text in RUNS[name]]
    flags = [text for text in settings if text.startswith("--")]
    options = dict(text.partition("=")[::2] for text in settings if text not in flags)
    if "--rl" in flags:
        command = ["rl", inputs["loop"]]
    else:
        dataset = options.pop("data.dataset", inputs["rows"])
        command = ["train", dataset, "--model", options.pop("model.path", inputs["model"])]
        options = dict(text.partition("=")[::2] for text in USUAL) | options
    command += ["--out", str(out), "--quiet"]
    command += ["--num-processes", "2"] if "--two" in flags else []
    for key, value in options.items():
        command += ["--set", f"{key}={value}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(Path(inputs["tasks"]).parent)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    program = [sys.executable, "-m", "rollout_io"]
    if "--sharded" in flags:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        program = [*launcher, str(Path(inputs["tasks"]).parent / "sharded.py")]
    if "--resumed" in flags:
        _call([*program, *command, "--max-updates", "3"], tree, environment)
        command = ["train", "--resume", str(out), "--quiet", "--set", "batch.max_updates=8"]
    _call([*program, *command], tree, environment)
    digests = dict(_digests(out))
    shutil.rmtree(out)  # the next run is of the same name, which records hold
    return digests


def _call(command: list[str], tree: Path, environment: dict[str, str]) -> None:
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")


def _digests(out: Path) -> Iterator[tuple[str, str]]:
    """Yield the path below a run, and the digest, of everything that must not change."""
    for path in sorted(out.rglob("*")):
        name, content = path.relative_to(out).as_posix(), b""
        name = re.sub(r"-[0-9a-f]{8}\b", "", name)  # the random part of a shard's name
        if path.suffix == ".safetensors" or path.name == "rng.json":
            content = path.read_bytes()
        elif path.name == "metrics.jsonl":
            lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            lasting = [{k: v for k, v in line.items() if not TIME.search(k)} for line in lines]
            content = json.dumps(lasting, sort_keys=True).encode()
        elif path.suffix == ".parquet":
            content = pl.read_parquet(path).write_ipc(None, compression="uncompressed").getvalue()
        if content:
            yield name, hashlib.sha256(content).hexdigest()


def main() -> None:
    """Compare the runs of two trees; exit with 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="HEAD", help="revision to compare with")
    parser.add_argument("--only", nargs="*", choices=RUNS, help="names of runs")
    arguments = parser.parse_args()
    num_different = 0
    with TemporaryDirectory() as temporary:
        folder, base = Path(temporary), Path(temporary) / "base"
        git = ["git", "-C", str(TREE)]
        subprocess.run(
            [*git, "worktree", "add", "--detach", base, arguments.base, "--quiet"], check=True
        )
        try:
            inputs = make_inputs(folder)
            for name in arguments.only or RUNS:
                before, after = (run(tree, name, inputs, folder / "run") for tree in (base, TREE))
                names = sorted(before.keys() | after.keys())
                different = [path for path in names if before.get(path) != after.get(path)]
                num_different += bool(different)
                shown = f"differ in {', '.join(different)}" if different else "equal"
                print(f"{name}: {len(names)} files, {shown}", flush=True)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", base], check=True)
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
