"""Compare exact ids with ids recomputed from the logged text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_io.dataset.prefix_layout import Tokens, common_prefix
from rollout_io.dataset.reader import iter_tables, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.retokenize import ChatTokenizer, retokenize
from schemas.errors import InputError, RolloutError

_COLUMNS = ("token_source", "messages", "response_text", "prompt_token_ids", "response_ids")


@dataclass(slots=True)
class TextReading:
    """Comparison of exact ids with the ids that `retokenize` computes from the logged text.

    `response_text` is tokenized as the response to `messages`. All tokens from the first to the
    last difference are counted as off, in the longer of the two versions.

    Attributes:
        num_compared: Steps with exact ids and both texts.
        num_not_compared: Steps that could not be compared.
        first_reason: Reason why the first of these could not be compared; None if all could.
        num_prompts_off: Steps whose recomputed prompt differs. `messages` does not contain the
            tools listed in the prompt; their tokens are counted as off.
        num_prompt_tokens_off: Tokens off in prompts.
        num_responses_off: Steps whose recomputed response differs.
        num_response_tokens_off: Tokens off in responses.
        num_ends_added: Responses that are off only by an end token that was never sampled, because
            the response was cut off.
    """

    num_compared: int = 0
    num_not_compared: int = 0
    first_reason: str | None = None
    num_prompts_off: int = 0
    num_prompt_tokens_off: int = 0
    num_responses_off: int = 0
    num_response_tokens_off: int = 0
    num_ends_added: int = 0

    @classmethod
    def of(cls, tables: Iterable[pa.Table], tokenizer: ChatTokenizer) -> TextReading:
        """Compare the rows of tables with full prompts; text columns may be absent."""
        reading = cls()
        for table in tables:
            for row in table.to_pylist():
                try:
                    reading._add(row, tokenizer)
                except RolloutError as error:
                    reading.num_not_compared += 1
                    reading.first_reason = reading.first_reason or str(error)
        return reading

    @classmethod
    def of_dataset(cls, path: PathLike, tokenizer: ChatTokenizer) -> TextReading:
        """Compare the rows of a dataset, one piece at a time."""
        present = scan(path).collect_schema().names()
        names = [name for name in _COLUMNS if name in present]
        return cls.of(iter_tables(path, names), tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as a dictionary."""
        return asdict(self)

    def _add(self, row: dict[str, Any], tokenizer: ChatTokenizer) -> None:
        prompt, response = _text_ids(row, tokenizer)
        self.num_compared += 1
        exact = (np.array(row[name], np.int32) for name in _COLUMNS[3:])
        prompt_off, response_off = map(num_off, exact, (prompt, response))
        self.num_prompts_off += prompt_off > 0
        self.num_prompt_tokens_off += prompt_off
        self.num_responses_off += response_off > 0
        self.num_response_tokens_off += response_off
        is_added = len(response) == len(row["response_ids"]) + 1 and response_off == 1
        self.num_ends_added += is_added and int(response[-1]) == tokenizer.eos_token_id


def num_off(exact: Tokens, read: Tokens) -> int:
    """Count the tokens from the first to the last difference, in the longer version.

    Example:
        >>> num_off(np.array([1, 26951, 3834, 2]), np.array([1, 94224, 2]))
        2
    """
    begin = common_prefix(exact, read)
    exact, read = exact[begin:], read[begin:]
    end = common_prefix(exact[::-1], read[::-1])
    return max(len(exact), len(read)) - end


def _text_ids(row: dict[str, Any], tokenizer: ChatTokenizer) -> tuple[Tokens, Tokens]:
    """Tokenize the prompt and the response of a row from its text."""
    where = "messages"
    if row["token_source"] != "engine":
        finding = "the ids come from re-tokenized text, not from the engine"
        raise InputError("token_source", where, finding)
    if row.get("messages") is None or row.get("response_text") is None:
        raise InputError("messages", where, "the row has no logged text")
    try:
        messages = json.loads(row["messages"])
    except (ValueError, RecursionError) as error:
        raise InputError("messages", where, f"invalid JSON: {error}") from None
    if not isinstance(messages, list):
        raise InputError("messages", where, "text without roles", "a list of messages")
    answer = {"role": "assistant", "content": row["response_text"]}
    read = retokenize([*messages, answer], tokenizer, num_given=len(messages))
    start, length = read.spans[0].tolist()
    before = np.concatenate([read.prompt_token_ids, read.response_ids[:start]])
    return before.astype(np.int32), read.response_ids[start : start + length]
