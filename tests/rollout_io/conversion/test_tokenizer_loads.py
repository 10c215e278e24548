"""A conversion loads its tokenizer once, however many runs there are."""

import json
import random

import pytest

from rollout_io import convert
from rollout_io.conversion import text
from tests.helpers.verifiers_helpers import call, row

pytestmark = pytest.mark.model


def num_loads(inputs, out, **choices):
    text._loaded.cache_clear()
    convert([inputs], out, **choices)
    return text._loaded.cache_info().misses


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, "chatml_tools_thinking"])
def test_a_log_of_text_loads_the_tokenizer_once(template, smollm2_dir, tmp_path):
    rows = [{"input": f"{i}", "output": "b", "score": 1.0, "step": 3} for i in range(5)]
    choices = {"format": "verl", "tokenizer": str(smollm2_dir), "chat_template": template}
    assert num_loads(write(tmp_path / "3.jsonl", rows), tmp_path / "ds", **choices) == 1


@pytest.mark.slow
def test_a_log_of_text_and_exact_ids_loads_it_with_and_without_the_template(smollm2_dir, tmp_path):
    said = [{"role": "assistant", "content": "hi"}]
    exact = row(trajectory=[call([1, 2], [6004], completion=said)], completion=said)
    rows = [exact | {"example_id": i} if i % 2 else row(example_id=i) for i in range(6)]
    random.Random(0).shuffle(rows)
    template = "chatml_tools_thinking"
    choices = {"format": "verifiers", "tokenizer": str(smollm2_dir), "chat_template": template}
    assert num_loads(write(tmp_path / "results.jsonl", rows), tmp_path / "ds", **choices) <= 2
