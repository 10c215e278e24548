"""A real Chromium, and real viewers to open in it."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".cache" / "chromium"


def chromium_path():
    """$CHROMIUM, an installed one, or the one that `make test-all` fetched; None without one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    fetched = FETCHED / "chromium"
    return found or (str(fetched) if fetched.exists() else None)


@contextmanager
def chromium():
    """Start a Chromium, driven by Playwright.

    Raises:
        FileNotFoundError: There is none.
    """
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    if path is None:
        raise FileNotFoundError("no Chromium: set CHROMIUM to one, or run `make test-all`")
    # In the C locale Chromium names its language en-US@posix, which Intl refuses.
    environment = os.environ | {"LC_ALL": "C"}
    if path.startswith(str(FETCHED)):
        environment |= {"LD_LIBRARY_PATH": str(FETCHED / "al2023" / "lib")}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"], env=environment
        )
        yield browser
        browser.close()


def run_view(*arguments):
    """Start `rollouts view` in this checkout."""
    code = "from pipelines.cli.view import view; view()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )


@contextmanager
def viewing(*arguments):
    """Serve datasets and runs; yields the address and the server's process.

    Raises:
        RuntimeError: The viewer did not start.
    """
    server = run_view("--no-browser", *arguments)
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)
            if found:
                break
        else:
            raise RuntimeError("the viewer did not start: " + "".join(lines))
        yield found[0], server
    finally:
        server.terminate()
        try:
            server.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()
            raise
