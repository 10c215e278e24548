"""Compare the generator's tokens per second on vLLM with a bare load loop on the same server.

    python -m benchmarks.generation [--model DIR] [--python .venv-vllm/bin/python] [--rounds 3]

Both send the same prompts with the same concurrency, sample the same number of tokens per call
(`ignore_eos`), and request ids and log-probabilities. The loop posts JSON and reads the number of
tokens; the generator runs environments of `--turns` turns, checks every answer, and writes the
dataset. The two alternate, after a warm-up round that fills the prefix cache for both. The output is
the median of each and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from pipelines.generation.config import GenerateConfig
from pipelines.generation.processes import VllmServer
from pipelines.generation.run import generate
from rollout_io.dataset.reader import read
from trainer.engine import open_engine


class Patient:
    """An environment that never ends a trajectory."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        del env_config, extras

    def init(self, prompt: Any) -> Any:
        """Return the prompt unchanged."""
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Ask another question."""
        said = [{"role": "user", "content": f"And {len(action)}?"}]
        return {"observations": said, "reward": 0.0, "done": False}


def main() -> None:
    arguments = _arguments()
    variables = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    given = ["--max-model-len", "4096", "--dtype", "bfloat16", "--enforce-eager"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with VllmServer(
            arguments.model,
            python=arguments.python,
            log=log,
            arguments=given,
            environment=variables,
        ) as server:
            compare(server.url, Path(folder), arguments)


def compare(url: str, folder: Path, arguments: argparse.Namespace) -> None:
    prompts: list[list[int]] = []
    ours, bare = [], []
    for number in range(arguments.rounds + 1):
        speed, prompts = generated(url, folder / str(number), arguments)
        ours.append(speed)
        bare.append(asyncio.run(bare_loop(url, prompts, arguments)))
        print(f"round {number}: generator {speed:.0f} tokens/s, bare loop {bare[-1]:.0f}")
    a, b = statistics.median(ours[1:]), statistics.median(bare[1:])
    print(f"generator {a:.0f} tokens/s, bare loop {b:.0f}: {a / b:.1%}")


def generated(
    url: str, folder: Path, arguments: argparse.Namespace
) -> tuple[float, list[list[int]]]:
    """Run the generator; return its tokens per second, and the prompts that it sent."""
    folder.mkdir()
    lines = [json.dumps({"prompt": f"Tell me about {i}."}) for i in range(arguments.tasks)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    config = GenerateConfig(
        tasks=str(folder / "tasks.jsonl"),
        model=arguments.model,
        out=str(folder / "ds"),
        engine="vllm",
        urls=(url,),
        environment="benchmarks.generation:Patient",
        max_turns=arguments.turns,
        max_response_tokens=arguments.tokens,
        sampling_extra={"ignore_eos": True},
        max_concurrency=arguments.concurrency,
    )
    result = asyncio.run(generate(config, open_engine))
    prompts = read(config.out, ["prompt_token_ids"]).column(0).to_pylist()
    return result.num_response_tokens / result.duration_s, prompts


async def bare_loop(url: str, prompts: list[list[int]], arguments: argparse.Namespace) -> float:
    gate, counts = asyncio.Semaphore(arguments.concurrency), []

    async def ask(client: httpx2.AsyncClient, prompt: list[int]) -> None:
        body = {
            "model": arguments.model,
            "prompt": prompt,
            "max_tokens": arguments.tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "temperature": 1.0,
        }
        async with gate:
            answer = await client.post(f"{url}/v1/completions", json=body)
        counts.append(answer.json()["usage"]["completion_tokens"])

    began = time.monotonic()
    async with httpx2.AsyncClient(timeout=600) as client:
        await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
    return sum(counts) / (time.monotonic() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    for name, value in (
        ("rounds", 3),
        ("tasks", 32),
        ("turns", 2),
        ("tokens", 64),
        ("concurrency", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
