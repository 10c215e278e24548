"""Follow a guide of docs/guides/ as a reader does: save its files, run its commands."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from pipelines.harness.engine_api import EngineApp
from pipelines.record.serving import answering_at
from tests.conftest import ROOT
from trainer.engine.embedded import TransformersEngine

GUIDES = ROOT / "docs" / "guides"
VLLM = "http://127.0.0.1:8000"
BEFORE = ("python3 -m venv ", "pip ", "make ", "vllm ")
"""How the blocks begin that prepare a machine: those of the tests are prepared."""


def text_of(guide, part):
    """A guide, or what is below one of its headings, up to the next heading of that level or above."""
    page = (GUIDES / guide).read_text()
    if part is None:
        return page
    (found,) = re.finditer(rf"^(#+) {re.escape(part)}\n", page, re.MULTILINE)
    return re.split(rf"^#{{2,{len(found[1])}}} ", page[found.end() :], flags=re.MULTILINE)[0]


def blocks_of(guide, part=None):
    """The code of a guide in order: (language, file to save it as or None, code)."""
    page = text_of(guide, part)
    found = []
    for match in re.finditer(r"```(\w+)\n(.*?)```", page, re.DOTALL):
        above = page[: match.start()].rstrip().rpartition("\n\n")[2]
        name = re.search(r"[Ss]ave this as\s+`([\w.]+)`", above)
        found.append((match[1], name and name[1], match[2]))
    return found


def check_outputs(guide, printed, part=None):
    """The outputs that a guide shows ("It prints:") are lines of what its commands print, in order."""
    page = text_of(guide, part)
    shown = re.findall(r"prints?\b[^\n]*:\n\n```text\n(.*?)```", page, re.DOTALL)
    assert shown
    lines = iter([_compared(line) for line in printed.splitlines()])
    for line in "".join(shown).splitlines():
        if line.strip() != "...":
            assert _compared(line) in lines, f"{line!r} is not printed (there)"


def _compared(line):
    """A line without what differs between machines: times, speeds, losses."""
    line = re.sub(r"[\d.,]+ (s|kB|MB|tokens/s|rows/s)\b", r"# \1", line.rstrip())
    is_training = re.match(r"(update|iteration) \d+ of \d+: ", line)
    if not is_training:
        return line
    return is_training[0] + re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", line[is_training.end() :])


def follow(
    guide,
    folder,
    *,
    url=VLLM,
    part=None,
    model=ROOT / ".cache" / "smollm2",
    replaced=("", ""),
    places=(),
    programs=(),
    num_blocks=None,
):
    """Save the files of a guide in a folder, and run its commands there; their output.

    In the files, the first of `replaced`, which one of them must contain, becomes the second. In files
    and commands, the first of each of `places` becomes its second. `programs` are folders of programs.
    Without `num_blocks`, all blocks of commands are run.
    """
    assert not replaced[0] or any(replaced[0] in c for _, name, c in blocks_of(guide, part) if name)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "smollm2").symlink_to(model)
    folders = [*programs, Path(sys.executable).parent, os.environ["PATH"]]
    path = os.pathsep.join(map(str, folders))
    printed, num_run = "", 0
    places = (*places, (VLLM, url))
    for language, name, code in blocks_of(guide, part):
        for was, now in places:
            code = code.replace(was, now)
        if name:
            (folder / name).write_text(code.replace(*replaced))
        if language == "sh" and not code.startswith(BEFORE):
            done = subprocess.run(
                ["bash", "-ec", code],
                cwd=folder,
                env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{code}\n{done.stdout}"
            printed += done.stdout
            num_run += 1
            if num_run == num_blocks:
                break
    return printed


@contextmanager
def served(model):
    """The embedded engine as a server of a model directory, under the name "smollm2"; its URL."""
    ready, urls, stop = threading.Event(), [], asyncio.Event()

    async def serve():
        engine = TransformersEngine.load(str(model))
        async with (
            engine,
            answering_at(EngineApp(engine, engine.tokenizer, "smollm2")) as url,
        ):
            urls.append(url)
            ready.set()
            await stop.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(timeout=120)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
