"""The guide of coding agents, with real agents: recorded, trained on, and run by the loop.

`tests/vllm/test_coding_agents.py` follows it with a vLLM server.
"""

import pytest

from tests.helpers.agent_guide import (
    AGENTS,
    HAS_AGENTS,
    check,
    check_recorded,
    check_trained,
    follow_with,
)
from tests.helpers.fake_engine import running
from tests.helpers.guide_helpers import served
from tests.real_harnesses.__main__ import shell
from tests.real_harnesses.exact_engine import ExactEngine

pytestmark = [pytest.mark.nightly, pytest.mark.model, HAS_AGENTS]


def test_two_attempts_of_each_agent_that_call_tools_become_an_update(narrow_smollm2, tmp_path):
    """With a prompt that makes the engine call the agent's shell."""
    calls = {name: shell(harness, "echo one") for name, harness in AGENTS.items()}
    cases = "".join(f"{name}) prompt='{call}';; " for name, call in calls.items())
    changes = [
        ("agent=$1 url=$2 prompt=$3", f"agent=$1 url=$2\ncase $agent in {cases}esac"),
    ]
    app = ExactEngine()
    with running(app) as url:
        follow_with(url, tmp_path, narrow_smollm2, changes, num_blocks=3)
    rows = check_recorded(tmp_path)
    assert len(rows) == len(app.answers)
    results = [m for body, _ in app.answers for m in body["messages"] if m["role"] == "tool"]
    assert sum("one" in str(message["content"]) for message in results) == 2 * len(AGENTS)
    update = check_trained(tmp_path)
    assert update["num_rows"] == len(rows)


def test_the_guide_ends_in_two_checkpoints(brief_smollm2, tmp_path):
    with served(brief_smollm2) as url:
        follow_with(url, tmp_path, brief_smollm2)
    check(tmp_path)
