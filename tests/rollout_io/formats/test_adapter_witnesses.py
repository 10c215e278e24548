"""Facts that formats of exact tokens state twice: where they differ, the run is refused by name."""

import json
import shutil

import pytest

from rollout_io import read_log
from schemas.errors import RolloutError
from tests.conftest import ROOT

PEERS = ROOT / "tests" / "data" / "peers"
TRACES = "verifiers/train/traces.jsonl"
ROWS = "verifiers/legacy/tokens/results.jsonl"
EPISODE = "rllm/eval_results/episodes/episode_000000_sum-2-3.json"
EVENTS = "agent_lightning/events.jsonl"
TRIAL = "harbor/jobs/hello/task__gmv7tyB"
TRAJECTORY = f"{TRIAL}/agent/trajectory.json"
TEXTS = ("slime/rollout_7.pt", EVENTS, "rllm/eval_results", TRACES, ROWS)


def copied(tmp_path, log):
    source, target = PEERS / log, tmp_path / log
    copy = shutil.copytree if source.is_dir() else shutil.copy
    target.parent.mkdir(parents=True, exist_ok=True)
    copy(source, target)
    if (metadata := source.parent / "metadata.json").is_file():
        shutil.copy(metadata, target.parent)
    return target


def edit(path, change):
    """Change the first record of a file."""
    lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
    first = json.loads(lines[0])
    change(first)
    path.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")


def count(*path):
    def change(record):
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] += 1

    return change


def move(*path):
    """Put the first value of a list last."""

    def change(record):
        for key in path:
            record = record[key]
        record.append(record.pop(0))

    return change


def beside(name, values):
    def change(record):
        record["data"][name] = values

    return change


CALL = ("traces", 0, "calls", 0, "usage")
ANSWER = ("trajectory", 0, "response")
OUTPUT = ("trajectories", 0, "steps", 0, "model_output")


@pytest.mark.parametrize(
    ("log", "file", "change", "rule"),
    [
        (TRACES, TRACES, count(*CALL, "prompt_tokens"), "usage_counts"),
        (TRACES, TRACES, count(*CALL, "completion_tokens"), "usage_counts"),
        (ROWS, ROWS, count(*ANSWER, "usage", "prompt_tokens"), "usage_counts"),
        (ROWS, ROWS, count(*ANSWER, "usage", "completion_tokens"), "usage_counts"),
        (ROWS, ROWS, move(*ANSWER, "message", "tokens", "prompt_ids"), "conflicting_ids"),
        (ROWS, ROWS, move(*ANSWER, "message", "tokens", "completion_ids"), "conflicting_ids"),
        (ROWS, ROWS, move(*ANSWER, "message", "tokens", "completion_logprobs"), "conflicting_ids"),
        (TRIAL, TRAJECTORY, count("steps", 1, "metrics", "prompt_tokens"), "usage_counts"),
        (TRIAL, TRAJECTORY, count("steps", 1, "metrics", "completion_tokens"), "usage_counts"),
        (EPISODE, EPISODE, move(*OUTPUT, "prompt_ids"), "conflicting_ids"),
        (EPISODE, EPISODE, move(*OUTPUT, "completion_ids"), "conflicting_ids"),
        (EPISODE, EPISODE, move(*OUTPUT, "logprobs"), "conflicting_ids"),
        (EVENTS, EVENTS, beside("response_token_ids", [1, 2]), "conflicting_ids"),
        (EVENTS, EVENTS, beside("prompt_token_ids", [1, 2]), "conflicting_ids"),
        (EVENTS, EVENTS, count("data", "response", "usage", "prompt_tokens"), "usage_counts"),
        (
            EVENTS,
            EVENTS,
            move("data", "response", "choices", 0, "logprobs", "content"),
            "logprob_tokens",
        ),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(log, file, change, rule, tmp_path):
    path = copied(tmp_path, log)
    assert read_log([path]).num_rows
    edit(tmp_path / file, change)
    with pytest.raises(RolloutError, match=rule):
        read_log([path])


def test_tokens_that_were_cut_to_the_trainers_length_are_no_contradiction(tmp_path):
    path = copied(tmp_path, ROWS)

    def cut(row):
        tokens = row["trajectory"][0]["tokens"]
        for name in ("completion_ids", "completion_mask", "completion_logprobs"):
            tokens[name] = tokens[name][:8]
        tokens["is_truncated"] = True

    edit(path, cut)
    assert len(read_log([path])["response_ids"][0]) == 8


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("log", TEXTS)
def test_the_text_of_every_format_tells_a_wrong_tokenizer(log, smollm2_dir, tmp_path):
    assert read_log([PEERS / log], tokenizer=str(smollm2_dir)).num_rows
    other = tmp_path / "other"
    shutil.copytree(smollm2_dir, other, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    plain = sorted(token for token, number in vocab.items() if number > 16)
    ids = [vocab[token] for token in plain]
    vocab.update(zip(plain, reversed(ids), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(RolloutError, match="other_tokenizer"):
        read_log([PEERS / log], tokenizer=str(other))
