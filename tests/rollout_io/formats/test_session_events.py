"""Every format of sessions gets every event right that its log shows: one test each, for all of them.

A script tells what a person and the program do; what each answer was sent follows from it, whatever the
format. So a new format needs a writer in `session_writers`, and gets all of these tests.
"""

import pytest

from rollout_io.formats.detect import load_formats
from schemas.messages import is_answer
from tests.helpers.adapter_helpers import read_all
from tests.helpers.session_writers import SESSION_WRITERS, NotLogged

FORMATS = load_formats().adapters


def trained(name, paths):
    """The texts that each trained answer was sent, by its text; and the notes of all runs."""
    runs, rejected = read_all(FORMATS[name], *paths)
    assert rejected == []
    prompts, notes = {}, {}
    for _, trajectory in runs:
        notes |= trajectory.notes
        for step in trajectory.steps:
            for i, message in enumerate(step.messages):
                if i >= step.num_given and is_answer(message):
                    assert message["content"] not in prompts, "trained twice"
                    prompts[message["content"]] = [m["content"] for m in step.messages[:i]]
    return prompts, notes


def rewind(log):
    log.user("u1")
    log.answer("a1")
    log.user("u2")
    log.answer("a2")
    log.rewind(1)
    log.user("u3")
    log.answer("a3")
    return {"a1": ["u1"], "a2": ["u1", "a1", "u2"], "a3": ["u1", "a1", "u3"]}


def two_rewinds(log):
    expected = rewind(log)
    log.rewind(1)
    log.user("u4")
    log.answer("a4")
    return expected | {"a4": ["u1", "a1", "u4"]}


def compaction(log):
    log.user("u1")
    log.answer("a1")
    log.compact("SUMMARY")
    log.user("u2")
    log.answer("a2")
    return {"a1": ["u1"], "a2": [..., "SUMMARY", ..., "u2"]}


def fork_by_copy(log):
    log.user("u1")
    log.answer("a1")
    log.user("u2")
    log.answer("a2")
    fork = log.copy()
    fork.user("u3")
    fork.answer("a3")
    log.user("u4")
    log.answer("a4")
    before = ["u1", "a1", "u2", "a2"]
    return {"a1": ["u1"], "a2": before[:3], "a3": [*before, "u3"], "a4": [*before, "u4"]}


def fork_by_reference(log):
    log.user("u1")
    log.answer("a1")
    fork = log.refer()
    fork.user("u3")
    fork.answer("a3")
    log.user("u2")
    log.answer("a2")
    return {"a1": ["u1"], "a2": ["u1", "a1", "u2"], "a3": ["u1", "a1", "u3"]}


def resumed(log):
    log.user("u1")
    log.answer("a1")
    again = log.resume()
    again.user("u2")
    again.answer("a2")
    return {"a1": ["u1"], "a2": ["u1", "a1", "u2"]}


def interrupted(log):
    log.user("u1")
    log.answer("a1")
    log.user("u2")
    log.cut("half of")
    log.user("u3")
    log.answer("a3")
    return {"a1": ["u1"], "a3": ["u1", "a1", "u2", ..., "u3"]}


def sub_agent(log):
    log.user("u1")
    log.answer("a1")
    helper = log.sub_agent()
    helper.user("u8")
    helper.answer("a8")
    helper.user("u9")
    helper.answer("a9")
    log.user("u2")
    log.answer("a2")
    return {"a1": ["u1"], "a2": ["u1", "a1", "u2"], "a8": ["u8"], "a9": ["u8", "a8", "u9"]}


SCRIPTS = (
    rewind,
    two_rewinds,
    compaction,
    fork_by_copy,
    fork_by_reference,
    resumed,
    interrupted,
    sub_agent,
)


def is_like(texts, pattern):
    """True if texts are those of a pattern, in which `...` stands for any number of others."""
    if not pattern:
        return not texts
    if pattern[0] is ...:
        return any(is_like(texts[i:], pattern[1:]) for i in range(len(texts) + 1))
    return bool(texts) and pattern[0] in texts[0] and is_like(texts[1:], pattern[1:])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("name", SESSION_WRITERS)
def test_each_answer_is_trained_once_with_what_it_was_sent(name, script, tmp_path):
    log = SESSION_WRITERS[name](tmp_path)
    try:
        expected = script(log)
    except NotLogged:
        pytest.skip(f"the log of {name} has no record for it")
    prompts, notes = trained(name, log.write())
    assert prompts.keys() == expected.keys()
    for answer, pattern in expected.items():
        assert is_like(prompts[answer], pattern), (answer, prompts[answer])
    if script is fork_by_copy or script is interrupted:
        assert notes, "an answer that is not trained is said"


def test_at_least_half_of_the_matrix_is_filled(tmp_path):
    num_filled = 0
    for i, (name, writer) in enumerate(SESSION_WRITERS.items()):
        for j, script in enumerate(SCRIPTS):
            folder = tmp_path / f"{name}{i}{j}"
            folder.mkdir()
            try:
                script(writer(folder))
                num_filled += 1
            except NotLogged:
                continue
    assert num_filled >= 0.5 * len(SESSION_WRITERS) * len(SCRIPTS)
