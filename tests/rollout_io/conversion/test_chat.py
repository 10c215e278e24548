"""Re-tokenized rows keep their conversation in `messages`, through every verb."""

import json

import pytest
import torch

import rollout_io
from pipelines.drift_diagnosis.texts import read_messages
from rollout_io.cli.main import run
from rollout_io.cli.trajectory_text import view_trajectory
from rollout_io.conversion.plan import Keywords
from rollout_io.formats import slime_export
from schemas.messages import sent_messages
from tests.helpers.adapter_helpers import write_lines

pytestmark = pytest.mark.model

CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"path":"/"}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which files?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "a.txt", "tool_call_id": "c"},
    {"role": "assistant", "content": "Only a.txt."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Gladly."},
]
"""Three answers; a later message that no call saw is not part of the row."""


@pytest.fixture
def dataset(tmp_path, smollm2_dir):
    log = write_lines(
        tmp_path / "chat.jsonl",
        {"messages": [*CHAT, {"role": "user", "content": "Bye."}], "reward": 1.0},
        {"messages": CHAT[:2] + CHAT[4:5], "reward": 0.0},
    )
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    rollout_io.convert([log], tmp_path / "ds", **choices)
    return tmp_path / "ds"


def chats(dataset):
    return [json.loads(text) for text in rollout_io.read(dataset)["messages"].to_pylist()]


def test_a_row_of_several_turns_holds_the_chat_up_to_its_last_answer(dataset):
    assert chats(dataset) == [CHAT, CHAT[:2] + CHAT[4:5]]


def test_the_prompt_of_a_chat_is_what_precedes_its_first_answer(dataset):
    rows = rollout_io.read(dataset).to_pylist()
    assert [sent_messages(row) for row in rows] == [CHAT[:2]] * 2
    shown = {"messages": json.dumps(CHAT), "token_source": "engine"}
    assert sent_messages(shown) == CHAT
    unanswered = {"messages": json.dumps(CHAT[:2]), "token_source": "retokenized"}
    assert sent_messages(unanswered) == CHAT[:2]


@pytest.mark.parametrize("layout", ["prefix", "full"])
def test_the_chat_survives_every_verb(dataset, layout, tmp_path):
    merged, again, kept = (str(tmp_path / name) for name in ("merged", "again", "kept"))
    assert run(["merge", str(dataset), "--out", merged, "--layout", layout]) == 0
    assert run(["merge", "--undo", merged, "--out", again]) == 0
    assert run(["filter", again, "--where", "return > 0", "--out", kept]) == 0
    assert run(["validate", kept]) == 0
    assert chats(merged) == chats(again) == chats(dataset)
    assert chats(kept) == [CHAT]
    (step,) = view_trajectory(rollout_io.read(kept).to_pylist()).steps
    assert step.prompt == "user: Which files?"


def test_slime_gets_the_messages_that_were_sent(dataset, tmp_path):
    slime_export.write(dataset, tmp_path / "r.pt")
    samples = torch.load(tmp_path / "r.pt", weights_only=True)["samples"]
    assert [sample["prompt"] for sample in samples] == [CHAT[:2]] * 2


def test_drift_compares_whole_chats(dataset):
    """A second context that repeats the first is no change of its messages."""
    rows = rollout_io.read(dataset).to_pylist()
    again = json.dumps([*CHAT, {"role": "user", "content": "Bye."}, CHAT[4]])
    one = {"start": 0, "length": 1, "step_index": 0}
    later = {"messages": again, "token_source": "retokenized", "segments": [one]}
    assert read_messages(rows[0], later)[0] == "unchanged"
    assert read_messages(rows[0], later | {"segments": [one] * 2})[0] == "messages"
