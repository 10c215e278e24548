"""Trials of the real Harbor, with its own agent, against a policy of ours: `make test-skyrl`."""

import asyncio
import json
import shutil

import pytest

from pipelines.generation.config import GenerateConfig
from pipelines.generation.generator import Generator, open_calls
from pipelines.generation.tasks import read_tasks, rows_of
from schemas.checker import validate
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.harness_helpers import Scripted

PYTHON = ROOT / ".venv-harbor" / "bin" / "python"
TASK = """version = "1.0"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
"""
VERIFIER = """folder="$(dirname "$0")/../logs/verifier"
if [ "$(cat hello.txt)" = hello ]; then echo 1 > "$folder/reward.txt"; else echo 0 > "$folder/reward.txt"; fi
"""
ANSWER = {
    "analysis": "a",
    "plan": "p",
    "commands": [{"keystrokes": "printf hello > hello.txt\n", "duration": 0.1}],
    "task_complete": True,
}
SETTINGS = {
    "environment": {"import_path": "tests.helpers.harbor_local:LocalEnvironment"},
    "agent": {
        "kwargs": {
            "max_turns": 3,
            "record_terminal_session": False,
            "model_info": {"max_input_tokens": 4096, "max_output_tokens": 512},
        }
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("agent", "reward", "error"),
    [({}, 1.0, None), ({"override_timeout_sec": 0.01}, None, "AgentTimeoutError")],
)
def test_trials_of_harbor_are_trajectories(tokenizer, tmp_path, agent, reward, error):
    if not PYTHON.exists():
        pytest.skip("no .venv-harbor: run `make test-skyrl`")
    if shutil.which("tmux") is None:
        pytest.skip("no tmux, in which Harbor's agent works")
    task = tmp_path / "tasks" / "hello"
    for name, text in (
        ("instruction.md", "Write hello."),
        ("task.toml", TASK),
        ("tests/test.sh", VERIFIER),
        ("environment/Dockerfile", "FROM scratch"),
    ):
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text, encoding="utf-8")
    given = SETTINGS | {"trials_dir": str(tmp_path), "agent": SETTINGS["agent"] | agent}
    (tmp_path / "trial.json").write_text(json.dumps(given))
    fields = "{path} {base_url} {model} {api_key} {reward_file}"
    script = f"{PYTHON} {EXAMPLES / 'harbor_trial.py'} {tmp_path / 'trial.json'} {fields}"
    config = GenerateConfig(
        tasks=str(task.parent),
        model="m",
        out="ds",
        harness=f"env PYTHONPATH={ROOT} {script}",
        host="0.0.0.0",  # as for agents in containers
        served_model_name="policy",
        group_size=2,
    )

    async def main():
        engine = Scripted(tokenizer, json.dumps(ANSWER))
        async with open_calls(config, engine, tokenizer) as calls:
            generator = Generator(engine, tokenizer, config, calls)
            return await generator.collect(read_tasks(config.tasks, config.group_size))

    finished = asyncio.run(main())
    for one in finished:
        assert (one.error is None) == (error is None), one.error
        assert error is None or error in one.error
    rows = rows_of(finished)
    validate(rows)
    if error is None:
        assert rows["reward"].to_pylist() == [0.0, reward] * 2
        assert rows["token_source"].to_pylist() == ["engine"] * 4
        assert rows["rollout_logprobs"].null_count == 0
