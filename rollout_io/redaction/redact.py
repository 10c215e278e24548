"""Redaction of a dataset: one pass finds the secrets, a second one replaces them everywhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_io.dataset.blobs import names_in
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.reader import iter_tables, pieces, read_metadata
from rollout_io.dataset.rewriting import rewrite
from rollout_io.dataset.sources import Sources
from rollout_io.redaction.literals import Literals, cut_parts, views, widened
from rollout_io.redaction.scanner import CONTEXT_BYTES, Found, Rules, scan
from rollout_io.redaction.tables import REDACTED, Redactor, sampled_ranges
from rollout_io.redaction.values import has_text, texts_in
from rollout_io.retokenize.local import is_other_tokenizer, not_found, remembered_tokenizer
from rollout_io.retokenize.token_bytes import TokenBytes, load_token_bytes
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InputError
from schemas.metadata import DatasetMetadata, Layout
from schemas.ragged import Ragged, zipped

_TOKENS = ("prompt_token_ids", "response_ids")
_MARK = re.compile(rb"\[REDACTED_(\d{1,15})\]|\*{4,}|x{8,}")
_PARTS = re.compile(  # between the texts of two parts of a message
    rb'\\*"\s*(?:,\s*\\*"\w+\\*"\s*:\s*\\*"\w*\\*"\s*)*\}\s*,\s*\{\s*'
    rb'(?:\\*"\w+\\*"\s*:\s*\\*"\w*\\*"\s*,\s*)*\\*"(?:text|content)\\*"\s*:\s*\\*"'
)


@dataclass(slots=True)
class Findings:
    """The secrets that a scan found.

    Attributes:
        literals: What to search for, in the order in which it was found.
        secrets: The secrets of each kind; some have several literals.
        num_marks: Number of marks that earlier redactions may have used.
        num_rows: Number of rows whose new text contains a secret of each kind.
        blobs: Names of the pictures and documents of the rows.
    """

    literals: dict[bytes, None] = field(default_factory=dict)
    secrets: dict[str, set[bytes]] = field(default_factory=dict)
    num_rows: Counter[str] = field(default_factory=Counter)
    blobs: set[str] = field(default_factory=set)
    num_marks: int = 0

    def add(self, other: Findings) -> None:
        """Add what another scan found."""
        self.literals |= other.literals
        for kind, secrets in other.secrets.items():
            self.secrets.setdefault(kind, set()).update(secrets)
        self.num_rows += other.num_rows
        self.blobs |= other.blobs
        self.num_marks = max(self.num_marks, other.num_marks)

    @property
    def known(self) -> Literals:
        """The search for all secrets that were found; their marks are new."""
        return Literals(tuple(self.literals), self.num_marks)

    def scan(self, text: bytes, rules: Rules, num_known: int = 0) -> set[str]:
        """Scan a text, as it is and without escapes, for secrets that end after `num_known` bytes.

        Returns:
            The kinds of these secrets.
        """
        kinds: set[str] = set()
        numbers = [int(mark[1]) + 1 for mark in _MARK.finditer(text) if mark[1]]
        self.num_marks = max((self.num_marks, *numbers))
        for view in views(text):
            for hit in scan(view.content, rules):
                if view.span(hit.start, hit.end)[1] > num_known:
                    kinds |= self._add(view.content, hit)
        if gaps := [match.span() for match in _PARTS.finditer(text)]:
            pieces = [text[a:b] for (_, a), (b, _) in pairwise([(0, 0), *gaps, (len(text), 0)])]
            cuts, whole = list(accumulate(map(len, pieces[:-1]))), b"".join(pieces)
            for hit in scan(whole, rules):
                for part in cut_parts(whole, hit.start, hit.end, cuts):
                    self.literals[part] = None
                    kinds |= self._add(whole, hit)
        return kinds

    def _add(self, content: bytes, hit: Found) -> set[str]:
        """Add a secret, unless it is the mark of an earlier one; return its kind."""
        secret = content[hit.start : hit.end]
        if _MARK.fullmatch(secret):
            return set()
        self.secrets.setdefault(hit.kind, set()).add(secret)
        self.literals[widened(content, hit.start, hit.end)] = None
        return {hit.kind}

    def scan_table(self, table: pa.Table, rules: Rules, vocabulary: TokenBytes) -> None:
        """Scan the tokens and texts of a table with full prompts.

        A text is scanned from where it differs from the same column's text in the row before, with
        8 KiB of context.
        """
        self.blobs |= names_in(table)
        names = [
            field.name
            for field in table.schema
            if has_text(field.type) and (field.name not in COLUMN_BY_NAME or _is_scanned(field))
        ]
        whole = zipped(*(Ragged.from_arrow(table.column(name)) for name in _TOKENS))
        tokens = [vocabulary.join(whole.row(i)) for i in range(table.num_rows)]
        kinds_of = [set[str]() for _ in range(table.num_rows)]
        for texts in (tokens, *(texts_in(table.column(name)) for name in names)):
            before = b""
            for row, text in enumerate(texts):
                if text is not None:
                    fresh, num_known = _fresh(before, text)
                    kinds_of[row] |= self.scan(fresh, rules, num_known)
                    before = text
        for kinds in kinds_of:
            self.num_rows.update(kinds)
        prompts = Ragged.from_arrow(table.column("prompt_token_ids")).lengths
        rows, starts, lengths = sampled_ranges(table)
        cuts = []
        for i in range(table.num_rows):
            ends = np.cumsum([0, *vocabulary.lengths(whole.row(i))])
            begin = prompts[i] + starts[rows == i]
            cuts.append([*ends[begin], *ends[begin + lengths[rows == i]]])
        self.add_halves(tokens, cuts)

    def add_halves(self, texts: Sequence[bytes], cuts: Sequence[Sequence[int]]) -> None:
        """Look for both parts of secrets that begin in a prompt and end in its answer."""
        self.literals |= dict.fromkeys(self.known.halves(texts, cuts))


def _is_scanned(field: pa.Field) -> bool:
    return field.name not in {*_TOKENS, "pictures", "trajectory_id"} and not _holds_numbers(field)


def _holds_numbers(field: pa.Field) -> bool:
    kind = COLUMN_BY_NAME[field.name].type
    return kind is None or (pa.types.is_list(kind) and not pa.types.is_struct(kind.value_type))


def _fresh(before: bytes, text: bytes) -> tuple[bytes, int]:
    """Return what a text has after the prefix that it shares with another, and its context.

    The result begins with up to 8 KiB of that prefix, whose length is the second value.
    """
    if text == before:
        return b"", 0
    size = min(len(before), len(text))
    left, right = (np.frombuffer(each, np.uint8, size) for each in (before, text))
    differs = left != right
    shared = int(differs.argmax()) if differs.any() else size
    num_known = min(shared, CONTEXT_BYTES)
    return text[shared - num_known :], num_known


@dataclass(frozen=True, slots=True)
class Report:
    """What was redacted; it contains no secret.

    Attributes:
        kinds: Per kind, the number of distinct secrets, and of rows whose new text has one.
        num_secrets: Number of distinct secrets.
        num_rows: Number of rows of the dataset.
        num_rows_with_marks: Number of rows with replaced response tokens.
        num_tokens_replaced: Number of response tokens that were replaced.
        fill_token_id: The id that replaces the ids of secrets.
        num_blobs: Number of pictures and documents of the rows.
        keeps_pictures: True if they were copied without a scan, false if they were left out.
    """

    kinds: dict[str, dict[str, int]]
    num_secrets: int
    num_rows: int
    num_rows_with_marks: int
    num_tokens_replaced: int
    fill_token_id: int
    num_blobs: int
    keeps_pictures: bool


def redact(
    dataset: str,
    out: str,
    rules: Rules,
    *,
    tokenizer: str | None = None,
    keep_pictures: bool = False,
    layout: Layout | None = None,
    workers: Workers | None = None,
    progress: Any = None,
) -> Report:
    """Write a dataset again without its secrets.

    The first pass scans the decoded tokens of each row (prompt + response) and all texts. The second
    pass replaces every occurrence of what was found, also where no scanner would find it: in texts
    by `[REDACTED_n]`, in token ids by one fixed id (`Redactor.table`). Memory use grows with the
    number of distinct secrets, not with the dataset.

    Args:
        dataset: Path of a dataset.
        out: Directory to write.
        rules: What to look for.
        tokenizer: Directory of the dataset's tokenizer; None: the one that the dataset names.
        keep_pictures: Copy pictures and documents of the rows, which are not scanned; if false, the
            new dataset has none of them.
        layout: Layout of the new dataset; None: as in `dataset`.
        workers: Processes that do the work; None: this process.
        progress: Called with the number of rows of each pass since the last call.

    Raises:
        InputError: `tokenizer`: the tokenizer is not here, or is not the dataset's; `out_is_free`,
            `input_file`: see `rollout_io.dataset.rewriting.rewrite`.
        ValidationError: The dataset breaks a named invariant; nothing is written.
    """
    sources, metadata = Sources(dataset), read_metadata(dataset)
    vocabulary = load_token_bytes(tokenizer_of(dataset, metadata, tokenizer))
    workers, tell = workers or Workers(), progress or (lambda _num_rows: None)
    findings = Findings()
    findings.scan(repr(metadata).encode("utf-8", "replace"), rules)
    scanning = partial(_scan_piece, rules, vocabulary)
    for num_rows, piece_findings in workers.map_in_order(scanning, pieces(dataset)):
        findings.add(piece_findings)
        tell(num_rows)
    redactor = Redactor(findings.known, vocabulary, keep_pictures)
    new_metadata = redacted_metadata(metadata, redactor, rules, [dataset])
    counts = rewrite(
        dataset,
        out,
        redactor.table,
        new_metadata,
        layout=layout,
        workers=workers,
        progress=tell,
        sources=sources,
    )
    num_rows, num_tokens = _num_marked(out)
    kinds = {
        kind: {"num_secrets": len(secrets), "num_rows": findings.num_rows[kind]}
        for kind, secrets in sorted(findings.secrets.items())
    }
    num_secrets = len(set[bytes]().union(*findings.secrets.values()))
    rest = (num_rows, num_tokens, redactor.fill, len(findings.blobs), keep_pictures)
    return Report(kinds, num_secrets, counts.num_rows_after, *rest)


def redacted_metadata(
    metadata: DatasetMetadata, redactor: Redactor, rules: Rules, parents: Sequence[str]
) -> DatasetMetadata:
    """Return the metadata of the redacted dataset; expressions may be secret and are left out."""
    new_metadata = metadata.made(
        "redact",
        parents=list(parents),
        patterns=[name for name, _ in rules.patterns],
        expressions=rules.checksum,
        personal=rules.personal,
        keep_pictures=redactor.keep_pictures,
        num_literals=len(redactor.literals.secrets),
        fill_token_id=redactor.fill,
    )
    return redactor.replacer.metadata(new_metadata)


def tokenizer_of(dataset: str, metadata: DatasetMetadata, given: str | None) -> str:
    """Return the directory of a dataset's tokenizer.

    Raises:
        InputError: `tokenizer`: it is not on this machine, or another one was given.
    """
    if given is None:
        given = remembered_tokenizer(metadata)
        if given is None:
            name = metadata.tokenizer
            where = not_found(name) if name else "is not on this machine"
            finding = f"its tokenizer ({name or 'name unknown'}) {where}"
            hint = "pass --tokenizer DIR: secrets in token ids are found in their decoded text"
            raise InputError("tokenizer", dataset, finding, "", hint)
    elif is_other_tokenizer(given, metadata):
        finding = f"{given} is not the tokenizer of the dataset ({metadata.tokenizer or 'unknown'})"
        raise InputError("tokenizer", dataset, finding, "", "pass the directory of that tokenizer")
    return given


def _scan_piece(rules: Rules, vocabulary: TokenBytes, piece: str) -> tuple[int, Findings]:
    findings, num_rows = Findings(), 0
    for table in iter_tables(piece):
        findings.scan_table(table, rules, vocabulary)
        num_rows += table.num_rows
    return num_rows, findings


def _num_marked(dataset: str) -> tuple[int, int]:
    """Return the number of rows with marks in `redacted`, and of marked tokens."""
    tables: Iterable[pa.Table] = iter_tables(dataset, [REDACTED])
    columns = [Ragged.from_arrow(table.column(REDACTED)) for table in tables]
    rows = sum(len(np.unique(column.row_of(np.flatnonzero(column.values)))) for column in columns)
    return rows, sum(int(column.values.sum()) for column in columns)
