"""The stories of docs/audit.md can be followed, and end as they say."""

import pytest

from tests.helpers.guide_helpers import follow

PART = "Two stories: a stale server, and shifted log-probabilities"


@pytest.mark.nightly  # tests/vllm/test_audit.py finds a stale vLLM server on every change
@pytest.mark.model
def test_the_stale_server_and_the_shifted_logprobs_are_found(smollm2_dir, tmp_path):
    del smollm2_dir
    printed = " ".join(follow("../audit.md", tmp_path, part=PART).split())
    assert (
        "8 of 16 spans labelled 3 were sampled by version 1: one of several servers is stale"
        in printed
    )
    assert printed.count("exit code 1") == 2
    assert (
        "In 6 spans, each log-probability belongs to the next token: the list is shifted" in printed
    )
