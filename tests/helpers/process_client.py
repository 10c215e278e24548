"""Runs of several processes, which a server forks: see `tests.helpers.process_server`."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT


class Server:
    """See `tests.helpers.process_server`."""

    def __init__(self, folder):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        changes = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
        command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.process_server"]
        self.process = subprocess.Popen(command, env=os.environ | changes, text=True, **pipes)
        self.folder = folder

    def answer(self):
        assert self.process.stdout
        found = json.loads(self.process.stdout.readline())
        return found

    def start(self, **job):
        """Process ids of the ranks."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({**job, "stderr": str(self.folder)}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def said(self, num_processes=2):
        return [(self.folder / f"{rank}.txt").read_text() for rank in range(num_processes)]

    def train(self, config, **job):
        self.start(config=config, **job)
        assert self.answer() == [0, 0], "\n".join(self.said())
