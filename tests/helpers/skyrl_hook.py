"""A training step of SkyRL whose rollouts are kept: run by test_framework_hooks.py, where SkyRL is.

    python tests/helpers/skyrl_hook.py MODEL OUT

Writes to OUT/ the dataset of the generator, `ds/`, and the dataset of the dumped batch, `dumped/`; and
a JSON object to stdout: the loss of SkyRL's policy on the batch, and whether the step moved the weights.
"""

import asyncio
import json
import pickle
import sys
from pathlib import Path

from tests.helpers.skyrl_peer import TOKENIZER, Client, MagicMock, RayPPOTrainer, SkyRLTrainConfig

# isort: split
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register
from transformers import AutoModelForCausalLM

from rollout_io.hooks.appender import RolloutAppender
from rollout_io.hooks.skyrl import RecordedGenerator, output_of
from schemas.metadata import DatasetMetadata
from tests.helpers.generation_helpers import config_of
from trainer.engine.embedded import TransformersEngine

TASKS, SAMPLES, TEMPERATURE = ("add-3-4", "add-5-6"), 3, 0.8
SAMPLING = {
    "temperature": TEMPERATURE,
    "top_p": 1.0,
    "top_k": -1,
    "max_generate_length": 6,
    "logprobs": 1,
}


class Spread(BaseTextEnv):
    """One or two turns; rewards differ within a group."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        del env_config
        self.number, self.turn = extras["number"], 0

    def step(self, action):
        del action
        self.turn += 1
        ask = [{"role": "user", "content": "And then?"}]
        done = self.turn > self.number % 2
        reward = float(self.number**3) if done else 0.0
        return BaseTextEnvStepOutput(
            observations=[] if done else ask, reward=reward, done=done, metadata={}
        )


def config():
    made = SkyRLTrainConfig()
    made.generator.n_samples_per_prompt = SAMPLES
    made.generator.max_turns = 2
    made.generator.sampling_params.max_generate_length = 6
    made.generator.sampling_params.logprobs = 1
    made.trainer.train_batch_size = made.trainer.policy_mini_batch_size = len(TASKS)
    made.trainer.resume_mode = "none"
    made.trainer.algorithm.use_kl_loss = False
    made.trainer.algorithm.grpo_norm_by_std = False
    made.trainer.algorithm.loss_reduction = "token_mean"
    made.generator.inference_engine.enable_ray_prometheus_stats = False
    return made


def trainer_of(cfg, generator):
    made = RayPPOTrainer(
        cfg=cfg,
        tracker=None,
        tokenizer=TOKENIZER.backend,
        train_dataset=MagicMock(__len__=lambda _: len(TASKS)),  # only its length is read
        eval_dataset=None,
        inference_engine_client=None,
        generator=generator,
    )
    made.dispatch = MagicMock()  # its workers need GPUs
    made.dispatch.get_lcm_dp_size.return_value = 4  # so that the batch is padded
    return made


def asked(phase):
    ids = [TrajectoryID(task, i) for task in TASKS for i in range(SAMPLES)]
    n = len(ids)
    prompt = [{"role": "user", "content": "3 + 4?"}]
    return {
        "prompts": [prompt] * n,
        "env_classes": ["spread"] * n,
        "env_extras": [{"number": i} for i in range(n)],
        "sampling_params": dict(SAMPLING),
        "trajectory_ids": ids,
        "batch_metadata": BatchMetadata(global_step=1, training_phase=phase),
    }


def logprobs_of(model, batch):
    """[rows, response] log-probabilities of the tokens of the batch."""
    mask = batch["attention_mask"]
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
    logits = model(batch["sequences"], attention_mask=mask, position_ids=positions).logits
    chances = (logits[:, :-1].float() / TEMPERATURE).log_softmax(-1)
    ids = batch["sequences"][:, 1:, None]
    return chances.gather(-1, ids)[..., 0][:, -batch["response_mask"].shape[1] :]


async def generated(model, cfg, out):
    engine = TransformersEngine.load(model)
    async with engine:
        client = Client(engine, config_of(environment=None))
        own = SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, client, TOKENIZER.backend)
        metadata = DatasetMetadata(logprobs_mode="processed")
        recorded = RecordedGenerator(own, out / "ds", metadata)
        assert recorded.max_turns == own.max_turns
        trainer = trainer_of(cfg, recorded)
        await recorded.generate(asked("eval"))
        assert recorded.appender.num_rows == 0
        output = await trainer.generate(asked("train"))
        assert recorded.appender.num_rows == len(TASKS) * SAMPLES
    return trainer, output


def main():
    model, out = sys.argv[1], Path(sys.argv[2])
    register(id="spread", entry_point=Spread)
    cfg = config()
    trainer, output = asyncio.run(generated(model, cfg, out))
    uids = [task for task in TASKS for _ in range(SAMPLES)]
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    cfg.trainer.export_path = str(out)
    batch["values"] = None  # no critic
    batch = trainer.compute_advantages_and_returns(batch)
    trainer.dump_data(batch, file_name="global_step_1_training_input")
    bounds = batch.metadata["policy_mini_batch_boundaries"]
    batch = trainer._normalize_advantages(batch, bounds)

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    before = policy.lm_head.weight.detach().clone()
    now = logprobs_of(policy, batch)
    loss, _ = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)(
        now, now.detach(), batch["advantages"], cfg.trainer.algorithm, batch["loss_mask"]
    )
    loss.backward()
    optimizer.step()
    has_moved = not torch.equal(before, policy.lm_head.weight)

    appender = RolloutAppender(out / "dumped", DatasetMetadata(logprobs_mode="processed"))
    with (out / "dumped_data" / "global_step_1_training_input.pkl").open("rb") as file:
        dumped = output_of(pickle.load(file))  # noqa: S301
    rows = len(dumped["response_ids"])
    appender.append(dumped | {"temperature": [TEMPERATURE] * rows, "policy_version": [0] * rows})
    assert appender.num_rows == len(TASKS) * SAMPLES, appender.num_refused
    sys.stdout.write(json.dumps({"loss": float(loss), "has_moved": has_moved}) + "\n")


if __name__ == "__main__":
    main()
