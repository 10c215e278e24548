"""A Harbor environment without containers, for tests: run where Harbor is, on this machine.

The sandbox's absolute paths (/logs, /tests, ...) are in a directory of the trial.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

_OWN = re.compile(r"(?<![\w.$}/-])/(logs|tests|solution|installed-agent|app)(?=[/\s'\";)]|$)")


class LocalEnvironment(BaseEnvironment):
    """Runs commands as processes of this machine."""

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        self.root = self.trial_paths.trial_dir.resolve() / "sandbox"

    def _own(self, text: str) -> str:
        return _OWN.sub(lambda found: f"{self.root}/{found[1]}", text)

    async def start(self, force_build: bool) -> None:  # noqa: FBT001
        del force_build
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests"):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    async def stop(self, delete: bool) -> None:  # noqa: FBT001
        await self.exec("tmux kill-server")
        if delete:
            shutil.rmtree(self.root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = Path(self._own(target_path))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._own(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._own(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        source = Path(self._own(source_dir))
        if source.is_dir():
            shutil.copytree(source, target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        del user
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._own(command)),
            cwd=self._own(cwd or "/app"),
            env={
                **os.environ,
                "TMUX_TMPDIR": str(self.root),  # a server of its own, as in a container
                **{k: self._own(v) for k, v in (env or {}).items()},
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        code = process.returncode or 0
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=code)
