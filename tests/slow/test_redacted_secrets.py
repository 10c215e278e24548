"""Planted secrets of 32 kinds are gone from every column, from the token ids and from the files.

Files are read with pyarrow and decoded with Transformers, not with the project's readers.
"""

import json
import random
import re

import pyarrow.parquet as pq
import pytest

import pipelines
import rollout_io
from pipelines.merging.merge import merge_table, unmerge_table
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from rollout_io.redaction.redact import Findings, redact
from rollout_io.redaction.scanner import Rules
from tests.conftest import ROOT
from tests.helpers.planted_secrets import KINDS, secrets
from tests.rollout_io.formats.test_source_is_kept import WRITERS

pytestmark = [pytest.mark.slow, pytest.mark.model]
RULES = Rules.of({})
PER_FORMAT = 55
PLACES = ("the key is {}", "export TOKEN={}\n", "use ({}).", "<key>{}</key>", 'key = "{}", ok')


def core(secret):
    """Characters from inside a secret, of its second line if it has several."""
    return secret.split("\n")[1] if "\n" in secret else secret[8:]


def everything(dataset, tokenizer):
    """All that the files of a dataset say: columns, footers, and ids as text."""
    texts = []
    for file in sorted(dataset.rglob("*.parquet")):
        table = pq.read_table(file)
        texts += [str(pq.read_metadata(file).metadata), str(table.schema)]
        for name in table.column_names:
            texts += [json.dumps(v, default=str) for v in table.column(name).to_pylist()]
            if "ids" in name:
                texts += [tokenizer.backend.decode(ids) for ids in table.column(name).to_pylist()]
    rows = rollout_io.read(dataset).to_pylist()
    texts += [tokenizer.decode([*r["prompt_token_ids"], *r["response_ids"]]) for r in rows]
    return re.sub(r"\\+n", "\n", "\n".join(texts)).replace("\\", "")


def conversation(planted, draw):
    """A conversation with secrets in the user's text, in arguments, in a result and in an answer."""
    messages = []
    for number in range(0, len(planted), 4):
        said = [draw.choice(PLACES).format(s) for _, s in planted[number : number + 4]]
        said += ["ok"] * (4 - len(said))
        call = {"id": f"c{number}", "function": {"name": "bash", "arguments": {"command": said[1]}}}
        messages += [
            {"role": "user", "content": said[0]},
            {"role": "assistant", "content": "I run it.", "tool_calls": [call]},
            {"role": "tool", "content": said[2], "tool_call_id": f"c{number}"},
            {"role": "assistant", "content": said[3], "tool_calls": []},
        ]
    return messages


def calls_log(planted, tokenizer, draw):
    """Calls whose prompts and responses cut secrets anywhere, and tokens that cut them anywhere."""

    def ids(text):
        cuts = sorted(draw.sample(range(len(text)), min(len(text), 12)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [i for p in parts for i in tokenizer.backend.encode(p, add_special_tokens=False)]

    lines = []
    for number in range(0, len(planted), 5):
        prompt = ids("system\n")
        for _, secret in planted[number : number + 5]:
            text = draw.choice(PLACES).format(secret) + "\n"
            at = text.index(secret) + draw.randrange(1, len(secret))
            prompt += ids(text[:at])
            response = ids(text[at:])
            logprobs = [{"logprob": -0.5} for _ in response]
            choice = {"index": 0, "token_ids": response, "logprobs": {"content": logprobs}}
            messages = [{"role": "user", "content": text}]
            answer = {"prompt_token_ids": prompt, "choices": [choice]}
            call = {
                "session": f"s-{number}/0",
                "request": {"messages": messages},
                "response": answer,
            }
            lines.append(json.dumps(call))
            prompt = [*prompt, *response]
    return "\n".join(lines)


def check_marks(before, after):
    """Where an id was replaced, nothing trains and nothing is told of the token; else all is kept."""
    for old, new in zip(before.to_pylist(), after.to_pylist(), strict=True):
        for at, (was, now) in enumerate(zip(old["response_ids"], new["response_ids"], strict=True)):
            gone = new["redacted"][at]
            assert gone or was == now or not (old["loss_mask"][at] or new["loss_mask"][at])
            assert new["loss_mask"][at] == (old["loss_mask"][at] and not gone)
            if new.get("rollout_logprobs"):
                kept = old["rollout_logprobs"][at]
                assert new["rollout_logprobs"][at] == (0.0 if gone else kept)


def test_planted_secrets_of_all_formats_are_gone(tmp_path, tokenizer, smollm2_dir):
    draw = random.Random(1)
    num_exact = 440
    planted = secrets(num_exact + PER_FORMAT * len(WRITERS))
    assert len(planted) > 2_000
    assert len({kind for kind, _ in planted}) == len(KINDS) > 30
    logs = {"calls": (calls_log(planted[:num_exact], tokenizer, draw), "calls.jsonl")}
    own = {"calls": planted[:num_exact]}
    for number, (name, (write, file)) in enumerate(WRITERS.items()):
        own[name] = planted[num_exact + number * PER_FORMAT :][:PER_FORMAT]
        logs[name] = (write(conversation(own[name], draw)), file)
    missed, num_planted = [], 0
    for number, (name, (content, file)) in enumerate(logs.items()):
        path, raw, clean = (tmp_path / f"{number}{part}" for part in ("", "-raw", "-clean"))
        path.mkdir()
        (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        template = None if name == "calls" else "chatml_tools_thinking"
        given = {"tokenizer": str(smollm2_dir), "chat_template": template}
        choices = Keywords(format=name.split(",")[0], **given)
        rollout_io.convert([path / file], raw, **choices)
        before = everything(raw, tokenizer)
        there = [(kind, secret) for kind, secret in own[name] if core(secret) in before]
        assert len(there) > 0.6 * len(own[name]), name
        redact(str(raw), str(clean), RULES, tokenizer=str(smollm2_dir))
        assert run(["validate", str(clean)]) == 0
        after = everything(clean, tokenizer)
        num_planted += len(there)
        missed += [(name, kind) for kind, secret in there if core(secret) in after]
        check_marks(rollout_io.read(raw), rollout_io.read(clean))
    assert num_planted >= 2_000
    assert len(missed) <= 0.01 * num_planted, missed


def test_redaction_and_merging_commute(tmp_path, tokenizer, smollm2_dir):
    (tmp_path / "a.jsonl").write_text(calls_log(secrets(60), tokenizer, random.Random(2)))
    raw, clean = tmp_path / "raw", tmp_path / "clean"
    rollout_io.convert([tmp_path / "a.jsonl"], raw, tokenizer=str(smollm2_dir))
    redact(str(raw), str(clean), RULES, tokenizer=str(smollm2_dir))
    steps, table = rollout_io.read(clean), rollout_io.read(raw)
    merged = merge_table(steps)
    assert merged.num_rows == merge_table(table).num_rows < steps.num_rows
    assert unmerge_table(merged).select(steps.column_names).equals(steps)
    with rollout_io.RolloutWriter(
        tmp_path / "merged", metadata=rollout_io.read_metadata(raw)
    ) as to:
        for rows in pipelines.merge(rollout_io.scan(raw)).collect_batches():
            to.write(rows)
    redact(str(tmp_path / "merged"), str(tmp_path / "both"), RULES, tokenizer=str(smollm2_dir))
    names = ["prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "redacted"]
    assert rollout_io.read(tmp_path / "both").select(names).equals(merged.select(names))


def test_real_logs_have_hardly_a_false_hit(harness_logs):
    found, num_lines = Findings(), 0
    folders = [
        harness_logs,
        *(harness_logs.parent / n for n in ("harness_logs_2026", "agent_traces")),
    ]
    files = [file for folder in folders for file in folder.rglob("*.*") if file.is_file()]
    files += (ROOT / "examples").rglob("*.jsonl")
    for file in files:
        for line in file.read_bytes().splitlines():
            found.scan(line, RULES)
            num_lines += 1
    num_hits = sum(map(len, found.secrets.values()))
    assert num_lines > 1_000
    assert num_hits <= num_lines / 10_000
