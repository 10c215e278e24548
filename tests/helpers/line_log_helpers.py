"""Damaged logs of lines: every record is accounted for, and what is read can be rendered."""

import msgspec
from hypothesis import strategies as st

from rollout_io.formats.base import Conversation, Options
from rollout_io.formats.engines.files import Start
from rollout_io.retokenize.chat_template import normalize
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import planned
from tests.helpers.text_log_helpers import mutated


@st.composite
def mutated_lines(draw, log):
    """The bytes of a log with a damaged, repeated, moved or missing line."""
    lines = [line for line in log.split(b"\n") if line.strip()]
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(["damage", "damage", "damage", "repeat", "reverse", "drop", "cut"]))
    if kind == "damage":
        lines[at] = draw(mutated(lines[at]))
    elif kind == "repeat":
        lines.insert(draw(st.integers(0, len(lines))), lines[at])
    elif kind == "reverse":
        lines.reverse()
    elif kind == "drop":
        del lines[at]
    whole = b"\n".join(lines)
    return whole[: draw(st.integers(0, len(whole)))] if kind == "cut" else whole


def check_lines(adapter, path):
    """A damaged log of lines gives runs or named errors, and counts each line once."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    # An empty file may also be a damaged document, which is one record.
    check_records(adapter, path, len(lines) or planned(adapter, path).num_records)


def check_records(adapter, path, num_records):
    """Each record is in one run or rejection; what is read can be rendered, or is refused."""
    assert adapter.recognizes(Start(path)) in {True, False}
    plan = planned(adapter, path)
    places = [place for run in plan.runs for place in run.places]
    places += [rejected.place for rejected in plan.rejected]
    assert len(places) == num_records == plan.num_records
    assert len({place.where for place in places}) == num_records
    for run in plan.runs:
        try:
            steps = adapter.read(run, Options()).steps
            assert steps
            for step in steps:
                if isinstance(step, Conversation):
                    msgspec.json.encode(step.messages)
                    assert "assistant" in [m["role"] for m in step.messages]
                    for message in step.messages:
                        normalize(message, step.source)
        except RolloutError:
            continue


TEMPLATE = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def save_template(folder):
    """The name of a file: a chat template that keeps all there is in a message."""
    file = folder / "whole.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    return str(file)
