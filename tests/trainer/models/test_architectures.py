"""Every causal LM that Transformers builds: trained right in each layout, or refused by name."""

import pytest
import torch

from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.architectures import KINDS, tiny_config, tiny_model, verdict, windows_seen
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import group_rows, write_dataset
from tests.trainer.models.test_trained_parameters import UNUSED, without_gradient
from trainer.distributed.spawn import start_processes
from trainer.models.layers import num_layers, recompute_layers
from trainer.models.lora import add_adapter
from trainer.models.policy import load_policy
from trainer.models.self_check import check_policy

FEW = {"cohere2", "exaone4", "gpt2", "jetmoe", "qwen3_moe", "phimoe, LongRoPE"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [k if k in FEW else pytest.param(k, marks=pytest.mark.nightly) for k in KINDS]
)
def test_an_architecture_is_right_in_each_layout_or_refused(kind, tmp_path):
    found = verdict(kind, tmp_path)
    rows = (ROOT / "docs" / "models.md").read_text().splitlines()
    if found is None:
        assert any(row.startswith(f"| {kind} | not tried |") for row in rows)
        pytest.skip("no model can be built from its default config")
    assert f"| {kind} | {found.text} |" in rows
    assert found.difference < 2e-5
    assert found.gradient < 1e-4
    if found.policy:
        assert not without_gradient(found.policy)
        config = train_config(dataset="d", model="m", out="o", lora_rank=2)
        adapters = refusal(lambda policy: add_adapter(policy, config.model), found.policy)
        assert adapters in (None, "lora_target_modules")
        assert refusal(recompute_layers, found.policy.model) in (None, "gradient_checkpointing")
    if found.policy and found.windowed:
        with windows_seen(change=1), pytest.raises(RolloutError, match="model_layers"):
            check_policy(found.policy, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [k if k in UNUSED else pytest.param(k, marks=pytest.mark.nightly) for k in KINDS]
)
def test_an_architecture_trains_in_two_processes_and_its_checkpoint_loads(kind, tmp_path):
    if f"| {kind} | step, merge" not in (ROOT / "docs" / "models.md").read_text():
        pytest.skip("refused, or no model can be built from its default config")
    tiny_config(kind).save_pretrained(tmp_path / "model")
    tiny_model(kind).save_pretrained(tmp_path / "model")
    dataset = write_dataset(tmp_path / "ds", group_rows(2, (1.0, 0.0), temperature=1.0))
    given = ["train", dataset, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    sizes = ["--set", "batch.groups_per_batch=2", "--set", "batch.groups_per_mini_batch=1"]
    assert start_processes(2, [*given, *sizes, "--set", "batch.num_epochs=2", "-q"], "resume") == 0
    saved = tmp_path / "run" / "checkpoints" / "global_step_4"
    trained = load_policy(str(saved), logprob_chunk_tokens=64)
    first = load_policy(str(tmp_path / "model"), logprob_chunk_tokens=64)
    before, after = first.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    frozen = {name for name, p in first.named_parameters() if not p.requires_grad}
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - frozen)


def refusal(change, policy):
    """The rule by which a policy refuses a change, if it does."""
    try:
        change(policy)
    except RolloutError as error:
        return error.rule
    return None


def test_layers_are_found_in_a_model_that_is_built_without_its_image_encoder():
    model = tiny_model("gemma4")
    assert model.get_encoder(modality="image") is None
    assert num_layers(model) == model.config.get_text_config().num_hidden_layers
