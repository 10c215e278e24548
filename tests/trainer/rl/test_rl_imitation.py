"""The loop with a loss that needs no rewards."""

import pytest

from tests.helpers.rl_helpers import config_of, lines_of, rows_of, save_model
from trainer import rl


@pytest.mark.slow
def test_greedy_rows_are_imitated(tmp_path, tokenizer, capsys):
    model = save_model(tmp_path / "model", tokenizer)
    config = config_of(
        tmp_path,
        model,
        num_iterations=1,
        generate={"temperature": 0.0},
        train={"policy_loss_type": "cross_entropy"},
    )
    result = rl.run(config)
    rows, lines = rows_of(config, 0), lines_of(config.run.out)
    assert set(rows["temperature"]) == {0.0}
    assert result.num_greedy_rows == 0
    assert sum(line["num_greedy_rows"] for line in lines) == 0
    num_tokens = rows["response_ids"].list.len().sum()
    assert sum(line["num_trained_tokens"] for line in lines) == num_tokens > 0
    assert "will be excluded" not in capsys.readouterr().err
