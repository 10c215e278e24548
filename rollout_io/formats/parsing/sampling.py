"""Request fields that change the sampled distribution, except temperature, top_p and top_k.

`ModelNames` collects the names of the models that sampled the responses of a log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from rollout_io.formats.base import About


class SamplingFields(msgspec.Struct, gc=False):
    """Request fields that change the distribution unless they are null or have these defaults.

    Source: vLLM's SamplingParams and OpenAI-compatible server, the OpenAI API, SGLang, llama.cpp.
    Fields that only end a response (`stop`, `ignore_eos`) or set the seed are not included.
    """

    min_p: Any = 0
    typical_p: Any = 1
    min_tokens: Any = 0
    min_new_tokens: Any = 0
    presence_penalty: Any = 0
    frequency_penalty: Any = 0
    repetition_penalty: Any = 1
    no_repeat_ngram_size: Any = 0
    mirostat: Any = 0
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    vllm_xargs: Any = None
    extra_args: Any = None
    thinking_token_budget: Any = -1
    trace_decode_token_ids: Any = None
    structured_outputs: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    response_format: Any = None
    tool_choice: Any = "auto"
    function_call: Any = "auto"
    use_beam_search: Any = False
    best_of: Any = 1
    extra_body: Any = None
    """Fields that the OpenAI client merges into the body: any of the fields above, and `top_k`."""


_VALUES = attrgetter(*SamplingFields.__struct_fields__)
_DEFAULTS = _VALUES(SamplingFields())
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{f.name: (f.default, None, [], {}, "") for f in msgspec.structs.fields(SamplingFields)},
    "tool_choice": ("auto", "none", None),
    "function_call": ("auto", "none", None),
    "response_format": ({"type": "text"}, None),
    "allowed_token_ids": (None,),
    "top_k": (0, -1, None),
}


def sampling_extra(fields: SamplingFields | Mapping[str, Any]) -> str | None:
    """Return the fields that change the distribution, as JSON for the `sampling_extra` column.

    Return None if there are none. `top_k` is included if given, though it has a column of its own.

    Example:
        >>> sampling_extra({"repetition_penalty": 1.0, "min_p": 0.1, "seed": 7})
        '{"min_p":0.1}'
    """
    if isinstance(fields, SamplingFields):
        values = _VALUES(fields)
        if values == _DEFAULTS:  # the usual case
            return None
        settings = dict(zip(SamplingFields.__struct_fields__, values, strict=True))
    else:
        settings = dict(fields)
    body = settings.pop("extra_body", None)
    if isinstance(body, dict):
        settings |= body
    extra = {n: v for n, v in settings.items() if n in _NEUTRAL and v not in _NEUTRAL[n]}
    return json.dumps(extra, sort_keys=True, separators=(",", ":")) if extra else None


def sampling_extra_of(history: Iterable[Mapping[str, Any]]) -> str | None:
    """Return `sampling_extra` of a dataset that was generated before this column existed."""
    configs = [config for step in history if isinstance(config := step.get("config"), dict)]
    extras = [config.get("sampling_extra") for config in configs]
    extra_texts = [
        sampling_extra({**(extra if isinstance(extra, dict) else {}), "min_p": config.get("min_p")})
        for config, extra in zip(configs, extras, strict=True)
    ]
    return next((text for text in extra_texts if text), None)


MODELS = "models"

_KEY = b'"model"'
_VALUE = re.compile(rb'\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')
_TEXT = msgspec.json.Decoder(str)


class ModelNames:
    """Collector of the first `model` value of each record.

    Example:
        >>> names = ModelNames()
        >>> names.see(b'{"request": {"model": "smollm2"}}')
        >>> [found.value for found in names.about()]
        [['smollm2']]
    """

    def __init__(self) -> None:
        self._found: set[bytes] = set()
        self._last = b"\n"

    def see(self, record: bytes) -> None:
        """Search a record for a model name, without parsing it, for speed."""
        at = record.find(_KEY)
        if record.startswith(self._last, at):  # the same as in the previous record
            return
        while at >= 0:
            value = _VALUE.match(record, at + len(_KEY))
            if value is not None:
                self._found.add(value[1])
                self._last = record[at : value.end()]
                return
            at = record.find(_KEY, at + len(_KEY))

    def names(self) -> list[str]:
        """Return all names, sorted."""
        distinct = set()
        for text in self._found:
            try:
                distinct.add(_TEXT.decode(text))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the record itself is rejected elsewhere
        return sorted(name for name in distinct if name)

    def about(self) -> Iterator[About]:
        """Yield the names as a fact about the log, for `Adapter.find`."""
        names = self.names()
        if names:
            yield About(MODELS, names)
