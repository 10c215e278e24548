"""A GRPO trainer of TRL keeps its rollouts, which train here with the same loss."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout_io
import trainer
from rollout_io.cli.main import run
from rollout_io.hooks.trl import record
from schemas.metadata import DatasetMetadata
from tests.helpers.configs import train_config

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of TRL and Transformers
]
N, TEMPERATURE = 3, 0.8
LENGTHS = (3, 6, 4)
"""Tokens of each turn of the attempts at a prompt, which differ so that the loss is not 0."""
OBSERVATION = [198, 198]


def sampled(prompts, grpo):
    """A rollout_func: two turns of the trainer's model, and an observation between them."""
    tokenizer, model = grpo.processing_class, grpo.model
    columns = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for number, prompt in enumerate(prompts):
        size = LENGTHS[number % N]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        response, logprobs, mask = [], [], []
        for turn in range(2):
            for _ in range(size):
                with torch.no_grad():
                    logits = model(torch.tensor([ids + response])).logits[0, -1].float()
                chances = (logits / TEMPERATURE).log_softmax(-1)
                token = int(torch.multinomial(chances.exp(), 1))
                response.append(token)
                logprobs.append(float(chances[token]))
                mask.append(1)
            if turn == 0:
                response += OBSERVATION
                logprobs += [0.0] * len(OBSERVATION)
                mask += [0] * len(OBSERVATION)
        columns["prompt_ids"].append(ids)
        columns["completion_ids"].append(response)
        columns["logprobs"].append(logprobs)
        columns["env_mask"].append(mask)
    return columns


def spread(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def half(completion_ids, **_):
    return [0.5 * (len(ids) > 3) for ids in completion_ids]


@pytest.fixture(scope="module")
def grpo(small_smollm2, smollm2_dir, tmp_path_factory):
    """A trainer after two steps, each with a batch of its own, the dataset of which is in `out/ds`."""
    out = tmp_path_factory.mktemp("trl")
    prompts = [[{"role": "user", "content": f"{i} + 1?"}] for i in range(2)]
    torch.manual_seed(0)
    grpo = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(small_smollm2, dtype=torch.float32),
        [spread, half],
        args=trl.GRPOConfig(
            str(out / "run"),
            per_device_train_batch_size=2 * N,
            num_generations=N,
            max_steps=2,
            max_completion_length=2 * max(LENGTHS) + len(OBSERVATION),
            temperature=TEMPERATURE,
            top_k=0,
            reward_weights=[1.0, 2.0],
            loss_type="bnpo",
            scale_rewards="none",
            beta=0.0,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=AutoTokenizer.from_pretrained(smollm2_dir),
        rollout_func=sampled,
    )
    metadata = DatasetMetadata(logprobs_mode="processed")
    appender = record(grpo, out / "ds", metadata)
    grpo.train()
    assert (appender.num_rows, appender.num_refused) == (4 * N, 0)
    return grpo, out


def test_every_batch_is_kept_with_its_version_and_task(grpo):
    _, out = grpo
    rows = rollout_io.read(str(out / "ds")).to_pylist()
    assert [row["policy_version"] for row in rows] == [0] * 2 * N + [1] * 2 * N
    assert len({row["task_instance_id"] for row in rows}) == 2
    assert len({row["instance_id"] for row in rows}) == 4
    for number, row in enumerate(rows):
        size = LENGTHS[number % N]
        assert row["loss_mask"] == [True] * size + [False] * len(OBSERVATION) + [True] * size
        assert row["temperature"] == pytest.approx(TEMPERATURE)
        scores = sum(row["response_ids"]) % 7, 0.5
        assert row["reward"] == scores[0] + 2 * scores[1]
    assert run(["validate", str(out / "ds")]) == 0


def test_the_rows_of_the_first_step_audit_as_labelled(grpo, small_smollm2, capsys):
    _, out = grpo
    first = str(out / "first.parquet")
    assert run(["filter", str(out / "ds"), "--where", "policy_version = 0", "-o", first]) == 0
    capsys.readouterr()
    assert run(["audit", first, "--weights", f"0={small_smollm2}", "--json"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"].items()
    assert verdict[0] == "as_labelled"
    assert verdict[1]["rows"] == 2 * N


def test_training_on_the_rows_has_the_loss_of_trl(grpo, small_smollm2):
    theirs, out = grpo
    settings = {"groups_per_batch": 2, "groups_per_mini_batch": 2, "max_updates": 1}
    settings |= {"estimator": "grpo", "normalize_by_std": False, "reduction": "token_mean"}
    settings |= {"tis_ratio_type": None}
    first = str(out / "first.parquet")
    config = train_config(dataset=first, model=str(small_smollm2), out=str(out / "o"), **settings)
    ours = trainer.train(config).metrics
    assert abs(ours["loss"]) > 1e-3
    assert ours["loss"] == pytest.approx(theirs.state.log_history[0]["loss"], abs=1e-4)
    assert ours["rollout_logprobs_abs_diff_mean"] < 1e-4
