"""Small logs of every format, taken apart into trees and put together again."""

import json
import shutil
import sqlite3
import zipfile
from contextlib import closing, suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.engines.files import members_of, read_member
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.conversation_writers import (
    GOOSE_TABLES,
    JSON,
    OPENCODE_TABLES,
    WRITERS,
    log_of,
    save_opencode,
)
from tests.helpers.structural_mutations import encoded
from tests.helpers.verifiers_helpers import episode, trace
from tests.rollout_io.formats.test_agent_programs import LOGS
from tests.rollout_io.formats.test_cline import SECOND
from tests.rollout_io.formats.test_fuzz import save_inline
from tests.rollout_io.formats.test_prime_rl_annotations import SCORED, SHIPPED, TRAINED, update

MAX_BYTES = 40_000
DATA = ROOT / "tests" / "data"
FORMATS = load_formats().adapters

ASKED = {"role": "user", "content": "List, then read a."}
NESTED = {"path": "a", "depth": 2, "all": [True, None, 1.5], "more": {"é": ""}}
CALLED = [("c1", "ls", {}), ("c2", "read", NESTED)]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    ASKED,
    {
        "role": "assistant",
        "content": "First,",
        "reasoning_content": "Two calls.",
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name, arguments in CALLED
        ],
    },
    {"role": "tool", "content": "a b", "tool_call_id": "c1"},
    {"role": "tool", "content": "caf\u00e9", "tool_call_id": "c2"},
    {"role": "assistant", "content": "It says caf\u00e9.", "tool_calls": []},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye \U0001f600", "tool_calls": []},
]


def _tokens(prompt, response):
    logprobs = [-0.5 - i / 8 for i in range(len(response))]
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return dict(zip(names, (prompt, response, logprobs), strict=True))


def _gym_row(rollout):
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "c"}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "6"}],
    }
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        call | _tokens([1, 2, 3], [4 + rollout, 5]),
        {"type": "function_call_output", "call_id": "c", "output": "6"},
        said | _tokens([1, 2, 3, 4 + rollout, 5, 6], [7, 8, 9]),
    ]
    usage = {"input_tokens": 9, "output_tokens": 5, "total_tokens": 14}
    response = {"id": f"r{rollout}", "object": "response", "output": output, "usage": usage}
    sent = {"input": [ASKED], "temperature": 1.0}
    names = {"_ng_task_index": 0, "_ng_rollout_index": rollout, "reward": float(rollout)}
    return {"responses_create_params": sent, "response": response, "mask_sample": False, **names}


def _nemo_rl_run(reward):
    log = [
        {"role": "user", "content": "hi", "token_ids": [1, 2]},
        {
            "role": "assistant",
            "content": "ho",
            "token_ids": [3, 4],
            "generation_logprobs": [-0.5, 0.0],
        },
        {"role": "user", "content": "hm", "token_ids": [5]},
        {"role": "assistant", "content": "ha", "token_ids": [6], "generation_logprobs": [-1.25]},
    ]
    return {"message_log": log, "full_result": {"reward": reward}, "length": 6}


def _save_made(folder):
    """Logs of formats of which only large or no real ones are at hand."""
    save_inline(folder)
    for number, name in enumerate((*WRITERS, "nemo_gym")):
        content, file = log_of(name, CONVERSATION)
        path = folder / f"{number}-{name.split(',')[0]}" / file
        path.parent.mkdir()
        path.write_bytes(content)
    rows = "".join(json.dumps(_gym_row(i)) + "\n" for i in range(3))
    (folder / "gym.jsonl").write_text(rows, encoding="utf-8")
    runs = {
        "expected_output": [_nemo_rl_run(1.0), _nemo_rl_run(0.0)],
        "input": [{"id": 0}, {"id": 1}],
    }
    (folder / "nemo_rl.json").write_text(json.dumps(runs), encoding="utf-8")
    result = {
        "id": "r",
        "trial_name": "t.1",
        "task_id": "t",
        "is_resolved": True,
        "failure_mode": "unset",
    }
    result |= {"parser_results": {"a": "passed"}, "total_input_tokens": 0, "recording_path": "a/b"}
    bench = {"id": "x", "results": [result], "accuracy": 1.0, "n_resolved": 1, "n_unresolved": 0}
    (folder / "results.json").write_text(json.dumps(bench), encoding="utf-8")
    programs = LOGS | {
        "openai_agents_trace": {"object": "trace.span", "id": "s", "span_data": {"type": "agent"}},
    }
    programs["roo"] = {"version": 2, "messages": SECOND}
    noted = [
        episode(trace(id="t1")),
        update(info=SHIPPED, branches=[SCORED]),
        update(branches=[TRAINED]),
    ]
    (folder / "annotated.jsonl").write_text("".join(json.dumps(r) + "\n" for r in noted))
    for name, log in programs.items():
        (folder / f"{name}.json").write_text(json.dumps(log), encoding="utf-8")
    shutil.copy(DATA / "inspect_zstd.eval", folder)


def find_sources(request, folder):
    """Paths of small logs by format."""
    _save_made(folder)
    roots = [folder, DATA / "peers"]
    with suppress(pytest.skip.Exception):
        roots.append(request.getfixturevalue("harness_logs"))
    found = {name: [EXAMPLES / "shop.calls.jsonl"] if name == "calls" else [] for name in FORMATS}
    for path in sorted(path for root in roots for path in root.rglob("*")):
        if path.suffix in {".jsonl", ".pt", ".parquet", ".eval"} or _size(path) <= MAX_BYTES:
            for name in recognize(path, FORMATS):
                found[name].append(path)
    return found


def _size(path):
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


class Log:
    """A copy of a log in a folder, one file of which is a tree.

    Attributes:
        path: What is to be converted: the copy, or the directory that it is in.
        tree: What the file says.
    """

    def __init__(self, source, rng, folder):
        self.path = folder / source.name
        if source.is_dir():
            shutil.copytree(source, self.path)
            files = sorted(p for p in self.path.rglob("*") if p.suffix in {".json", ".jsonl"})
            self.file = rng.choice(files)
        else:
            shutil.copy(source, self.path)
            self.file = self.path
            self.file.chmod(0o644)
        self.is_lines = self.file.suffix == ".jsonl"
        self.tree = self._read(rng)

    def _read(self, rng):
        if self.is_lines:
            return [json.loads(line) for line in _some_lines(self.file.read_bytes(), rng)]
        if self.file.suffix == ".parquet":
            return pq.read_table(self.file).to_pylist()
        if self.file.suffix == ".db":
            self.columns = _columns_of(self.file)
            return _tables(self.file, self.columns)
        if self.file.suffix == ".pt":
            import torch

            return torch.load(self.file, weights_only=True)
        if self.file.suffix == ".eval":
            names = members_of(self.file, "")  # Python's zipfile has no Zstandard
            self.members = {name: read_member(self.file, name, "") for name in names}
            self.member = rng.choice([name for name in names if "sample" in name or "head" in name])
            return json.loads(self.members[self.member])
        return json.loads(self.file.read_bytes())

    def write(self, tree, rng):
        """Put the file together from a tree.

        Raises:
            ValueError, TypeError, OverflowError: The file's format has no place for such a tree.
        """
        if self.is_lines and isinstance(tree, list):
            self.file.write_bytes(b"".join(encoded(line, rng) + b"\n" for line in tree))
        elif self.file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(tree), self.file)
        elif self.file.suffix == ".db":
            save_opencode(self.file, tree, self.columns)
        elif self.file.suffix == ".pt":
            import torch

            torch.save(tree, self.file)
        elif self.file.suffix == ".eval":
            with zipfile.ZipFile(self.file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in self.members.items():
                    archive.writestr(name, encoded(tree, rng) if name == self.member else content)
        else:
            self.file.write_bytes(encoded(tree, rng))


def _columns_of(path):
    with closing(sqlite3.connect(path)) as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    return GOOSE_TABLES if "sessions" in names else OPENCODE_TABLES


def _tables(path, columns_of):
    found = {}
    with closing(sqlite3.connect(path)) as database:
        for name, columns in columns_of.items():
            rows = database.execute(f"SELECT {', '.join(columns)} FROM {name}").fetchall()
            found[name] = [dict(zip(columns, row, strict=True)) for row in rows]
            for row in found[name]:
                row |= {key: json.loads(row[key]) for key in JSON if row.get(key) is not None}
    return found


def _some_lines(content, rng):
    """Lines that are JSON, one after the other, as many as fit."""
    lines = [line for line in content.split(b"\n") if line.strip() and _is_json(line)]
    if sum(map(len, lines)) <= MAX_BYTES:
        return lines
    at, some = rng.randrange(len(lines)), []
    for line in lines[at:]:
        some.append(line)
        if sum(map(len, some)) > MAX_BYTES:
            break
    return some


def _is_json(line):
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
