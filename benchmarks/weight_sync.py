"""Measure the seconds from the end of an update to the first token of the new policy.

    python -m benchmarks.weight_sync [--model DIR] [--python .venv-vllm/bin/python] [--rounds 5]

A LoRA policy is sent to the same vLLM server as a whole model in files, as a whole model by transfer,
and as an adapter, in turn. Each round changes the adapter, writes it, loads it, and samples one token. The
output is the median of each part and the ratio of the sums. The transfer needs a second GPU for the
server, and vLLM in this environment; otherwise it is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path

import torch

from pipelines.generation.engines.base import Sampling
from pipelines.generation.engines.vllm import VllmEngine
from pipelines.generation.processes import VllmServer
from trainer.config.sections import ModelConfig
from trainer.engine.nccl_sender import open_nccl_sender
from trainer.models.lora import add_adapter, save_adapter
from trainer.models.policy import Policy, load_policy
from trainer.run.checkpoint import write_model

Times = dict[str, float]
TRANSFER = ["--weight-transfer-config", '{"backend": "nccl"}']
ON_SECOND_GPU = {"CUDA_VISIBLE_DEVICES": "1"}  # NCCL refuses two processes on one GPU


def can_transfer() -> bool:
    """True if weights can be transferred from here to a server on a second GPU."""
    return torch.cuda.device_count() > 1 and importlib.util.find_spec("vllm") is not None


def main() -> None:
    arguments = _arguments()
    policy = load_policy(arguments.model, logprob_chunk_tokens=256)
    settings = ModelConfig(
        path=arguments.model, lora_rank=arguments.rank, lora_alpha=arguments.rank
    )
    add_adapter(policy, settings)
    given = ["--max-model-len", "2048", "--dtype", "float32", "--enforce-eager", "--enable-lora"]
    given += ["--max-loras", "2", "--max-lora-rank", str(arguments.rank)]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if can_transfer():
        given, variables = [*given, *TRANSFER], variables | ON_SECOND_GPU
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with VllmServer(
            arguments.model,
            python=arguments.python,
            log=log,
            arguments=given,
            environment=variables,
        ) as server:
            asyncio.run(compare(server.url, policy, Path(folder), arguments))


async def compare(url: str, policy: Policy, folder: Path, arguments: argparse.Namespace) -> None:
    senders = {"nccl": open_nccl_sender}
    async with VllmEngine(url) as by_files, VllmEngine(url, senders=senders) as by_transfer:
        ways = {"whole model by files": (by_files, False)}
        if can_transfer():
            ways["whole model by transfer"] = by_transfer, False
        ways["adapter"] = by_files, True
        times: dict[str, list[Times]] = {way: [] for way in ways}
        for number in range(arguments.rounds + 1):
            for way, (engine, as_adapter) in ways.items():
                for name, weight in policy.model.named_parameters():
                    if "lora_B" in name:
                        weight.data += 1e-3
                path, source = folder / f"{number} {way}", Path(arguments.model)
                times[way].append(await timed(engine, policy, path, source, as_adapter=as_adapter))
    totals = {}
    for way, all_rounds in times.items():
        rounds = all_rounds[1:]  # the first one warms up
        parts = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        totals[way] = statistics.median(sum(one.values()) for one in rounds)
        shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
        print(f"{way}: {totals[way]:.2f} s ({shown})")
    for way in list(totals)[:-1]:
        print(f"{way} / adapter: {totals[way] / totals['adapter']:.1f}x")


async def timed(
    engine: VllmEngine, policy: Policy, path: Path, source: Path, *, as_adapter: bool
) -> Times:
    """Time three stages: write the policy's weights, load them, and sample a token with them."""
    marks = [time.perf_counter()]
    if as_adapter:
        save_adapter(policy.model, path, policy.model.state_dict())
    else:
        write_model(path, policy.model, source)
    marks.append(time.perf_counter())
    await engine.load_weights(str(path), policy_version=engine.policy_version + 1)
    marks.append(time.perf_counter())
    await engine.sample([1, 2, 3], Sampling(max_tokens=1))
    marks.append(time.perf_counter())
    names = ("write", "load", "first token")
    return {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
