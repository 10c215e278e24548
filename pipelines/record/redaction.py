"""Redaction of what a recorder writes: the secrets in a call are replaced before it is on disk.

    call ---> secrets found in ids, request and response ---> known secrets (memory) ---> replaced ---> journal
                                                                     |
    close ---> files that were written before a secret was known <---+

Engine and client get the original bytes.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.record.engine_responses import decoded
from pipelines.record.settings import RecordSettings
from rollout_io.dataset.filesystems import sync
from rollout_io.dataset.reader import iter_tables, read_metadata
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.formats.base import Step
from rollout_io.formats.parsing.bodies import Choice, Request, Response
from rollout_io.formats.parsing.completions import read_choices, whole_response
from rollout_io.formats.parsing.tokens import strict_ids
from rollout_io.formats.parsing.witnesses import holds
from rollout_io.redaction.literals import Literals
from rollout_io.redaction.redact import Findings
from rollout_io.redaction.scanner import Rules, Scanned
from rollout_io.redaction.tables import Redactor
from rollout_io.retokenize.token_bytes import TokenBytes, load_token_bytes
from schemas.errors import ConfigError, InputError, RolloutError, cleaning
from schemas.metadata import DatasetMetadata, LogprobsMode
from schemas.ragged import BoolArray

OUTCOMES = b"rollout_io.outcomes"
"""Footer key for outcomes that clients gave and that the rows of their sessions do not hold."""
MARK = "redacted"
"""Key of a journal's line that was redacted, and of the ranges of replaced tokens of a choice."""

_MEDIA = re.compile(rb"data:(?:image|audio|video)\\?/[\w.+-]+;base64,[A-Za-z0-9+/=\\]*")
_REQUEST = msgspec.json.Decoder(Request)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_NAMES = ("session", "sessions")
_SAID = ("reasoning", "reasoning_content", "content", "tool_calls")


class Redaction:
    """Finds and replaces the secrets of calls, one call at a time, in a thread.

    A secret is known from the call in which a scanner recognises it, to all later calls of all
    sessions. Known secrets are only in memory. Short texts may be redacted in other threads meanwhile.

    Args:
        rules: What to look for.
        vocabulary: Bytes of the tokens of the engines' tokenizer.
        logprobs_mode: As in `RecordSettings`.
    """

    def __init__(
        self, rules: Rules, vocabulary: TokenBytes, logprobs_mode: LogprobsMode | None = None
    ) -> None:
        self.rules = rules
        self._vocabulary, self._mode = vocabulary, logprobs_mode
        self._findings, self._scanned = Findings(), Scanned()
        self._made = Redactor(Literals(()), vocabulary)
        self._thread = ThreadPoolExecutor(1, "redaction")
        self._nonce = os.urandom(8).hex().encode()

    @classmethod
    def of(cls, settings: RecordSettings) -> Self | None:
        """Load what the settings name; None if they ask for no redaction.

        Raises:
            ConfigError: `config_value`: no tokenizer is named; `choices`: a pattern is invalid.
            MissingExtra: `extra_installed`: a scanner is not installed.
            InputError: `tokenizer`, `input_file`: the tokenizer cannot be read.
        """
        if not settings.redact:
            if settings.patterns or settings.personal:
                message = "--pattern and --personal need --redact"
                raise ConfigError("config_value", "--redact", "not given", message=message)
            return None
        directory = settings.tokenizer or settings.exact_prefix
        if directory is None:
            hint = "secrets in token ids are found in their decoded text"
            expected = "--tokenizer DIR with the engine's tokenizer"
            raise ConfigError("config_value", "--redact", "no tokenizer", expected, hint)
        rules = Rules.of(settings.patterns, personal=settings.personal)
        return cls(rules, load_token_bytes(directory), settings.logprobs_mode)

    @property
    def about(self) -> dict[str, Any]:
        """What the dataset's history says of the redaction; expressions may be secret."""
        patterns = [name for name, _ in self.rules.patterns]
        return {"redact": True, "patterns": patterns, "personal": self.rules.personal}

    @property
    def redactor(self) -> Redactor:
        """Replaces the secrets that are known now."""
        if len(self._made.literals.secrets) != len(self._findings.literals):
            self._made = Redactor(Literals(tuple(self._findings.literals)), self._vocabulary)
        return self._made

    def text(self, text: str) -> str:
        """Return a short text without secrets."""
        return self._clean([text.encode("utf-8", "replace")])[0].decode("utf-8", "replace")

    def value(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return a JSON object without the secrets in its texts and keys."""
        return dict(msgspec.json.decode(self._clean([msgspec.json.encode(value)])[0]))

    def refuse_name(self, name: str) -> None:
        """Check the name of a session, which is written as it is.

        Raises:
            InputError: `session_name`: it contains a secret.
        """
        if self.text(name) != name:
            finding = "the name contains a secret, and names are not redacted"
            hint = "use another name, such as the number of the task"
            raise InputError("session_name", "a session", finding, hint=hint)

    async def call(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of a call without secrets.

        Tokens that contain a byte of a secret have the id `Redactor.fill`, log-probability 0.0, an
        empty set of `sampling_support` and the first experts. Of the response, only what readers use
        is kept: decoded tokens and alternatives of log-probabilities are left out.

        Raises:
            InputError: `tokenizer`: the ids are not of this tokenizer; `journal`: the call cannot be
                redacted, and must not be written.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._call, record)
        except RolloutError:
            raise
        except Exception as error:  # its text may contain a secret
            finding = f"the call cannot be redacted ({type(error).__name__})"
            raise InputError("journal", f"session {record['session']}", finding) from None

    def _call(self, record: Mapping[str, Any]) -> dict[str, Any]:
        where = f"session {record['session']}"
        with cleaning(self.text):
            answer, steps, error = _read(record, where, self._mode)
        whole = [np.concatenate([s.prompt_token_ids, s.response_ids]) for s in steps]
        for step, ids in zip(steps, whole, strict=True):
            self._refuse_other(step, ids, where)
        fields = dict(record["request"])
        # Token ids as text are searched only where nothing else is in the text.
        ids_asked = {n: bytes(fields.pop(n)) for n in ("prompt",) if _is_list(fields.get(n))}
        about = {n: v for n, v in record.items() if n not in {"session", "request", "response"}}
        texts = [msgspec.json.encode(one) for one in (fields, _said(answer), about, error)]
        joined = [self._vocabulary.join(ids) for ids in whole]
        self._scan(joined)
        prompts = [
            ids[: len(step.prompt_token_ids)].astype(np.int32)
            for step, ids in zip(steps, whole, strict=True)
        ]
        cuts = [[int(self._vocabulary.lengths(ids).sum())] for ids in prompts]
        self._findings.add_halves(joined, cuts)
        request, clean_answer, rest, reason, *asked_ids = self._clean([*texts, *ids_asked.values()])
        redactor = self.redactor
        marks = [_marked(redactor, *one) for one in zip(steps, whole, strict=True)]
        _share([step.prompt_token_ids for step in steps], marks)
        response: dict[str, Any] = {"error": msgspec.Raw(reason)}
        if answer is not None:
            rows = zip(_CHOICES.decode(clean_answer), steps, whole, marks, strict=True)
            choices = [_choice(*row, redactor.fill) for row in rows]
            response = {"choices": [{"index": i} | one for i, one in enumerate(choices)]}
            response |= {"usage": answer.usage} if answer.usage is not None else {}
        clean_request = _FIELDS.decode(request) | dict(
            zip(ids_asked, map(msgspec.Raw, asked_ids), strict=True)
        )
        head = {"session": record["session"], MARK: True, **_FIELDS.decode(rest)}
        return {**head, "request": clean_request, "response": response}

    def rewrite(self, paths: Iterable[Path]) -> None:
        """Replace the secrets in files of lines: journals and rejected calls.

        Lines that were redacted before are read again only for secrets found since; each file is
        replaced as a whole.
        """
        for path in paths:
            clean = path.with_name(f".{path.name}.redacting")
            with path.open("rb") as lines, clean.open("wb") as out:
                os.fchmod(out.fileno(), path.stat().st_mode)
                out.writelines(map(self._line, lines))
                out.flush()
                os.fsync(out.fileno())
            clean.replace(path)
            sync(path.parent)

    def _line(self, line: bytes) -> bytes:
        with suppress(msgspec.MsgspecError, KeyError):
            record: dict[str, Any] = dict(_FIELDS.decode(line))
            if MARK in record and not self._findings.literals:
                return line
            record["request"] = _FIELDS.decode(record["request"])
            record["session"] = _TEXT.decode(record["session"])
            return msgspec.json.encode(self._call(record)) + b"\n"
        with suppress(msgspec.MsgspecError):
            return self._unnamed(line) + b"\n"
        return self._clean([line])[0]

    def _unnamed(self, line: bytes) -> bytes:
        """Replace the secrets in a JSON object, but not in the names of sessions."""
        fields = dict(_FIELDS.decode(line))
        names = {name: fields.pop(name) for name in _NAMES if name in fields}
        with suppress(msgspec.MsgspecError, KeyError):  # a rejected call
            record = self._unnamed(_TEXT.decode(fields["record"]).encode())
            names["record"] = msgspec.Raw(msgspec.json.encode(record.decode()))
            del fields["record"]
        rest = self._clean([msgspec.json.encode(fields)])[0]
        return msgspec.json.encode(names | _FIELDS.decode(rest))

    def _clean(self, texts: Sequence[bytes]) -> list[bytes]:
        """Scan texts and replace all known secrets; data of pictures and sounds is not read."""
        media = list[bytes]()

        def parted(match: re.Match[bytes]) -> bytes:
            media.append(match[0])
            return b"data:%b.%d;" % (self._nonce, len(media) - 1)

        plain = [_MEDIA.sub(parted, text) for text in texts]
        self._scan(plain)
        clean = self.redactor.replacer.texts(plain)
        place = re.compile(rb"data:%b\.(\d+);" % self._nonce)
        return [place.sub(lambda match: media[int(match[1])], text) for text in clean]

    def _scan(self, texts: Iterable[bytes]) -> None:
        for text in texts:
            fresh, num_known = self._scanned.fresh(text)
            self._findings.scan(fresh, self.rules, num_known)
            self._scanned.add(text)

    def _refuse_other(self, step: Step, ids: np.ndarray, where: str) -> None:
        """Check that ids are of the tokenizer: secrets would not be found otherwise."""
        size = len(self._vocabulary.offsets) - 1
        is_other = bool(len(ids)) and int(ids.max()) >= size
        if len(ids) and not is_other:
            decoded = self._vocabulary.text(np.asarray(step.response_ids))
            texts = step.texts if step.token_text is None else (step.token_text,)
            is_other = not all(holds(decoded, text) for text in texts)
        if is_other:
            finding = f"the ids of a response are not of the tokenizer {self._vocabulary.name}"
            hint = "pass --tokenizer DIR with the engine's tokenizer"
            raise InputError("tokenizer", where, finding, hint=hint)


def _read(
    record: Mapping[str, Any], where: str, mode: LogprobsMode | None
) -> tuple[Response | None, list[Step], str]:
    """Return the response of a call and its choices in order; or why they cannot be used."""
    try:
        request = _REQUEST.decode(msgspec.json.encode(record["request"]))
        answer = whole_response(decoded(record["response"]), where)
        answer.choices.sort(key=lambda choice: choice.index)
        try:
            steps = read_choices(answer, request, where, logprobs_mode=mode)
        except InputError as error:
            if error.rule != "no_token_ids":
                raise
            steps = read_choices(answer, request, where, failed=True)
        for step in steps:
            step.prompt_token_ids = _ids(step.prompt_token_ids)
            step.response_ids = _ids(step.response_ids)
    except (RolloutError, msgspec.MsgspecError, ArithmeticError, RecursionError) as error:
        return None, [], f"{type(error).__name__}: {error}"
    return answer, steps, ""


def _ids(ids: Any) -> Any:
    return strict_ids(ids, "call", "call") if isinstance(ids, bytes) else ids


def _is_list(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value)[:1] == b"["


def _share(prompts: Sequence[Any], marks: Sequence[BoolArray]) -> None:
    """Replace the same tokens in the prompt that the choices of a call share."""
    if len(prompts) > 1 and all(np.array_equal(prompt, prompts[0]) for prompt in prompts):
        num = len(prompts[0])
        union = np.logical_or.reduce([mark[:num] for mark in marks])
        for mark in marks:
            mark[:num] = union


def _said(answer: Response | None) -> list[dict[str, Any]]:
    """Return the texts of each choice."""
    return [] if answer is None else [_texts(choice) for choice in answer.choices]


def _texts(choice: Choice) -> dict[str, Any]:
    if choice.message is None:
        return {"text": choice.text, "finish_reason": choice.finish_reason}
    fields = {name: getattr(choice.message, name) for name in _SAID}
    texts = {name: text for name, text in fields.items() if text is not None}
    return {"message": texts, "finish_reason": choice.finish_reason}


def _marked(redactor: Redactor, step: Step, ids: np.ndarray) -> BoolArray:
    """Mark the tokens of prompt and response to replace, and those that were replaced earlier."""
    marks = np.zeros(len(ids), np.bool_)
    if step.redacted is not None:
        marks[len(ids) - len(step.redacted) :] = step.redacted
    for start, end in redactor.spans_of_ids([ids])[0]:
        marks[start:end] = True
    return marks


def _choice(
    texts: dict[str, msgspec.Raw], step: Step, ids: np.ndarray, marks: BoolArray, fill: int
) -> dict[str, Any]:
    """Return a choice for the journal, without what marked tokens say."""
    num = len(ids) - len(step.response_ids)
    secret = marks[num:]
    shown = np.where(marks, fill, ids).tolist()
    edges = np.flatnonzero(np.diff(secret, prepend=False, append=False)).reshape(-1, 2)
    choice: dict[str, Any] = {**texts, MARK: edges.tolist()}
    if len(ids):  # without ids, the session fails when it is read
        choice |= {"prompt_token_ids": shown[:num], "token_ids": shown[num:]}
    if step.rollout_logprobs is not None:
        values = np.array(step.rollout_logprobs, np.float32)
        values[: len(secret)][secret[: len(values)]] = 0
        entries = [{"logprob": value} for value in values.tolist()]
        is_chat = "message" in texts
        choice["logprobs"] = (
            {"content": entries} if is_chat else {"token_logprobs": values.tolist()}
        )
    if step.sampling_support is not None:
        sets = zip(step.sampling_support, secret, strict=False)
        choice["sampling_support"] = [[] if gone else ids_of_set for ids_of_set, gone in sets]
    if step.rollout_expert_indices is not None:
        routes = step.rollout_expert_indices.copy()
        routes[marks[: len(routes)]] = np.arange(routes.shape[2])
        file = io.BytesIO()
        np.save(file, routes)
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    if step.policy_versions is not None:
        versions = enumerate(step.policy_versions.tolist())
        spans = [{"version": version, "start": i, "end": i + 1} for i, version in versions]
        choice["meta_info"] = {"weight_versions": spans}
    return choice


def without_known(
    redactor: Redactor,
    tables: Sequence[pa.Table],
    metadata: DatasetMetadata,
    footer: Mapping[bytes, bytes],
) -> tuple[list[pa.Table], DatasetMetadata, dict[bytes, bytes]]:
    """Replace known secrets in what a shard consists of, but not in the names of sessions."""
    pairs = {}
    for key, value in footer.items():
        fields = _FIELDS.decode(value)
        texts = redactor.replacer.texts([bytes(raw) for raw in fields.values()])
        texts_by_name = dict(zip(fields, map(msgspec.Raw, texts), strict=True))
        pairs[key] = msgspec.json.encode(texts_by_name)
    clean = [_with_names(redactor.table(table), table) for table in tables]
    return clean, redactor.replacer.metadata(metadata), pairs


def _with_names(clean: pa.Table, original: pa.Table) -> pa.Table:
    for name in ("instance_id", "trajectory_id"):
        index = clean.column_names.index(name)
        clean = clean.set_column(index, clean.schema.field(index), original.column(name))
    return clean


def rewrite_shard(redactor: Redactor, shard: Path, folder: Path) -> None:
    """Replace known secrets in a shard, if it has any; it is replaced as a whole.

    Args:
        redactor: The secrets.
        shard: The shard.
        folder: Directory for the new shard, on the same file system; it is removed.
    """
    tables, metadata = list(iter_tables(shard)), read_metadata(shard)
    pairs = pq.read_metadata(shard).metadata or {}
    footer = {key: pairs[key] for key in (OUTCOMES,) if key in pairs}
    clean = without_known(redactor, tables, metadata, footer)
    if clean == (tables, metadata, footer):
        return
    shutil.rmtree(folder, ignore_errors=True)
    with RolloutWriter(
        folder, metadata=clean[1], append=True, checked=True, shard_bytes=1 << 62
    ) as writer:
        for table in clean[0]:
            writer.write(table)
        writer.footer = clean[2]
    (new,) = writer.shards
    Path(new.path).replace(shard)
    sync(shard.parent)
    shutil.rmtree(folder, ignore_errors=True)
