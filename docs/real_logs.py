"""Convert public logs for the generated table of docs/formats/real_logs.md.

`python docs/real_logs.py LOGS` writes the table; tests/rollout_io/formats/test_real_logs.py checks it. Text is
re-tokenized with Qwen3's tokenizer and official chat template, from installed packages.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import polars as pl

import rollout_io
from rollout_io.conversion.chunk import INCOMPLETE
from rollout_io.conversion.opened_logs import AUTO
from rollout_io.conversion.plan import Keywords
from rollout_io.conversion.staging import rejected_path
from rollout_io.formats.detect import load_formats, recognize
from schemas.errors import RolloutError

PAGE = Path(__file__).parent / "formats" / "real_logs.md"
BEGIN, END = "<!-- begin generated: real logs -->\n", "<!-- end generated: real logs -->\n"
HEAD = "| file | format | records | trajectories | rows | tokens | not used, and why |"
BESIDE = {"harness_logs_2026": "2026/", "agent_traces": "agent_traces/"}
_STORAGE = "storage_v2"
_SKIPPED = {"SOURCES.md"}
_REASON_CHARS = 150


def real_logs_table(logs: Path, tokenizer: Path) -> str:
    """Build a table with one row per file below a directory of logs, and in the folders beside it."""
    beside = [logs.parent / name for name in BESIDE if (logs.parent / name).is_dir()]
    lines = [_row(f, root, tokenizer) for root in (logs, *beside) for f in files_in(root)]
    return "\n".join([HEAD, "|---|---|---|---|---|---|---|", *lines])


def files_in(logs: Path) -> list[Path]:
    """List the files below a directory of logs; OpenCode's storage, a directory, is one log."""
    files = [p for p in logs.rglob("*") if p.is_file() and p.name not in _SKIPPED]
    return sorted({next((d for d in p.parents if d.name == _STORAGE), p) for p in files})


def _row(path: Path, logs: Path, tokenizer: Path) -> str:
    name = BESIDE.get(logs.name, "") + path.relative_to(logs).as_posix()
    found = " or ".join(recognize(path, load_formats().adapters)) or "-"
    is_text = found != "-" and load_formats().adapters[found].is_text
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ds"
        choices = Keywords(
            format=AUTO, on_error="skip", tokenizer=str(tokenizer) if is_text else None
        )
        try:
            counts = rollout_io.convert([path], out, **choices).summary
            records, trajectories = counts.num_records, counts.num_trajectories
            rows, tokens = counts.num_rows, _sources(out)
        except RolloutError as error:
            records, trajectories, rows, tokens = _num_rejected(out), 0, 0, "-"
            if not Path(rejected_path(out)).exists():
                cells = [f"`{name}`", found, "-", 0, 0, "-", _shown(error.rule, error.got, logs)]
                return "| " + " | ".join(map(str, cells)) + " |"
        cells = [f"`{name}`", found, records, trajectories, rows, tokens, _reasons(out, logs)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _sources(out: Path) -> str:
    found = rollout_io.scan(out).select(pl.col("token_source").unique().sort()).collect()
    return ", ".join(found["token_source"])


def _rejected(out: Path) -> pl.DataFrame:
    path = Path(rejected_path(out))
    schema = dict.fromkeys(("rule", "got"), pl.String)
    return pl.read_ndjson(path, schema=schema) if path.exists() else pl.DataFrame(schema=schema)


def _num_rejected(out: Path) -> int:
    return len(_rejected(out))


def _reasons(out: Path, logs: Path) -> str:
    """List the rules that rejected records break, each with its count and first error."""
    rejected = _rejected(out)
    firsts: dict[str, str] = {}
    for rule, got in sorted(rejected.iter_rows(), key=lambda row: row[0] == INCOMPLETE):
        firsts.setdefault(rule, got)
    counts = Counter(rejected["rule"])
    return "; ".join(f"{counts[rule]} x {_shown(rule, got, logs)}" for rule, got in firsts.items())


def _shown(rule: str, got: str, logs: Path) -> str:
    if rule == "other_tokenizer":  # leave out the tokenizer's temporary path
        got = f"the tokenizer{got[got.index(' decodes ') :]}"
    text = " ".join(got.replace(f"{logs}/", "").replace("|", "\\|").split())
    return f"`{rule}`: {text[:_REASON_CHARS]}{'...' if len(text) > _REASON_CHARS else ''}"


def page_with(table: str) -> str:
    """Return the formats page with this table."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE} lacks the comments around the generated table"
    return f"{before}{begin}{table}\n{end}{after}"


def main() -> None:
    """Write the table into the formats page."""
    from tests.helpers.qwen import chat_template_of, save_qwen3

    with tempfile.TemporaryDirectory() as folder:
        save_qwen3(Path(folder), chat_template_of("qwen3"))
        PAGE.write_text(page_with(real_logs_table(Path(sys.argv[1]).resolve(), Path(folder))))


if __name__ == "__main__":
    main()
