"""Outputs of SkyRL 0.3.0's generator: `python make.py http://127.0.0.1:8000`.

Run it in a directory that has the model's tokenizer as `./smollm2`, against a vLLM started with
`--served-model-name smollm2 --enable-scale-out`. skyrl-gym 0.4.0 gives the environment.
"""

import asyncio
import json
import sys
import typing
from dataclasses import asdict
from pathlib import Path

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses typing's on Python 3.11

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config.config import GeneratorConfig, SamplingParams, SkyRLGymConfig  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl.train.generators.utils import merge_stepwise_output  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

HERE = Path(__file__).parent
SUMS = [(2, 3), (4, 1)]
ASK = "Give the number after ####, as in #### 7."
SAMPLING = {"temperature": 1.0, "max_tokens": 14, "logprobs": 0}


def inputs():
    rows = [(index, a, b, rep) for index, (a, b) in enumerate(SUMS) for rep in range(2)]
    asked = [[{"role": "user", "content": f"What is {a} + {b}? {ASK}"}] for _, a, b, _ in rows]
    truths = [{"reward_spec": {"ground_truth": str(a + b)}} for _, a, b, _ in rows]
    ids = [TrajectoryID(f"sum-{index}", rep) for index, _, _, rep in rows]
    named = {"prompts": asked, "env_extras": truths, "trajectory_ids": ids}
    return {**named, "env_classes": ["gsm8k_multi_turn"] * len(rows), "sampling_params": SAMPLING}


def save(name, output):
    text = json.dumps(output, default=asdict, separators=(",", ":"))
    (HERE / f"{name}.json").write_text(text)


async def generate(url, step_wise):
    client = RemoteInferenceClient(url, [url], 1, model_name="smollm2")
    sampling = SamplingParams(max_generate_length=14, logprobs=0)
    fields = {"max_turns": 3, "max_input_length": 512, "sampling_params": sampling}
    config = GeneratorConfig(**fields, step_wise_trajectories=step_wise)
    tokenizer = AutoTokenizer.from_pretrained("smollm2")
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(), client, tokenizer)
    return await generator.generate(inputs(), disable_tqdm=True)


def main(url):
    save("whole", asyncio.run(generate(url, step_wise=False)))
    steps = asyncio.run(generate(url, step_wise=True))
    save("stepwise", steps)
    save("expected", merge_stepwise_output(steps))


if __name__ == "__main__":
    main(sys.argv[1])
