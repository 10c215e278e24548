"""For Harbor: terminus-2 with a short prompt, and a temporary folder that stands for /."""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult

ROOTED = re.compile(r"(?<![\w.])/(?=(?:app|logs|tests|solution|artifacts|installed-agent)\b)")


class ShortTerminus(Terminus2):
    def _get_prompt_template_path(self):
        return Path(__file__).parent / "prompt.txt"


class ShellEnvironment(BaseEnvironment):
    @staticmethod
    def type():
        return "shell"

    def _validate_definition(self):
        pass

    async def start(self, force_build):  # noqa: ARG002
        self.root = tempfile.mkdtemp(prefix="box-", dir="/tmp")
        for folder in ["app", "logs/agent", "logs/verifier", "logs/artifacts", "tests"]:
            Path(self.root, folder).mkdir(parents=True)

    async def stop(self, delete):  # noqa: ARG002
        await self.exec("tmux kill-server")
        shutil.rmtree(self.root, ignore_errors=True)

    def inside(self, text):
        return ROOTED.sub(f"{self.root}/", str(text))

    async def upload_file(self, source_path, target_path):
        target = Path(self.inside(target_path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.inside(Path(source_path).read_text()))
        target.chmod(0o755)

    async def upload_dir(self, source_dir, target_dir):
        for path in Path(source_dir).rglob("*"):
            if path.is_file():
                await self.upload_file(path, Path(target_dir, path.relative_to(source_dir)))

    async def download_file(self, source_path, target_path):
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self.inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):  # noqa: ARG002
        own = {"HOME": self.root, "TMUX_TMPDIR": self.root, "PS1": "$ ", "TERM": "xterm"}
        options = {"cwd": self.inside(cwd or "/app"), "env": {**os.environ, **own, **(env or {})}}
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        line = ["bash", "-c", self.inside(command)]
        process = await asyncio.create_subprocess_exec(*line, **options, **pipes)
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec or 60)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)
