"""TRL's trainers take the exported files as they are, and train the sampled tokens."""

from itertools import chain

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipelines
import rollout_io
from rollout_io.cli.main import run
from tests.conftest import EXAMPLES

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.model,
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # of TRL and Transformers
]

TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
}
KIND = {
    "sharegpt": "sft",
    "openai_sft": "sft",
    **{f"{name}{end}": name for name in TRAINERS for end in ("", "_tokens")},
}
KEYS = ("prompt_token_ids", "response_ids", "loss_mask")


class ExactDPOTrainer(trl.DPOTrainer):
    """Takes ids, as in docs/guides/preferences.md."""

    def _prepare_dataset(self, dataset, *_):
        return dataset


class ExactKTOTrainer(trl.KTOTrainer):
    """Takes ids, as in docs/guides/preferences.md."""

    def _prepare_dataset(self, dataset, *_):
        return dataset


def exported(dataset, name, folder, *options):
    out = str(folder / name)
    assert run(["export", str(dataset), "--format", name, "--out", out, *options]) == 0
    kind = "parquet" if name.endswith("_tokens") else "json"
    return load_dataset(kind, data_files=out, split="train", cache_dir=str(folder / "cache"))


def trainer_of(name, samples, model, folder, own=None, reference=None, **settings):
    trainer, config = TRAINERS[KIND[name]]
    settings = {
        "output_dir": str(folder / "run"),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "max_length": None,
        "learning_rate": 1e-3,
        **settings,
    }
    references = {} if reference is None else {"ref_model": reference}
    return (own or trainer)(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config(**settings),
        train_dataset=samples,
        **references,
        processing_class=AutoTokenizer.from_pretrained(EXAMPLES.parent / ".cache" / "smollm2"),
    )


@pytest.mark.parametrize("name", ["sft", "sft_tokens", "sharegpt", "openai_sft", "dpo", "kto"])
def test_a_trainer_makes_two_steps_on_the_file_unchanged(
    name, shop_dataset, small_smollm2, tmp_path
):
    samples = exported(shop_dataset, name, tmp_path)
    trainer = trainer_of(name, samples, small_smollm2, tmp_path)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not before[n].equal(p) for n, p in trainer.model.named_parameters())


@pytest.fixture(scope="module")
def sequences(shop_dataset):
    """The merged rows of the table, which the samples are compared with."""
    frame = pipelines.merge(rollout_io.scan(shop_dataset))
    return frame.select("trajectory_id", "segments", *KEYS).collect().to_dicts()


def sampled_log_probs(model, rows):
    """[M] float64 log-probabilities of the trained tokens of rows, from the columns of the table."""
    found = []
    for row in rows:
        prompt, response, mask = (row[key] for key in KEYS)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0].double()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        ids = torch.tensor(response)
        found.append(logprobs[torch.arange(len(ids)), ids][torch.tensor(mask)])
    return torch.cat(found)


def test_sft_trains_all_sampled_tokens_and_no_other_with_the_loss_of_the_table(
    shop_dataset, sequences, smollm2_dir, tmp_path
):
    samples = exported(shop_dataset, "sft_tokens", tmp_path)
    trainer = trainer_of("sft_tokens", samples, smollm2_dir, tmp_path)
    prepared = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
    assert len(prepared) == len(sequences) == 82
    num_trained = 0
    for sample, row in zip(prepared, sequences, strict=True):
        prompt, response, _ = (row[key] for key in KEYS)
        ids = prompt + response
        labels = [-100] * len(ids)
        for segment in row["segments"] or [{"start": 0, "length": len(response)}]:
            start = len(prompt) + segment["start"]
            labels[start : start + segment["length"]] = ids[start : start + segment["length"]]
        assert sample["input_ids"] == ids
        assert sample["labels"] == labels
        num_trained += sum(label != -100 for label in labels)
    responses = rollout_io.read(shop_dataset, ["response_ids"])["response_ids"]
    assert num_trained == sum(len(ids) for ids in responses.to_pylist())
    batch = trainer.data_collator(prepared[:2])
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), batch)
    expected = -sampled_log_probs(trainer.model, sequences[:2]).mean()
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)


def side(sample, name):
    """A side of a pair as a row of the table."""
    ids = sample[f"{name}_ids"]
    return dict(zip(KEYS, (sample["prompt_ids"], ids, [True] * len(ids)), strict=True))


def steps_of(dataset):
    rows = rollout_io.read(dataset, ["trajectory_id", *KEYS]).to_pylist()
    return {(row["trajectory_id"], *(tuple(row[key]) for key in KEYS[:2])) for row in rows}


def test_dpo_trains_the_ids_of_the_pairs_with_the_loss_of_the_table(
    shop_dataset, smollm2_dir, small_smollm2, tmp_path
):
    samples = exported(shop_dataset, "dpo_tokens", tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    own = {"own": ExactDPOTrainer, "reference": reference, "beta": 0.1}
    trainer = trainer_of("dpo_tokens", samples, small_smollm2, tmp_path, **own)
    steps, pair = steps_of(shop_dataset), samples[0]
    for sample in samples:
        for name in ("chosen", "rejected"):
            ids = tuple(sample["prompt_ids"]), tuple(sample[f"{name}_ids"])
            assert (sample[f"{name}_trajectory_id"], *ids) in steps
    batch = trainer.data_collator([pair])
    taken = batch["input_ids"][batch["completion_mask"].bool()].tolist()
    assert taken == [*pair["chosen_ids"], *pair["rejected_ids"]]
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), batch)
    ratio = [
        sampled_log_probs(trainer.model, [side(pair, name)]).sum()
        - sampled_log_probs(reference, [side(pair, name)]).sum()
        for name in ("chosen", "rejected")
    ]
    expected = -torch.nn.functional.logsigmoid(0.1 * (ratio[0] - ratio[1]))
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    trainer.train()
    assert trainer.state.global_step == 2


def test_kto_trains_the_ids_of_the_steps_with_the_loss_of_the_table(
    shop_dataset, smollm2_dir, small_smollm2, tmp_path
):
    samples = exported(shop_dataset, "kto_tokens", tmp_path, "--select", ">=1")
    reference = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    own = {"own": ExactKTOTrainer, "reference": reference, "beta": 0.1}
    loss = {"loss_type": "apo_zero_unpaired"}
    trainer = trainer_of("kto_tokens", samples, small_smollm2, tmp_path, **own, **loss)
    found = {
        (s["trajectory_id"], tuple(s["prompt_ids"]), tuple(s["completion_ids"])) for s in samples
    }
    assert found == steps_of(shop_dataset)
    some = [next(s for s in samples if s["label"] is label) for label in (True, False)]
    batch = trainer.data_collator(some)
    taken = batch["input_ids"][batch["completion_mask"].bool()].tolist()
    assert taken == list(chain.from_iterable(s["completion_ids"] for s in some))
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), batch)
    good, bad = (
        sampled_log_probs(trainer.model, [side(s, "completion")]).sum()
        - sampled_log_probs(reference, [side(s, "completion")]).sum()
        for s in some
    )
    expected = (1 - (0.1 * good).sigmoid() + (0.1 * bad).sigmoid()) / 2
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    trainer.train()
    assert trainer.state.global_step == 2
