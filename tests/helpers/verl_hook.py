"""A training step of verl whose rollouts are kept: run by test_framework_hooks.py, where verl is.

    python tests/helpers/verl_hook.py MODEL OUT

Writes the dataset OUT/ds, and a JSON object to stdout: the loss of verl's policy on the batch, and
whether the step moved the weights. The agent loop, its worker and the transfer queue are verl's own; its
workers of policies and engines need GPUs, so a model in this process takes their place.
"""

import asyncio
import json
import sys

import numpy as np
import ray
import torch
import transfer_queue
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM
from verl.experimental.agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.agent_loop import register
from verl.protocol import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.trainer.ppo.v1 import AgentLoopWorkerTQ, PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from rollout_io.hooks.verl import recorded

TASKS, SAMPLES, TEMPERATURE = ("add_3_4", "add_5_6"), 3, 0.8


def config_of(model, out):
    settings = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.prompt_length": 64,
        "actor_rollout_ref.rollout.response_length": 16,
        "actor_rollout_ref.rollout.temperature": TEMPERATURE,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.rollout_data_dir": f"{out}/ds",
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"{key}={value}" for key, value in settings.items()])


class Client:
    """Answers like the client of an engine, by sampling from the model."""

    def __init__(self, model):
        self.model = model

    async def generate(self, *, prompt_ids, sampling_params, num_tokens, **_):
        ids, logprobs = list(prompt_ids), []
        for _ in range(num_tokens):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            chances = (logits / sampling_params["temperature"]).log_softmax(-1)
            ids.append(int(torch.multinomial(chances.exp(), 1)))
            logprobs.append(float(chances[ids[-1]]))
        versions = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :],
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields=versions,
        )


@register("two_outputs")
class TwoOutputs(SingleTurnAgentLoop):
    """Two contexts in a session, as of a sub-agent; lengths and rewards differ within a group."""

    async def run(self, sampling_params, **kwargs):
        number, outputs = kwargs["session_id"], []
        generate = self.server_manager.generate
        for size in (4, 4 + 2 * number):
            self.server_manager = Sized(generate, size)
            output = await super().run(sampling_params, **kwargs)
            output.extra_fields["reward_extra_info"] = {}
            outputs.append(output)
        outputs[-1].reward_score = float(number**2)
        return outputs


class Sized:
    def __init__(self, generate, num_tokens):
        self._generate, self._num_tokens = generate, num_tokens

    async def generate(self, **kwargs):
        kwargs.pop("request_id")
        return await self._generate(num_tokens=self._num_tokens, **kwargs)


async def sampled(config, model):
    """The batch that the replay buffer would hand to the trainer."""
    worker_class = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = worker_class(config, Client(model), None, None)
    how = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": -1, "logprobs": True}
    for index, uid in enumerate(TASKS):
        message = {"role": "user", "content": f"{index} + 1?"}
        prompt = {"uid": uid, "raw_prompt": [message], "global_steps": 1, "index": index}
        where = {"step": 1, "sample_index": index, "rollout_n": 0, "validate": False}
        await worker._run_prompt(prompt | {"agent_name": "two_outputs"}, how, where)
    kept = transfer_queue.kv_list(partition_id="train")["train"]
    rows = {key: tag for key, tag in kept.items() if tag["status"] == "success"}
    assert len(rows) == 2 * len(TASKS) * SAMPLES, kept
    # Groups arrive in the order in which they ended.
    keys = sorted(rows, reverse=True)
    return KVBatchMeta(keys=keys, tags=[rows[key] for key in keys], partition_id="train")


def trained(config, model, batch):
    """The loss of the batch in verl's mathematics, after an optimizer step."""
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train")
    rows = list(zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True))
    now = []
    for prompt, response in rows:
        logits = model(torch.cat([prompt, response])[None]).logits[0].float() / TEMPERATURE
        chances = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        now.append(chances[torch.arange(len(response)), response])
    now = torch.nn.utils.rnn.pad_sequence(now, batch_first=True)
    mask = data["response_mask"].to_padded_tensor(0)
    rewards = data["rm_scores"].to_padded_tensor(0)
    uids = np.array([key.rsplit("_", 2)[0] for key in batch.keys], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, uids, norm_adv_by_std_in_grpo=False
    )
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=now.detach(),
        log_prob=now,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=omega_conf_to_dataclass(config.actor_rollout_ref.actor),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model.lm_head.weight.detach().clone()
    loss.backward()
    optimizer.step()
    return float(loss), not torch.equal(before, model.lm_head.weight)


def main():
    path, out = sys.argv[1:]
    config = config_of(path, out)
    ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR")  # logical: actors wait
    transfer_queue.init(config.transfer_queue)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = asyncio.run(sampled(config, model))
    trainer_class = recorded(PPOTrainerSync)
    trainer = trainer_class.__new__(trainer_class)  # its __init__ starts workers on GPUs
    trainer.config = config
    loss, has_moved = trained(config, model, batch)
    trainer._log_rollout_data(batch, {}, config.trainer.rollout_data_dir)
    assert trainer.appender.num_rows == len(batch.keys), trainer.appender.num_refused
    sys.stdout.write(json.dumps({"loss": loss, "has_moved": has_moved}) + "\n")


if __name__ == "__main__":
    main()
