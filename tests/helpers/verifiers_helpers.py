"""Records of verifiers, as its writers shape them."""

import json

from rollout_io.formats.verifiers import ADAPTER
from tests.conftest import ROOT
from tests.helpers.adapter_helpers import read_all, write_lines

PEER = ROOT / "tests" / "data" / "peers" / "verifiers"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"


def node(parent, role="user", ids=(), mask=(), logprobs=(), **fields):
    message = {"role": role, "content": f"{role} {list(ids)}"}
    found = {"message": message, "sampled": role == "assistant", "token_ids": list(ids)}
    found |= {"mask": [bool(m) for m in mask] or [False] * len(ids), "logprobs": list(logprobs)}
    return found | ({} if parent is None else {"parent": parent}) | fields


def turns():
    """A prompt of 1 2, a header 3, an answer 4 5 with an appended 6, another turn."""
    return [
        node(None, ids=[1, 2]),
        node(0, "assistant", [3, 4, 5, 6], [0, 1, 1, 0], [-0.5, -0.25]),
        node(1, ids=[7]),
        node(2, "assistant", [3, 8], [0, 1], [-1.0]),
    ]


def trace(nodes=None, **fields):
    agent = {"name": "agent", "trainable": True}
    rewards = {"correct": {"score": 1.0, "weight": 1.0}, "brief": {"score": 0.5, "weight": 0.5}}
    found = {"agent": agent, "nodes": turns() if nodes is None else nodes, "rewards": rewards}
    return {**found, "metrics": {"chars": 7}, "ok": True, "errors": []} | fields


def episode(*traces, id="e1", **fields):
    found = {"id": id, "task": {"type": "T", "data": {}, "key": "k1"}, "ok": True, "errors": []}
    return found | {"traces": list(traces) or [trace()]} | fields


def row(**fields):
    found = {"example_id": 3, "reward": 1.0, "metrics": {"a": 0.5}, "timing": {"total": 1.0}}
    found |= {"prompt": [{"role": "user", "content": "hi"}]}
    return found | {"completion": [{"role": "assistant", "content": "ho"}]} | fields


def call(prompt, response, **fields):
    lists = {"prompt_ids": prompt, "prompt_mask": [0] * len(prompt), "completion_ids": response}
    lists |= {"completion_mask": [1] * len(response)}
    lists |= {"completion_logprobs": [-0.5] * len(response)}
    tokens = fields.pop("tokens", lists)
    return {"tokens": tokens, "reward": 1.0, "trajectory_id": "t", "prompt": []} | fields


def read(tmp_path, *records, name="traces.jsonl"):
    (found,), rejected = read_all(ADAPTER, write_lines(tmp_path / name, *records))
    assert not rejected
    return found[1]


def refusal(tmp_path, *records):
    runs, rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *records))
    assert not runs
    return rejected[0].error


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
