"""Training needs as much memory for 400 MB of tokens as for 16 MB, in as many rows."""

import pytest

from tests.helpers.peak_memory import FEW, MANY, MOST_MORE_MB, peak_mb, save_model, write_rows


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_tokens_of_a_dataset(tmp_path):
    model = save_model(tmp_path / "model")
    few, many = (write_rows(tmp_path / str(num), num) for num in (FEW, MANY))
    least = peak_mb(few, model, tmp_path / "few")
    assert peak_mb(many, model, tmp_path / "many") - least < MOST_MORE_MB
