from rollout_io.cli import options
from rollout_io.cli.options import num_converters


def test_one_process_converts_small_logs_unless_text_is_tokenized(monkeypatch):
    monkeypatch.setattr("rollout_io.dataset.parallel.num_cores", lambda: 4)
    assert num_converters(320 << 20, retokenizes=False) == 1
    assert num_converters((320 << 20) + 1, retokenizes=False) == 4
    assert num_converters(1 << 27, retokenizes=True) == options.num_for(1 << 27) == 3
