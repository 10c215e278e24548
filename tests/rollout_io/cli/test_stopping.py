"""Ctrl-C during a computation that no signal interrupts: it is answered at once."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rollout_io.cli.output import GRACE_S, REPEATED_S
from tests.conftest import ROOT

BUSY = """
import hashlib, signal, sys, threading, time

from rollout_io.cli.output import going_on


def compute():
    {work}


def wait(seconds):
    while sys._current_frames()[threading.main_thread().ident].f_code is not compute.__code__:
        time.sleep(0.01)
    time.sleep(seconds)
    print("busy", flush=True)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
threading.Thread(target=wait, args=[0.2], daemon=True).start()
try:
    with going_on(lambda: "run it again", "the current micro-batch"):
        compute()
        print("went on", flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
HASH = "hashlib.pbkdf2_hmac('sha256', b'', b'', {})"
"""A computation in C, which no signal interrupts: 10**6 rounds take 0.2 s to 1 s."""
TOLD = "stopping after the current micro-batch; press Ctrl-C again to end at once\n"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def start(work):
    """Start a process, and wait until it is at work."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.replace("{work}", work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_a_signal_is_answered_at_once_and_one_a_second_later_ends_the_process(number):
    with start(HASH.format(2**31 - 1)) as process:
        assert process.stderr is not None
        process.send_signal(number)
        assert process.stderr.readline() == TOLD
        begun_s = time.monotonic()
        while process.poll() is None and time.monotonic() < begun_s + 20:
            process.send_signal(number)
            time.sleep(0.02)
        assert process.wait(0) == CODES[number]
        assert time.monotonic() - begun_s > (REPEATED_S - GRACE_S) / 2
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_the_computation_ends_and_then_the_verb_stops():
    with start(HASH.format(4_000_000)) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == TOLD + "stopped: run it again\n"


def test_a_verb_that_stops_at_once_says_only_how_to_resume():
    with start("time.sleep(60)") as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "stopped: run it again\n")
