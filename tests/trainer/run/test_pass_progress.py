"""Progress within an update: what is planned is what is forwarded, and what a log says of it."""

import os
import pty
import re
import select
import time
from typing import Any

import pytest
import torch

import trainer
from rollout_io.terminal import Bar
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from trainer.batches.forest import Forest
from trainer.run import pass_progress as progress
from trainer.run.pass_progress import (
    OLD_LOGPROBS,
    REFERENCE,
    TRAINING,
    Passes,
    PlannedUpdate,
    ticking,
)


def forest(num_tokens: int) -> Forest:
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    none = ids[:0]
    return Forest(
        token_ids=ids,
        position_ids=ids,
        subtree_end=ids + num_tokens,
        target_parent=none,
        target_token=none,
        target_slot=none,
    )


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def forward(
    passes: Passes, clock: Clock, name: str, sizes: list[int], rate: float, last: int | None = None
) -> None:
    """Forward micro-batches at a rate in tokens/s, up to the one numbered `last`."""
    for number, one in passes(name, [(i, forest(n)) for i, n in enumerate(sizes)]):
        if number == last:
            return
        clock.now += one.num_tokens / rate


def train_batch(passes: Passes, clock: Clock) -> None:
    """A batch of two updates of 3,000 tokens: 60 s of passes, then 2 x 60 s."""
    each = {TRAINING: 3000}
    first = {OLD_LOGPROBS: 6000, REFERENCE: 6000}
    passes.begin_batch([PlannedUpdate(first | each, "epoch 1 of 2"), PlannedUpdate(each)])
    forward(passes, clock, OLD_LOGPROBS, [1000] * 6, 200.0)
    forward(passes, clock, REFERENCE, [1000] * 6, 200.0)
    for _ in range(2):
        forward(passes, clock, TRAINING, [1000] * 3, 50.0)
        passes.end_update(made=True)


def test_a_log_has_a_line_every_30_s_and_one_at_the_end_of_a_pass_of_the_first_update(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    passes = Passes(Bar(4, "updates"), num_planned=4, clock=clock)
    train_batch(passes, clock)
    # Until training is measured, a token of it is assumed to take 3 x 1/200 s. The two updates after
    # this batch take as long as it does: 150 s at first, 180 s once training is measured.
    assert capsys.readouterr().err.splitlines() == [
        "update 1 of 4: old log-probabilities, 6,000 of 15,000 tokens, 200 tokens/s,"
        " 30 s elapsed, 1 min 15 s left (4 min 30 s of the run)",
        "update 1 of 4: old log-probabilities: 6,000 tokens in 30 s (200 tokens/s)",
        "update 1 of 4: reference log-probabilities, 12,000 of 15,000 tokens, 200 tokens/s,"
        " 1 min 0 s elapsed, 45 s left (4 min 0 s of the run)",
        "update 1 of 4: reference log-probabilities: 6,000 tokens in 30 s (200 tokens/s)",
        "update 1 of 4: training, epoch 1 of 2, 14,000 of 15,000 tokens, 50 tokens/s,"
        " 1 min 40 s elapsed, 20 s left (4 min 20 s of the run)",
        "update 2 of 4: training, 1,000 of 3,000 tokens, 50 tokens/s,"
        " 20 s elapsed, 40 s left (3 min 40 s of the run)",
    ]
    train_batch(passes, clock)
    later = capsys.readouterr().err
    assert "tokens in" not in later
    assert later.splitlines()[-1].endswith(", 40 s left (40 s of the run)")
    assert len(later.splitlines()) <= 180 / 30


def test_a_micro_batch_that_takes_long_has_lines_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    clock = Clock()
    passes = Passes(Bar(1, "updates"), num_planned=1, clock=clock)
    passes.begin_batch([PlannedUpdate({OLD_LOGPROBS: 500, TRAINING: 500})])
    lines = []
    with ticking(passes):
        for name in (OLD_LOGPROBS, TRAINING):
            for _ in passes(name, [(0, forest(500))]):
                capsys.readouterr()
                clock.now += 31.0
                lines.append(wait_for_line(capsys))
    assert lines == [
        "update 1 of 1: old log-probabilities, 0 of 1,000 tokens, 31 s elapsed\n",
        "update 1 of 1: training, 500 of 1,000 tokens, 1 min 2 s elapsed,"
        " 1 min 2 s left (1 min 2 s of the run)\n",
    ]


def test_lines_of_one_micro_batch_differ_and_their_estimate_shrinks_until_it_has_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    passes = Passes(Bar(1, "updates"), num_planned=1, clock=clock)
    passes.begin_batch([PlannedUpdate({TRAINING: 2000})])
    for number, _ in passes(TRAINING, [(i, forest(1000)) for i in range(2)]):
        for _ in range(3 * number):
            clock.now += 30.0
            passes.tick()
        clock.now += 50.0
    assert capsys.readouterr().err.splitlines()[:4] == [
        f"update 1 of 1: training, 1,000 of 2,000 tokens, 20 tokens/s, {text}"
        for text in (
            "50 s elapsed, 50 s left (50 s of the run)",
            "1 min 20 s elapsed, 20 s left (20 s of the run)",
            "1 min 50 s elapsed",
            "2 min 20 s elapsed",
        )
    ]


def wait_for_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What a thread logs within ten seconds."""
    for _ in range(1000):
        if found := capsys.readouterr().err:
            return found
        time.sleep(0.01)
    return ""


def test_a_process_that_is_not_the_main_one_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    train_batch(Passes(num_planned=4, clock=clock), clock)
    assert capsys.readouterr() == ("", "")


def test_the_tokens_of_other_processes_count_at_the_rate_of_this_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    passes = Passes(Bar(1, "updates"), num_planned=1, clock=clock)
    passes.begin_batch([PlannedUpdate({TRAINING: 9000})])
    forward(passes, clock, TRAINING, [1500, 1500], 50.0)
    assert "4,500 of 9,000 tokens, 150 tokens/s, 30 s elapsed, 30 s left" in capsys.readouterr().err


def test_a_terminal_shows_the_pass_its_tokens_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        clock = Clock()
        with Bar(4, "updates", done=1) as bar:
            passes = Passes(bar, num_planned=4, num_made=1, clock=clock)
            passes.begin_batch([PlannedUpdate({OLD_LOGPROBS: 6000, TRAINING: 6000})])
            forward(passes, clock, OLD_LOGPROBS, [1000] * 6, 200.0)
            bar._progress.refresh()
            forward(passes, clock, TRAINING, [1000] * 6, 50.0, last=1)
            bar._progress.refresh()
        terminal.flush()
        shown = ""
        while select.select([master], [], [], 0)[0]:
            shown += os.read(master, 1 << 16).decode()
    os.close(master)
    assert re.search(r"old log-probabilities .* 6000/12000 tokens .* 0:01:30 200 tokens/s", shown)
    assert re.search(r"training .* 7000/12000 tokens .* 0:01:40 50 tokens/s", shown)
    # Of the run: the 100 s of this update, and two more like it, 30 s + 120 s each.
    assert re.search(r"1/4 +updates .* 0:06:40", shown)


CRITIC = {"estimator": "gae", "kl_reward_coef": 0.1, "critic_learning_rate": 1e-3}
COVARIANCE = {"policy_loss_type": "clip_cov", "kl_loss_coef": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (CRITIC, ["critic values", OLD_LOGPROBS, REFERENCE, TRAINING, "critic training"]),
        (COVARIANCE, [OLD_LOGPROBS, REFERENCE, "token selection", TRAINING]),
        ({}, [OLD_LOGPROBS, TRAINING]),
        ({"epochs_per_batch": 1, "groups_per_mini_batch": 2}, [TRAINING]),
    ],
)
def test_the_passes_that_are_planned_are_those_that_run(
    settings: dict[str, Any], names: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[PlannedUpdate] = []
    end = Passes.end_update

    def spy(self: Passes, *, made: bool) -> None:
        updates.append(self._updates[0])
        end(self, made=made)

    monkeypatch.setattr(Passes, "end_update", spy)
    model = save_tiny_model(tmp_path / "model")
    dataset = write_dataset(tmp_path / "ds", group_rows(4, (1.0, 0.0)))
    sizes = {"groups_per_batch": 2, "groups_per_mini_batch": 1, "epochs_per_batch": 2}
    shared = {"tokens_per_micro_batch": 8, "learning_rate": 1e-3, "save_every_updates": 1}
    values = sizes | shared | settings
    config = {"dataset": dataset, "model": model, "out": str(tmp_path / "run")} | values
    trainer.train(train_config(**config, max_updates=1))
    result = trainer.train(train_config(**config), resume=True)
    assert len(updates) == result.num_updates
    assert list(updates[0].passes) == names
    for update in updates:
        assert update.left() == pytest.approx(dict.fromkeys(update.passes, 0.0))
        assert list(update.done) == list(update.passes)
