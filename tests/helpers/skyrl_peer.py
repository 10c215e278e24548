"""SkyRL's own functions on outputs of ours, unchanged: run by test_skyrl_peer.py, where SkyRL is.

Writes a JSON object to stdout: of each case the traceback, or null.
"""

import asyncio
import copy
import json
import sys
import traceback
import typing
from importlib.metadata import version
from unittest.mock import MagicMock

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses typing's on Python 3.11

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import torch  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.config.config import GeneratorConfig as SkyRLConfig  # noqa: E402
from skyrl.train.config.config import SkyRLGymConfig  # noqa: E402
from skyrl.train.generators.base import TrajectoryID as TheirID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl.train.generators.utils import (  # noqa: E402
    concatenate_generator_outputs,
    merge_stepwise_output,
)
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402

from pipelines import GymGenerator, merge  # noqa: E402
from pipelines.generation.config import with_sampling_params  # noqa: E402
from rollout_io import from_generator_output, read, to_generator_output  # noqa: E402
from rollout_io.retokenize.tokenizer import load_tokenizer  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.helpers.generation_helpers import (  # noqa: E402
    ASK,
    HERE,
    SpyEngine,
    chatty_model,
    config_of,
    tasks_of,
    trajectories,
)
from trainer.models.logprob_head import set_logprobs  # noqa: E402

TOKENIZER = load_tokenizer(ROOT / ".cache" / "smollm2")
MODEL = chatty_model()
MERGED = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs"),
    *("stop_reasons", "is_last_step"),
)


def generated(name="Echo", extras=None, **settings):
    """What the generator makes of two prompts, each with two attempts of two turns."""
    ids = [TheirID(f"u{i // 2}", i % 2) for i in range(4)]
    asked = {"prompts": [ASK] * 4, "env_classes": [f"{HERE}:{name}"] * 4, "trajectory_ids": ids}
    asked["env_extras"] = extras or [{"num_turns": 2}] * 4

    async def run():
        async with SpyEngine(MODEL, TOKENIZER) as engine:
            config = config_of(environment=None, max_turns=2, **settings)
            return await GymGenerator(engine, TOKENIZER, config).generate(asked)

    return asyncio.run(run())


class Client:
    """SkyRL's inference engine client over an engine of ours."""

    def __init__(self, engine, config):
        self.engine, self.config = engine, config

    @property
    def weight_version(self):
        return self.engine.policy_version

    async def generate(self, asked, model=None):
        del model
        sampling = with_sampling_params(self.config, asked["sampling_params"]).sampling
        calls = [self.engine.sample(ids, sampling) for ids in asked["prompt_token_ids"]]
        sampled = await asyncio.gather(*calls)
        return {
            "responses": [one.text for one in sampled],
            "response_ids": [one.response_ids for one in sampled],
            "stop_reasons": [one.stop_reason for one in sampled],
            "response_logprobs": [one.rollout_logprobs for one in sampled],
        }

    async def finish_session(self, session_id):
        pass


class Theirs:
    """SkyRL's own generator, as `[generate] generator` takes it."""

    def __init__(self, engine, tokenizer, config):
        made = SkyRLConfig(
            max_turns=config.max_turns,
            max_input_length=config.max_input_tokens,
            step_wise_trajectories=config.generator_config["step_wise"],
        )
        client = Client(engine, config)
        self.own = SkyRLGymGenerator(made, SkyRLGymConfig(), client, tokenizer.backend)

    async def generate(self, input_batch):
        return await self.own.generate(input_batch, disable_tqdm=True)


def their_generator_in_our_place():
    truth = {"reward_spec": {"ground_truth": "4"}}
    for step_wise in (False, True):
        settings = {"generator": f"{__name__}:Theirs", "environment": "gsm8k_multi_turn"}
        settings |= {"generator_config": {"step_wise": step_wise}, "max_turns": 2}
        settings |= {"max_input_tokens": 512}
        engine = SpyEngine(MODEL, TOKENIZER, policy_version=3)
        found, table = trajectories(engine, TOKENIZER, tasks_of(2, 2, **truth), **settings)
        assert [one.error for one in found] == [None] * 4, found[0].error
        assert table["trajectory_id"].unique().to_pylist() == ["t0_0", "t0_1", "t1_0", "t1_1"]
        assert set(table["policy_version"].to_pylist()) == {3}
        assert table.num_rows == (8 if step_wise else 4)
        sampled = sum(len(call[3].response_ids) for call in engine.calls)
        assert sum(map(sum, table["loss_mask"].to_pylist())) == sampled


def shop():
    """Steps of logs, with scalar rewards: the dataset of the command line."""
    return read(sys.argv[1])


def routed():
    """A trajectory per row, with the routes of two layers."""
    output = generated()
    lengths = [
        len(prompt) + len(response) - 1
        for prompt, response in zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    ]
    routes = [np.arange(n * 4).reshape(n, 2, 2) % 61 for n in lengths]
    given = output | {"rollout_expert_indices": routes}
    return to_generator_output(from_generator_output(given))


def trained(output, *, step_wise, merges=False):
    """SkyRL's checks, post-processing and tensors; what they make of the output, and its metrics."""
    validate_generator_output(len(output["response_ids"]), output, step_wise=step_wise)
    uids = [own.instance_id for own in output["trajectory_ids"]]
    config = SkyRLTrainConfig()
    config.generator.step_wise_trajectories = step_wise
    config.generator.merge_stepwise_output = merges
    config.generator.n_samples_per_prompt = len({t.to_string() for t in output["trajectory_ids"]})
    config.generator.n_samples_per_prompt //= len(set(uids))
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = len(set(uids))
    config.trainer.resume_mode = "none"
    config.generator.inference_engine.enable_ray_prometheus_stats = False
    trainer = RayPPOTrainer(
        cfg=config,
        tracker=None,
        tokenizer=TOKENIZER.backend,
        train_dataset=MagicMock(__len__=lambda _: len(set(uids))),
        eval_dataset=None,
        inference_engine_client=None,
        generator=MagicMock(),
    )
    found, uids = trainer.postprocess_generator_output(output, uids)
    trainer.dispatch = MagicMock()
    trainer.dispatch.get_lcm_dp_size.return_value = 1
    tensors = trainer.convert_to_training_input(found, uids)
    check_tensors(found, tensors)
    tensors["values"] = None  # no critic
    assert torch.isfinite(trainer.compute_advantages_and_returns(tensors)["advantages"]).all()
    return found, trainer.all_metrics


def check_tensors(output, tensors):
    """Tokens, masks, rewards and log-probabilities of every row are in its tensors."""
    width = tensors["sequences"].shape[1]
    for row, (prompt, response) in enumerate(
        zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    ):
        ids = [*prompt, *response]
        assert tensors["sequences"][row, width - len(ids) :].tolist() == ids
        for name, tensor in (("loss_masks", "loss_mask"), ("rewards", "rewards")):
            kept = tensors[tensor][row, -len(response) :]
            assert torch.allclose(kept.double(), torch.tensor(output[name][row]).double())
        if output["rollout_logprobs"] is not None:
            kept = tensors["rollout_logprobs"][row, -len(response) :].tolist()
            assert kept == output["rollout_logprobs"][row]
        if output.get("rollout_expert_indices") is not None:
            routes = output["rollout_expert_indices"][row]
            start, held = width - len(ids), tensors["rollout_expert_indices"]
            if isinstance(held, torch.Tensor):
                found = held[row, start : start + len(routes)]
            else:  # since SkyRL 0.4, the rows are packed
                first = int(held.sequence_lengths[:row].sum())
                found = held.values[first : first + len(routes)]
            assert found.tolist() == np.asarray(routes).tolist()


def returned(output):
    """Sum of each trajectory's last row, as SkyRL's advantages take it."""
    rows = zip(output["rewards"], output["is_last_step"], strict=True)
    return [float(np.sum(reward)) for reward, is_last in rows if is_last]


def one_row_each():
    output = generated()
    _, metrics = trained(output, step_wise=False)
    assert returned(output) == [0.75] * 4
    assert metrics["reward/avg_raw_reward"] == 0.75
    assert metrics["reward/avg_pass_at_2"] == 1.0
    assert output["env_metrics"][0]["turns"] == 2.0


def one_row_a_step():
    output = generated(history="step_wise")
    assert output["is_last_step"] == [False, True] * 4
    found, metrics = trained(output, step_wise=True)
    assert returned(found) == [0.75] * 4
    assert metrics["reward/avg_raw_reward"] == 0.75


def a_failed_group():
    extras = [{"num_turns": 2}] * 3 + [{"how": "raise"}]
    for history in ("append", "step_wise"):
        output = generated("Broken", extras, history=history)
        found, metrics = trained(output, step_wise=history == "step_wise")
        assert found["stop_reasons"][-2:] == ["error", "error"]
        assert metrics["reward/avg_raw_reward"] == 0.375


def routes_of_a_mixture():
    """SkyRL 0.3 takes routes as lists and tests their truth, which arrays do not have; 0.4 takes arrays."""
    output = routed()
    routes = output["rollout_expert_indices"]
    assert routes is not None
    if version("skyrl").startswith("0.3."):
        output["rollout_expert_indices"] = [r if r is None else r.tolist() for r in routes]
    trained(output, step_wise=False)


def scalar_rewards_of_logs():
    output = to_generator_output(shop())
    trained(output, step_wise=True)


def concatenated():
    output = generated(history="step_wise")
    whole = concatenate_generator_outputs([output], step_wise=True)
    for name in (*MERGED, "trajectory_ids"):
        assert whole[name] == output[name], name


def sets_of_truncated_sampling():
    """SkyRL 0.4 merges, trains and scores the sets of our rows as we do."""
    if version("skyrl").startswith("0.3."):
        return  # it has no sets
    from skyrl.backends.skyrl_train.utils.sample_support_replay import sample_support_scores

    steps = shop()
    rng = np.random.default_rng(0)
    sets = [
        [
            [token, *{(token + int(i)) % 1000 for i in rng.integers(1, 900, 5)} - {token}]
            for token in ids
        ]
        for ids in steps["response_ids"].to_pylist()
    ]
    kind = pa.list_(pa.list_(pa.int32()))
    table = steps.append_column("sampling_support", pa.array(sets, kind))
    output = to_generator_output(table)
    assert from_generator_output(output)["sampling_support"].to_pylist() == sets
    theirs = merge_stepwise_output(copy.deepcopy(output))["rollout_sample_support"]
    ours = to_generator_output(merge(table, "consecutive").collect())["rollout_sample_support"]
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(ours) < len(output["response_ids"])
    assert any((own < 0).all(1).any() for own in ours)  # observations
    trained(output, step_wise=True)
    support = torch.tensor(output["rollout_sample_support"][0])
    token = torch.tensor(output["response_ids"][0])
    logits = torch.randn(len(token), 50_000, generator=torch.Generator().manual_seed(0))
    logits, leaves = 5 * logits, []
    for scores in (their_scores, our_scores):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = scores(sample_support_scores, leaf, token, support)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
        leaves.append((logprobs, entropy, leaf.grad))
    for found, expected in zip(*leaves, strict=True):
        torch.testing.assert_close(found, expected)


def their_scores(function, logits, token, support):
    found = function(
        logits / 0.7,
        token,
        support,
        vocab_start_index=0,
        vocab_end_index=logits.shape[-1],
        tp_group=None,
        compute_entropy=True,
        entropy_requires_grad=True,
    )
    return found.logprobs, found.entropy


def our_scores(_, logits, token, support):
    ids, sizes = support[support >= 0].long(), (support >= 0).sum(1)
    temperature = torch.full((len(token),), 0.7)
    return set_logprobs(logits, token, temperature, ids, sizes, entropy_gradient=True)


def merged_by_both():
    steps = json.loads((ROOT / "tests/data/peers/skyrl/stepwise.json").read_text())
    for table in (from_generator_output(steps), shop()):
        output = to_generator_output(table)
        theirs = merge_stepwise_output(copy.deepcopy(output))
        ours = to_generator_output(merge(table, "consecutive").collect())
        for name in MERGED:
            assert ours[name] == theirs[name], name
        of_their_class = [TheirID(t.instance_id, t.repetition_id) for t in theirs["trajectory_ids"]]
        assert ours["trajectory_ids"] == of_their_class
        assert of_their_class == ours["trajectory_ids"]
        assert len(ours["response_ids"]) < len(output["response_ids"])
        _, metrics = trained(output, step_wise=True, merges=True)
        assert metrics["generate/num_seq_after_merge"] == len(ours["response_ids"])


def defaults_of_the_page():
    """SkyRL's defaults are those that docs/skyrl.md names."""
    config = SkyRLTrainConfig()
    algorithm, generator = config.trainer.algorithm, config.generator
    assert (algorithm.use_kl_loss, algorithm.kl_loss_coef) == (True, 0.001)
    assert algorithm.off_policy_correction.tis_ratio_type is None
    assert (config.trainer.train_batch_size, config.trainer.policy_mini_batch_size) == (1024, 256)
    assert (generator.n_samples_per_prompt, generator.merge_stepwise_output) == (5, False)
    assert (config.trainer.eval_interval, config.trainer.ckpt_interval) == (5, 10)
    assert (generator.max_input_length, config.trainer.fully_async.max_staleness_steps) == (512, 4)


CASES = (
    defaults_of_the_page,
    *(one_row_each, one_row_a_step, a_failed_group, routes_of_a_mixture),
    *(scalar_rewards_of_logs, concatenated, merged_by_both, their_generator_in_our_place),
    sets_of_truncated_sampling,
)


def main():
    found = {}
    for case in CASES:
        try:
            case()
        except Exception:
            found[case.__name__] = traceback.format_exc()
        else:
            found[case.__name__] = None
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
