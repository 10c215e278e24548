"""The words of the APIs, which redaction leaves where the APIs expect them.

A password may be `assistant`, and an expression may match `tool_calls`. Such a word is replaced in
texts and arguments, but not as a role, a type or the name of a field: readers would understand the
record no more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FIELDS = "role type object finish_reason stop_reason tool_choice status sent token_source"
ENUMERATIONS = frozenset(_FIELDS.split())
"""Fields, also columns, whose value is one of few words."""

_SAID = """
assistant developer function system tool user
abort content_filter error function_call length max_tokens stop tool_calls
auto required none chat.completion chat.completion.chunk text_completion list model
array boolean integer json_object json_schema null number object string
text refusal reasoning reasoning_text summary_text thinking redacted_thinking tool_use
tool_result image image_url input_audio input_image input_text output_text audio_url video_url
document file message function_call_output custom_tool_call custom_tool_call_output
engine retokenized tokens completed incomplete in_progress failed

name type id index role content messages prompt model models tools tool_choice tool_call_id
arguments call_id input instructions output object created created_at choices delta
finish_reason stop_reason logprobs top_logprobs prompt_logprobs usage prompt_tokens
completion_tokens total_tokens prompt_tokens_details completion_tokens_details cached_tokens
reasoning_tokens token_ids prompt_token_ids response_token_ids return_token_ids token logprob
token_logprobs text_offset bytes service_tier system_fingerprint
max_completion_tokens max_output_tokens temperature top_p top_k min_p min_tokens seed
presence_penalty frequency_penalty repetition_penalty logit_bias stream stream_options
include_usage include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
stop_token_ids ignore_eos add_generation_prompt continue_final_message chat_template
chat_template_kwargs enable_thinking parallel_tool_calls response_format reasoning_effort
reasoning_content metadata modalities prediction store verbosity echo suffix best_of
description parameters properties additionalProperties enum items strict schema default
detail url data format source cache_control encrypted_content thoughts signature

session sessions request response time agent policy_version redacted sampling_support
routed_experts meta_info weight_versions version start end sent reward metrics
unrecorded lost unrecorded_calls exact_prefix_fallbacks encrypted_thoughts
rule where got expected hint record
"""
WORDS = frozenset(_SAID.split())
"""Values of enumerations, and names of fields."""

_WORDS = b"|".join(re.escape(word).encode() for word in sorted(WORDS))
_NAMES = b"|".join(name.encode() for name in sorted(ENUMERATIONS))
_PLACES = re.compile(
    rb'(?<!\\)"(?:(?:%b)"\s*:\s*"(?:%b)"|(?:%b)"(?=\s*:))' % (_NAMES, _WORDS, _WORDS)
)
Spans = Sequence[tuple[int, int, int]]


def is_protocol(name: str, value: object) -> bool:
    """True if a field has a value that redaction leaves alone."""
    return name in ENUMERATIONS and value in WORDS


def outside(text: bytes, spans: Spans) -> Spans:
    """Return the parts of ranges of a JSON text in which it has no word of the protocol.

    Quotes within texts are escaped, so JSON in JSON is a text like any other.

    Example:
        >>> outside(b'{"role": "user", "a": "user"}', [(10, 14, 0), (23, 27, 0)])
        [(23, 27, 0)]
    """
    outside_spans = list[tuple[int, int, int]]()
    places = [match.span() for match in _PLACES.finditer(text)]
    at = 0
    for start, end, number in spans:
        while at < len(places) and places[at][1] <= start:
            at += 1
        for begin, finish in places[at:]:
            if begin >= end:
                break
            if start < begin:
                outside_spans.append((start, begin, number))
            start = max(start, finish)
        if start < end:
            outside_spans.append((start, end, number))
    return outside_spans
