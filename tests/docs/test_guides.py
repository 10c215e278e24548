"""Each guide leads from files to a checkpoint, with the commands that it shows."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollout_io.cli.main import run

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def commands(guide, places):
    """The `rollouts` commands of a guide, with its paths replaced."""
    for block in re.findall(r"```sh\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line)
            if words[0] == "rollouts":
                yield [places.get(word.rstrip("/"), word) for word in words[1:]]


@pytest.mark.slow
@pytest.mark.model
def test_a_folder_of_claude_code_sessions_becomes_a_checkpoint(harness_logs, smollm2_dir, tmp_path):
    places = {
        "sessions": str(harness_logs / "claude_code"),
        ".cache/smollm2": str(smollm2_dir),
        "claude": str(tmp_path / "claude"),
        "runs/claude": str(tmp_path / "run"),
    }
    given = list(commands("claude_code.md", places))
    assert [words[0] for words in given] == ["convert", "validate", "stats", "inspect", "train"]
    for words in given:
        assert run(words) == 0, words
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("global_step_*")
    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 1e8
