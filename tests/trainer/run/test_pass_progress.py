"""Progress within an update: what a log and a terminal say of the pass that runs."""

import os
import pty
import re
import select
import time

import torch

from rollout_io.terminal import Bar
from trainer.batches.forest import Forest
from trainer.run import messages as progress
from trainer.run.messages import OLD_LOGPROBS, TRAINING, Passes, ticking


def forest(num_tokens):
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

    def __call__(self):
        return self.now


def forward(passes, clock, name, sizes, rate, last=None):
    """Forward micro-batches at a rate in tokens/s, up to the one numbered `last`."""
    for number, one in enumerate(passes(name, [forest(n) for n in sizes])):
        if number == last:
            return
        clock.now += one.num_tokens / rate


def train_batch(passes, clock):
    """A batch of two updates: 30 s of a pass before them, then 2 x 60 s."""
    forward(passes, clock, OLD_LOGPROBS, [1000] * 6, 200.0)
    for _ in range(2):
        forward(passes, clock, TRAINING, [1000] * 3, 50.0)
        passes.end_update(stepped=True)


def test_a_log_has_a_line_every_30_s(capsys):
    clock = Clock()
    passes = Passes(Bar(4, "updates"), num_planned=4, clock=clock)
    train_batch(passes, clock)
    assert capsys.readouterr().err.splitlines() == [
        "update 1 of 4: training, micro-batch 1 of 3, 0 of 3,000 tokens done, 0.0 s elapsed",
        "update 1 of 4: training, micro-batch 3 of 3, 2,000 of 3,000 tokens done, 40 s elapsed",
        "update 2 of 4: training, micro-batch 2 of 3, 1,000 of 3,000 tokens done, 20 s elapsed",
    ]


def test_a_micro_batch_that_takes_long_has_lines_that_say_so(capsys, monkeypatch):
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    clock, lines = Clock(), []
    passes = Passes(Bar(1, "updates"), num_planned=1, clock=clock)
    with ticking(passes):
        for name, num in ((OLD_LOGPROBS, 1), (TRAINING, 2)):
            for number, _ in enumerate(passes(name, [forest(500)] * num)):
                for _ in range(2 - number):
                    capsys.readouterr()
                    clock.now += 31.0
                    lines.append(wait_for_line(capsys))
    assert lines == [
        "update 1 of 1: old log-probabilities, micro-batch 1 of 1, 500 tokens, 31 s elapsed\n",
        "update 1 of 1: old log-probabilities, micro-batch 1 of 1, 500 tokens, 1 min 2 s elapsed\n",
        "update 1 of 1: training, micro-batch 1 of 2, 0 of 1,000 tokens done, 31 s elapsed\n",
        "update 1 of 1: training, micro-batch 1 of 2, 0 of 1,000 tokens done, 1 min 2 s elapsed\n",
        "update 1 of 1: training, micro-batch 2 of 2, 500 of 1,000 tokens done, 1 min 33 s elapsed\n",
    ]


def wait_for_line(capsys):
    """What a thread logs within ten seconds."""
    for _ in range(1000):
        if text := capsys.readouterr().err:
            return text
        time.sleep(0.01)
    return ""


def test_a_process_that_is_not_the_main_one_says_nothing(capsys):
    clock = Clock()
    train_batch(Passes(num_planned=4, clock=clock), clock)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_pass_and_its_tokens(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        clock = Clock()
        with Bar(4, "updates", done=1) as bar:
            passes = Passes(bar, num_planned=4, num_made=1, clock=clock)
            for name, last in ((OLD_LOGPROBS, 5), (TRAINING, 1)):
                for number, _ in enumerate(passes(name, [forest(1000)] * 6)):
                    bar._progress.refresh()
                    if number == last:
                        break
        terminal.flush()
        shown = ""
        while select.select([master], [], [], 0)[0]:
            shown += os.read(master, 1 << 16).decode()
    os.close(master)
    assert re.search(r"old log-probabilities .* 5000/6000 tokens", shown)
    assert re.search(r"training .* 1000/6000 tokens", shown)
    assert re.search(r"1/4 +updates", shown)
