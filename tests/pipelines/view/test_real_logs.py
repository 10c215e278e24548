"""The viewer on what real harnesses and engines wrote: every view of every trajectory answers."""

import runpy

import pytest

from rollout_io import convert, scan
from rollout_io.conversion.plan import Keywords
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.log_view_helpers import different_texts, log_of
from tests.helpers.view_helpers import Asked

pytestmark = pytest.mark.slow

LOGS = {
    "claude code": ("claude_code/simonw.sample_session.jsonl", True),
    "harbor": ("harbor/golden/terminus_2", True),
    "nemo gym": ("harbor/nemo_gym_harbor_agent.example_output.jsonl", True),
    "inspect": ("inspect_ai/2025-05-12T20-28-26-04-00_security-guide.json", True),
    "forks": ("../vllm_calls/forks.calls.jsonl", False),
    "long": ("../vllm_calls/long.calls.jsonl", False),
}


@pytest.fixture(scope="module", params=LOGS)
def converted(request, harness_logs, smollm2_dir, tmp_path_factory):
    """A dataset, and questions about it."""
    name, is_text = LOGS[request.param]
    path = harness_logs / name
    if not path.exists():
        pytest.skip(f"no {path}")
    out = tmp_path_factory.mktemp("real") / "ds"
    tokenizer, template = str(smollm2_dir), "chatml_tools_thinking"
    text = Keywords(tokenizer=tokenizer, chat_template=template, on_error="skip")
    convert(path, out, **text if is_text else Keywords())
    return request.param, out, Asked(out, tokenizer=tokenizer)


def test_every_view_of_every_trajectory_answers(converted, tokenizer):
    name, path, ask = converted
    table = ask("/api/datasets/d0/trajectories", limit=1000)
    rows = scan(path).collect()
    assert (
        table["trajectory_id"].to_list()
        == rows["trajectory_id"].unique(maintain_order=True).to_list()
    )
    kinds = set()
    for trajectory_id in table["trajectory_id"].to_list()[:8]:
        of = {"trajectory_id": trajectory_id}
        told = ask("/api/datasets/d0/conversation", **of)
        kinds |= {p["type"] for lane in told["lanes"] for t in lane["turns"] for p in t["parts"]}
        tree = ask("/api/datasets/d0/tree", **of)
        own = rows.filter(**of)
        longest = (own["prompt_token_ids"].list.len() + own["response_ids"].list.len()).max()
        assert max((node["end"] for node in tree["nodes"]), default=0) == longest
        for row in own.sort("step_index").tail(2).to_dicts():
            found = ask("/api/datasets/d0/tokens", **of, step_index=row["step_index"])
            ids = row["prompt_token_ids"] + row["response_ids"]
            assert found["id"].to_list() == ids
            content = b"".join(found["bytes"]).decode("utf-8", "replace")
            assert content == tokenizer.decode(ids)
            assert found["trained"].sum() == sum(row["loss_mask"])
    assert "text" in kinds
    if name in {"claude code", "nemo gym"}:
        assert {"tool_call", "tool_result"} <= kinds


FOLDERS = ("harness_logs", "harness_logs_2026", "agent_traces", "vllm_calls")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_log_opens_unconverted_with_the_messages_of_a_conversion(
    folder, harness_logs, smollm2_dir, tmp_path
):
    root = harness_logs.parent / folder
    if not root.is_dir():
        pytest.skip(f"no {root}")
    choices = Keywords(
        tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking", on_error="skip"
    )
    formats, files_in = set(), runpy.run_path(str(ROOT / "docs" / "real_logs.py"))["files_in"]
    for number, path in enumerate(files_in(root)):
        out = tmp_path / str(number)
        try:
            convert(path, out, **choices)
        except RolloutError:
            continue
        ask = Asked(path)
        converted = scan(out).collect()
        assert different_texts(ask, converted) == [], path
        shown = ask("/api/datasets/d0/trajectories", limit=10_000)
        assert set(converted["trajectory_id"]) <= set(shown["trajectory_id"]), path
        for name in shown["trajectory_id"].to_list()[:3]:
            told = ask("/api/datasets/d0/conversation", trajectory_id=name)
            assert told["lanes"] or told["error"], path
        formats |= set(shown["format"])
        assert log_of(ask)["is_done"]
    assert len(formats) >= {"harness_logs": 10, "harness_logs_2026": 10}.get(folder, 1)
