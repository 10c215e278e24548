"""Conversions of a large log, stopped at random moments."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.conftest import ROOT

LOG_BYTES = 310 << 20
ENDS_WITHIN_S, LONGEST_S = 5, 300
PYTHONS = ("/usr/bin/python3.11", "python3.13")
"""Names to look for; ROLLOUTS_TEST_PYTHONS names others, with `:` between them."""

_IMPORTS = "import click, filelock, fsspec, msgspec, numpy, polars, pyarrow, rich"
_FULL_BYTES = 1 << 30


def write_log(path, num_bytes=LOG_BYTES):
    """Sessions of eight calls whose ids are random, so that the dataset is large too."""
    rng = random.Random(0)
    names = [str(i) for i in range(49152)]
    with path.open("w") as file:
        number = 0
        while file.tell() < num_bytes:
            file.writelines(_calls(f"random-{number}/0", names, rng))
            number += 1
    return path


def _calls(session, names, rng):
    prompt = rng.choices(names, k=1500)
    for time_s in range(8):
        response = rng.choices(names, k=300)
        content = ",".join(f'{{"logprob": -{rng.random():.7f}}}' for _ in response)
        yield (
            f'{{"session": "{session}", "time": {time_s}, "request": {{"messages": []}}, '
            f'"response": {{"prompt_token_ids": [{",".join(prompt)}], "choices": [{{"token_ids": '
            f'[{",".join(response)}], "logprobs": {{"content": [{content}]}}}}]}}}}\n'
        )
        prompt += [*response, *rng.choices(names, k=50)]


def python_named(name):
    """The path of an interpreter that can convert, or why there is none."""
    path = shutil.which(name)
    if path is None:
        return None, f"there is no {name} on this machine"
    found = subprocess.run([path, "-c", _IMPORTS], capture_output=True, text=True, check=False)
    if found.returncode:
        return None, f"{path} lacks a library ({found.stderr.splitlines()[-1]}): make a venv of it"
    return path, ""


def python_names():
    given = os.environ.get("ROLLOUTS_TEST_PYTHONS", "")
    return [sys.executable, *(given.split(os.pathsep) if given else PYTHONS)]


class Conversion:
    """`rollouts convert LOG --workers 2` by an interpreter of one's choice."""

    def __init__(self, python, log, out, file_bytes=None):
        command = [python, "-m", "rollout_io", "convert", log, "--out", out, "--workers", "2"]
        self.start_s = time.monotonic()
        self.process = subprocess.Popen(
            [*map(str, command), "--format", "calls"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: _prepare(file_bytes),
        )

    def workers(self):
        try:
            children = psutil.Process(self.process.pid).children()
            return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        except psutil.Error:
            return []

    def end(self, within_s=LONGEST_S):
        """Seconds until it ended, and its exit code."""
        start_s, workers = time.monotonic(), self.workers()
        try:
            _, self.errors = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            for process in [*workers, self.process]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.communicate()
            raise AssertionError(f"at work {within_s} s after it was stopped") from None
        gone_s = time.monotonic() - start_s
        _, alive = psutil.wait_procs(workers, timeout=within_s)
        assert not alive
        return gone_s, self.process.returncode


def _prepare(file_bytes):
    """Before the interpreter starts; a shell lets what runs in its background ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def files_in(folder):
    found = {str(path.relative_to(folder)): path for path in Path(folder).rglob("*")}
    return {name: path.is_file() and path.read_bytes() for name, path in found.items()}


class Undisturbed(NamedTuple):
    """What a conversion that nobody stops leaves, how long it takes, and when its workers work."""

    files: dict
    seconds: float
    workers_s: float


def undisturbed(python, log, out):
    made = Conversion(python, log, out)
    while not made.workers():
        assert made.process.poll() is None
        time.sleep(0.01)
    workers_s = time.monotonic() - made.start_s
    _, code = made.end()
    assert code == 0, made.errors
    return Undisturbed(files_in(out), time.monotonic() - made.start_s, workers_s)


class Stop(NamedTuple):
    """One stop: how it was made, how long it took to end and how it ended."""

    kind: str
    after_s: float
    ended_s: float
    code: int


def stop_and_finish(kind, python, log, out, wanted, rng):
    """Stop a conversion somewhere, run the same command again, compare all bytes."""
    if kind == "full disk":
        found = _fill_disk(python, log, out, wanted, rng)
    else:
        found = _send(kind, python, log, out, wanted, rng)
    again = Conversion(python, log, out)
    _, code = again.end()
    assert code == 0, again.errors
    assert files_in(out) == wanted.files
    return found


def _send(kind, python, log, out, wanted, rng):
    first_s = wanted.workers_s if kind == "killed worker" else 0.3
    after_s = rng.uniform(first_s, wanted.seconds)
    made = Conversion(python, log, out)
    time.sleep(after_s)
    if kind == "killed worker":
        while not made.workers() and made.process.poll() is None:
            time.sleep(0.01)
        victims = made.workers()
        with suppress(IndexError, psutil.NoSuchProcess):
            rng.choice(victims).kill()
        ended_s, code = made.end()
        assert code == 0 or ended_s < ENDS_WITHIN_S  # 0: it had nothing left to do
    else:
        made.process.send_signal(signal.Signals[kind])
        ended_s, code = made.end(ENDS_WITHIN_S)
    expected = {"SIGTERM": {143, -15}, "SIGINT": {130, -2, 1}, "killed worker": {1}}[kind]
    assert code in expected | {0}, made.errors
    assert "Traceback" not in made.errors or code < 0, made.errors
    return Stop(kind, after_s, ended_s, code)


def _fill_disk(python, log, out, wanted, rng):
    """A filesystem that is full somewhere; or a limit to the size of a file, where none is mounted."""
    sizes = [len(content) for content in wanted.files.values() if content]
    out.mkdir()
    if _mount(out, rng.randrange(1 << 16, sum(sizes))):
        made = Conversion(python, log, out)
    else:
        made = Conversion(python, log, out, rng.randrange(1 << 10, max(sizes)))
    full_s = None
    while made.process.poll() is None:
        if full_s is None and not os.statvfs(out).f_bavail:
            full_s = time.monotonic()
        assert full_s is None or time.monotonic() - full_s < ENDS_WITHIN_S
        assert time.monotonic() - made.start_s < LONGEST_S
        time.sleep(0.01)
    end_s = time.monotonic()
    _, code = made.end()
    assert code == 1, made.errors
    assert "output_file" in made.errors, made.errors
    subprocess.run(["mount", "-o", f"remount,size={_FULL_BYTES}", out], check=False)
    return Stop("full disk", end_s - made.start_s, end_s - (full_s or end_s), code)


def _mount(folder, num_bytes):
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def unmounted(folder):
    """Unmount what was mounted there in this block."""
    try:
        yield
    finally:
        if folder.is_mount():
            subprocess.run(["umount", "-l", folder], check=True)


def run_after_20_kills(command):
    """Kill a command 20 times after a line or a few on stderr, then let it end."""
    for kill in range(20):
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            for _ in range(1 + kill % 4):
                process.stderr.readline()  # work that has begun, or the end
            os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
