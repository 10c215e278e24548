"""Format x event: sessions of real programs, of which each answer follows what the engine was sent.

The logs are made by `tests.real_harnesses.fixtures`, which cuts the makers' own texts. A cell is a log with a rewind, a compaction, a
fork, a resumed session, an interrupted answer, a sub-agent, or what only some programs do.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

import rollout_io
from rollout_io.conversion.plan import Keywords
from rollout_io.formats import gemini_cli, opencode
from rollout_io.formats.detect import load_formats
from rollout_io.formats.engines.files import Start
from rollout_io.formats.gemini_cli import BROKEN_OFF
from schemas.messages import is_answer
from tests.helpers.adapter_helpers import read_all
from tests.real_harnesses.fixtures import shortened
from tests.real_harnesses.plain import answer_of, prompt_of

SESSIONS = Path(__file__).parents[2] / "data" / "sessions"
CELLS = sorted(
    path.parent.relative_to(SESSIONS).as_posix() for path in SESSIONS.glob("*/*/sent.jsonl")
)
FORMATS = load_formats().adapters
NAMES = {"codex": "codex_cli", "pi1": "pi"}
SAID = {
    "gemini_cli/editor": gemini_cli.UNCALLED,
    "opencode/plan_mode": opencode.REMINDED,
    "opencode/unknown_tool": opencode.INVALID,
    "qwen_code/compaction": gemini_cli.REMINDER,
    "qwen_code/resumed": gemini_cli.REMINDER,
}
"""What the log lacks of what was sent, and the note that says so."""


def sent_in(cell):
    """By text: what the engine was sent and what it answered, with the prompts in full."""
    prompts, made = [], {}
    for line in (SESSIONS / cell / "sent.jsonl").read_text().splitlines():
        entry = json.loads(line)
        before = prompts[entry["base"]][: entry["keep"]] if prompts else []
        prompts.append([*before, *entry["messages"]])
        made[entry["answer"]] = entry | {"prompt": prompts[-1]}
    return made


def of_gemini(messages):
    """Messages without what Gemini's API has not: thoughts of earlier answers, ids of results."""
    made = []
    for role, said in messages:
        rest = []
        for kind, *facts in said:
            if kind == "text" and rest and rest[-1][0] == "text":
                rest[-1] = ["text", f"{rest[-1][1]}\n{facts[0]}"]
            elif kind != "thought":
                rest.append([kind, None, facts[1]] if kind == "result" else [kind, *facts])
        made.append([role, rest])
    return made


@pytest.mark.parametrize("cell", CELLS)
def test_each_answer_of_a_session_follows_what_was_sent_and_trains_once(cell, tmp_path):
    harness = cell.partition("/")[0]
    adapter = FORMATS[NAMES.get(harness, harness)]
    logs = shutil.copytree(SESSIONS / cell / "logs", tmp_path / "logs")
    files = [path for path in sorted(logs.rglob("*")) if path.is_file()]
    found, rejected = read_all(
        adapter, *filter(lambda file: adapter.recognizes(Start(file)), files)
    )
    assert [str(each.error) for each in rejected] == []
    notes = Counter()
    for _, trajectory in found:
        notes.update(trajectory.notes)
    sent, trained = sent_in(cell), Counter()
    for _, trajectory in found:
        for step in trajectory.steps:
            for i, message in enumerate(step.messages):
                if i < step.num_given or not is_answer(message):
                    continue
                said = answer_of(message)
                ((_, text),) = [each for each in said if each[0] == "text"]
                trained[text] += 1
                entry = sent[text]
                prompt, expected = prompt_of(step.messages[:i]), entry["prompt"]
                calls = [each[1:] for each in said if each[0] == "call"]
                calls = [[name.rpartition(".")[2], arguments] for name, arguments in calls]
                if harness == "codex":  # sections about tools that are off are not sent
                    lines = iter(prompt[0][1][0][1].split("\n"))
                    assert all(line in lines for line in expected[0][1][0][1].split("\n"))
                    prompt, expected = prompt[1:], expected[1:]
                if harness == "gemini_cli":
                    prompt, expected = of_gemini(prompt), of_gemini(expected)
                    prompt = json.loads(
                        json.dumps(prompt).replace(BROKEN_OFF, shortened(BROKEN_OFF))
                    )
                if cell not in SAID:
                    assert (prompt, calls) == (expected, entry["calls"]), text
    assert set(trained.values()) == {1}
    assert cell not in SAID or notes[SAID[cell]]
    lost = [
        text
        for text, each in sent.items()
        if each["is_of_agent"] and each["is_whole"] and text not in trained
    ]
    is_said = {what for what in notes if "left out" in what or what == SAID.get(cell)}
    assert len(lost) <= sum(notes[what] for what in is_said), lost


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("cell", CELLS)
def test_a_session_of_a_real_program_converts_with_a_tokenizer(cell, smollm2_dir, tmp_path):
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    made = rollout_io.convert(SESSIONS / cell / "logs", tmp_path / "ds", **choices)
    assert made.summary.num_rows > 0
