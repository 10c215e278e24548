"""Workers that die, fail, or never answer: python -m tests.helpers.worker_helpers NAME."""

import errno
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from rollout_io.dataset.parallel import Workers
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.errors import RolloutError

LARGE_BYTES = 16 << 20  # far more than a pipe holds


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_answering(task):
    """The parent is stopped, so half of the answer is in the pipe when the process dies."""
    if task == b"wakes":
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGCONT)
        return b""
    os.kill(os.getppid(), signal.SIGSTOP)
    threading.Timer(0.3, die, [None]).start()
    return bytes(LARGE_BYTES)


def send_numbers(num, send):
    for number in range(num):
        send(number)


def send_and_fail(send):
    send(0)
    raise RolloutError("some_rule", "here", "something wrong")


def send_and_die(send):
    send(0)
    die(None)


def wait_for_ever(_):
    time.sleep(3600)


def fail(_):
    raise OSError(errno.ENOSPC, "No space left on device")


def unchanged(table):
    """Here, because a worker imports the module of its function: this one imports little."""
    return table


def imports_pandas(values):
    """Build an Arrow array; return whether pandas has been imported."""
    pa.array(values)
    return "pandas" in sys.modules


def imports_torch(directory):
    """Load a tokenizer; return whether torch has been imported."""
    load_tokenizer(directory)
    return "torch" in sys.modules


def list_children():
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def main(name):
    if name == "wait_for_ever":
        threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()
    large = [bytes(LARGE_BYTES)] * 8
    tasks = [b"answers", b"wakes"] if name == "die_while_answering" else large
    with suppress(KeyboardInterrupt):
        try:
            list(Workers(2).map(globals()[name], tasks))
        except (RolloutError, OSError) as error:
            sys.stdout.write(f"{error}\n")
    assert len(list_children()) == 1  # multiprocessing's resource tracker


if __name__ == "__main__":
    main(sys.argv[1])
