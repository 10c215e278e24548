"""Before a loop samples: what rows of the longest possible length would cost."""

import re

import pytest

from tests.helpers.rl_helpers import config_of, save_model
from trainer.rl.learning import Learning

MANY = 1 << 28


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A model that accepts 268 million tokens, for which no machine of ours has memory."""
    folder = tmp_path_factory.mktemp("model")
    return save_model(folder, tokenizer, max_position_embeddings=MANY)


def notes(folder, model, **settings):
    config = config_of(folder, model, **settings)
    return list(Learning(config.training, None, num_iterations=3).notes_of_size(config))


def test_rows_without_a_limit_are_noted_with_memory_time_and_keys(model, tmp_path):
    (note,) = notes(tmp_path, model)
    assert re.match(
        r"note: rows may have up to 268,435,456 tokens \(.*\); a micro-batch of 268,435,456 tokens needs"
        r" about [\d,.]+ GiB of memory, but [\d,.]+ GiB are free, and an update on 3 rows of that"
        r" length takes at least \d+ (min|h) .* on this CPU\. If your rows get that long, set"
        r" generate\.max_input_tokens to end longer trajectories, or batch\.max_row_tokens to"
        r" truncate rows$",
        note,
    )


def test_a_large_micro_batch_of_short_rows_names_its_own_key(model, tmp_path):
    settings = {"group_size": 4096, "max_input_tokens": 250}
    (note,) = notes(tmp_path, model, generate=settings, train={"tokens_per_micro_batch": MANY})
    assert "rows may have up to 256 tokens" in note
    assert "batch.tokens_per_micro_batch for smaller micro-batches" in note
    assert "(generate.max_input_tokens + generate.max_response_tokens)" in note
    assert "generate.max_input_tokens to end longer" not in note


@pytest.mark.parametrize(
    "settings", [{"generate": {"max_input_tokens": 100}}, {"train": {"max_row_tokens": 128}}]
)
def test_short_rows_need_no_note(settings, model, tmp_path):
    assert notes(tmp_path, model, **settings) == []
