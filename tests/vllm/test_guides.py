"""The guide of one's own loop, with vLLM's server and with vLLM in the process."""

import os
import subprocess

import pytest

import rollout_io
from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.guide_helpers import blocks_of, follow

pytestmark = pytest.mark.vllm

IN_PROCESS = """
import json
import sys

from vllm import LLM, SamplingParams

{log}

if __name__ == "__main__":
    sampling = SamplingParams(logprobs=0, temperature=1.0, max_tokens=16, n=2)
    model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2048)
    messages = [{{"role": "user", "content": "What is 2+3?"}}]
    with open("calls.jsonl", "w") as calls:
        for number, output in enumerate(model.chat([messages] * 3, sampling)):
            log(f"2+3/{{number}}", sampling, output)
"""


@pytest.mark.parametrize(
    ("server_of", "model"),
    [
        ("small_server", "small_smollm2"),
        pytest.param("vllm_server", "smollm2_dir", marks=pytest.mark.nightly),
    ],
)
def test_the_loop_of_the_guide_becomes_a_checkpoint(server_of, model, request, tmp_path):
    server, directory = (request.getfixturevalue(name) for name in (server_of, model))
    # The small model writes few numbers, so the lengths of its answers are graded.
    grades = ('re.findall(r"\\d+", answer)[-1:]', "[len(answer)]")
    replaced = grades if model == "small_smollm2" else ("", "")
    printed = follow("vllm_loop.md", tmp_path, url=server.url, model=directory, replaced=replaced)
    assert "fingerprints match" in printed
    assert list((tmp_path / "runs" / "loop" / "checkpoints").glob("global_step_*"))


def test_calls_of_llm_generate_convert_with_every_check(small_smollm2, tmp_path):
    (log,) = [code for _, _, code in blocks_of("vllm_loop.md") if "def log(" in code]
    (tmp_path / "own.py").write_text(IN_PROCESS.format(log=log))
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one import of vLLM in place of three
    python = ROOT / ".venv-vllm" / "bin" / "python"
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [python, "own.py", small_smollm2],
        cwd=tmp_path,
        env={**os.environ, **own, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    given = [str(tmp_path / "calls.jsonl"), "--tokenizer", str(small_smollm2)]
    assert run(["convert", *given, "--out", str(tmp_path / "ds")]) == 0
    rows = rollout_io.scan(tmp_path / "ds").collect()
    assert len(rows) == 6
    assert rows["rollout_logprobs"].null_count() == 0
    assert set(rows["token_source"]) == {"engine"}
