"""Prompts that were rendered differently are found, with the tokenizer's chat template."""

import json

import numpy as np
import polars as pl
import pytest
import torch

import rollout_io
from tests.helpers.audit_helpers import Request, row, sample
from tests.helpers.trainer_helpers import tiny_llama, write_dataset
from trainer.forensics.audit.audit import run_audit
from trainer.forensics.audit.explanations import PromptVariants
from trainer.forensics.audit.rows import read_audit_rows
from trainer.forensics.audit.weights import Weights, find_candidates

CHAT = [{"role": "user", "content": "Name a river."}]


def encoded(tokenizer, text):
    return tokenizer.encode([text], ["text"])[0]


@pytest.fixture(scope="module")
def variants(tokenizer):
    return PromptVariants(tokenizer)


def test_variants_of_a_prompt(tokenizer, variants):
    text = tokenizer.render(CHAT, generation_prompt=True)
    found = variants.of(encoded(tokenizer, text), None)
    texts = {name: tokenizer.decode(ids) for name, ids in found.items()}
    user = text[text.index("<|im_start|>user") :]
    assert texts["without the system prompt"] == user
    assert texts["without the generation prompt"] == text.removesuffix("<|im_start|>assistant\n")
    assert texts["with the system prompt 'You are a helpful assistant.'"].endswith(user)
    assert text not in texts.values()
    again = variants.of(encoded(tokenizer, user), json.dumps(CHAT))
    assert tokenizer.decode(again["rendered with the tokenizer's chat template"]) == text
    assert variants.of(encoded(tokenizer, user), "not JSON")


@pytest.fixture(scope="module")
def rerendered(tmp_path_factory, tokenizer):
    """Rows whose stored prompt has no system prompt, which the engine had, and clean ones."""
    path = tmp_path_factory.mktemp("prompts")
    model = tiny_llama(vocab_size=49152, tie_word_embeddings=True, initializer_range=0.35).eval()
    chats = [[{"role": "user", "content": f"Name {n} rivers."}] for n in range(2, 12)]
    seen = [encoded(tokenizer, tokenizer.render(c, generation_prompt=True)) for c in chats]
    sampled = sample([model], [Request(prompt=ids, length=24, versions=0) for ids in seen])
    rows = []
    for number, (chat, ids, one) in enumerate(zip(chats, seen, sampled, strict=True)):
        text = tokenizer.decode(ids)
        stored = encoded(tokenizer, text[text.index("<|im_start|>user") :]) if number < 3 else ids
        rows.append(row(number, 0, stored, one, version=0, messages=json.dumps(chat)))
    model.save_pretrained(path / "version_0")
    return write_dataset(path / "ds", rows, logprobs_mode="processed"), str(path)


@pytest.mark.slow
@pytest.mark.parametrize("tries", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_a_prompt_that_was_rendered_again_is_named(rerendered, variants, tries):
    dataset, weights = rerendered
    rows = read_audit_rows(rollout_io.scan(dataset), rollout_io.read_metadata(dataset))
    result = run_audit(
        rows,
        Weights(find_candidates([weights]), device=torch.device("cpu")),
        dataset=dataset,
        variants=variants if tries else None,
    )
    found = result.verdicts.sort(pl.col("instance_id").str.slice(1).cast(pl.Int32))
    wrong = "prompt" if tries else "unknown_model"
    assert found["kind"].to_list() == [wrong] * 3 + ["as_labelled"] * 7
    if tries:
        assert set(found["reason"][:3]) == {"rendered with the tokenizer's chat template"}
        assert np.all(found["mean_difference"][:3].to_numpy() < 0.1)
