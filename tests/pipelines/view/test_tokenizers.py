"""The tokenizer that the viewer decodes with reads ids as Transformers' does."""

import json

import numpy as np
import pytest

from pipelines.drift_diagnosis.texts import decode, special_ids, turns_of_ids
from pipelines.view.tokenizers import Tokenizers
from rollout_io.retokenize import load_tokenizer


@pytest.fixture(scope="module", params=["as downloaded", "one special token only in the settings"])
def directory(request, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.backend.save_pretrained(path)
    if request.param != "as downloaded":
        file = path / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["bos_token"] = "the"
        file.write_text(json.dumps(settings))
    return path


@pytest.mark.slow
def test_ids_are_read_as_by_transformers(directory):
    slow, fast = load_tokenizer(directory, needs_template=False), Tokenizers().chat(str(directory))
    assert type(fast.backend).__name__ == "_Fast"
    assert special_ids(fast).tolist() == special_ids(slow).tolist()
    rng = np.random.default_rng(6)
    for _ in range(50):
        ids = rng.integers(0, 49_300, 40).astype(np.int32)  # some are unknown
        marks = rng.random(40) < 0.15
        ids[marks] = rng.choice(special_ids(slow), marks.sum())
        assert decode(ids, fast) == decode(ids, slow)
        assert turns_of_ids(ids, fast) == turns_of_ids(ids, slow)
