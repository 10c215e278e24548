"""Make sessions of the real harnesses: `python -m tests.real_harnesses OUT [HARNESS...]`.

OUT/HARNESS/SCENARIO is a home directory with the logs as the harness wrote them; `requests.jsonl` in
it has every request that the engine received, with the answer, in order. The programs are those of
`make .venv-harnesses/.ready`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.real_harnesses.engine import Engine
from tests.real_harnesses.harnesses import (
    Home,
    claude_code,
    claude_code_queued,
    codex,
    gemini_cli,
    opencode,
    pi,
    png,
)

SHELLS = {
    "claude_code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "gemini_cli": ("run_shell_command", "command"),
    "opencode": ("bash", "command"),
    "pi": ("bash", "command"),
}
ASK: dict[str, Callable[..., None]] = {
    "claude_code": claude_code,
    "codex": codex,
    "gemini_cli": gemini_cli,
    "opencode": opencode,
    "pi": pi,
}
RESUME = {
    "claude_code": ("-c",),
    "codex": ("resume", "--last"),
    "gemini_cli": ("--resume", "latest"),
    "opencode": ("-c",),
    "pi": ("-c",),
}


def shell(harness: str, command: str) -> str:
    """Return the line of a prompt that makes the engine call the harness's shell."""
    name, key = SHELLS[harness]
    return f"CALL {name} {json.dumps({key: command, 'description': 'x'})}"


def plain(harness: str, home: Home) -> None:
    """A session of one prompt and two calls, the second of which fails."""
    calls = [shell(harness, "echo one"), shell(harness, "echo two >&2; exit 3")]
    ASK[harness](home, "First prompt.\n" + "\n".join(calls))


def parallel(harness: str, home: Home) -> None:
    """Two calls in one answer."""
    both = " AND ".join(shell(harness, f"echo {word}") for word in ("left", "right"))
    ASK[harness](home, f"Both.\n{both}")


def resumed(harness: str, home: Home) -> None:
    """A session that is resumed once."""
    plain(harness, home)
    ASK[harness](home, "Second prompt.\n" + shell(harness, "echo again"), *RESUME[harness])


SMALL: dict[str, dict[str, object]] = {
    "codex": {"model_auto_compact_token_limit": 1100},
    "gemini_cli": {"model": {"compressionThreshold": 1e-6}},
    "opencode": {"limit": {"context": 92, "output": 12}},
    "pi": {"compaction": {"reserveTokens": 127_920, "keepRecentTokens": 100}},
}
"""Settings by which a harness soon compacts its context."""


def compacted(harness: str, home: Home) -> None:
    """A session that is compacted between two prompts."""
    plain(harness, home)
    if harness == "claude_code":
        claude_code(home, "/compact", "-c")
        claude_code(home, "After it.\n" + shell(harness, "echo three"), "-c")
    else:
        prompt = "After it.\n" + shell(harness, "echo three")
        ASK[harness](home, prompt, *RESUME[harness], settings=SMALL[harness])


def image(harness: str, home: Home) -> None:
    """A picture in the prompt, or read by a tool."""
    path = png(home.project / "dot.png")
    read = {"claude_code": "Read", "opencode": "read", "pi": "read"}
    key = {"claude_code": "file_path", "opencode": "filePath", "pi": "path"}
    if harness in read:
        call = f"CALL {read[harness]} {json.dumps({key[harness]: str(path)})}"
        options = {"opencode": ("-f", str(path)), "pi": (f"@{path}",)}.get(harness, ())
        ASK[harness](home, f"Look.\n{call}", *options)
    elif harness == "gemini_cli":
        call = f"CALL read_file {json.dumps({'file_path': str(path)})}"
        gemini_cli(home, f"Look at @{path.name}\n{call}")
    else:
        codex(home, "What is in it?", "-i", str(path))


def sub_agents(harness: str, home: Home) -> None:
    """A sub-agent; of Claude Code two, one of which forks the context."""
    if harness == "opencode":
        task = {"description": "d", "prompt": "Look around.", "subagent_type": "general"}
        opencode(home, f"Delegate.\nCALL task {json.dumps(task)}")
        return
    if harness == "codex":
        wait = shell(harness, "sleep 5")
        codex(
            home, f"Delegate.\nCALL spawn_agent {json.dumps({'message': 'Look around.'})}\n{wait}"
        )
        return
    if harness == "gemini_cli":
        task = {"agent_name": "generalist", "prompt": "Look around."}
        gemini_cli(home, f"Delegate.\nCALL invoke_agent {json.dumps(task)}")
        return
    task = {"description": "d", "prompt": "Look around."}
    kinds = ("general-purpose", "fork")
    calls = [f"CALL Agent {json.dumps(task | {'subagent_type': kind})}" for kind in kinds]
    claude_code(home, "\n".join(calls), CLAUDE_CODE_FORK_SUBAGENT="1")


def forked(harness: str, home: Home) -> None:
    """A session of Claude Code that is compacted, resumed and forked."""
    compacted(harness, home)
    claude_code(home, "In the fork.", "-c", "--fork-session")


def queued(harness: str, home: Home) -> None:
    """A prompt that is sent to Claude Code while a tool runs."""
    wait = shell(harness, "until test -e queued; do sleep 0.1; done")
    claude_code_queued(home, wait, "Rename it too.")


SCENARIOS: dict[str, dict[str, Callable[[str, Home], None]]] = {
    "claude_code": {
        "plain": plain,
        "parallel": parallel,
        "resumed": resumed,
        "compacted": compacted,
        "image": image,
        "sub_agents": sub_agents,
        "forked": forked,
        "queued": queued,
    },
    "codex": {
        "plain": plain,
        "parallel": parallel,
        "resumed": resumed,
        "compacted": compacted,
        "image": image,
        "sub_agents": sub_agents,
    },
    **{
        name: {
            "plain": plain,
            "parallel": parallel,
            "resumed": resumed,
            "compacted": compacted,
            "image": image,
            **({} if name == "pi" else {"sub_agents": sub_agents}),
        }
        for name in ("gemini_cli", "opencode", "pi")
    },
}


def make(harness: str, scenario: str, path: Path) -> Engine:
    """Run a scenario in a home directory; return the engine, with what it was sent."""
    engine = Engine().start()
    try:
        SCENARIOS[harness][scenario](harness, Home(path, engine))
    finally:
        engine.shutdown()
        engine.server_close()
    return engine


def main(out: str, *names: str) -> None:
    """Make all sessions of some harnesses, by default of all."""
    for harness in names or SCENARIOS:
        for scenario in SCENARIOS[harness]:
            path = Path(out).resolve() / harness / scenario
            engine = make(harness, scenario, path)
            lines = [json.dumps(asdict(exchange)) for exchange in engine.exchanges]
            (path / "requests.jsonl").write_text("\n".join(lines) + "\n")
            sys.stdout.write(f"{path}: {len(lines)} requests\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
