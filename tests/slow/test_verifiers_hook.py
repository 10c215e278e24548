"""`vf-eval` with the hook leaves exact rows: `make test-hooks`."""

import json
import os
import subprocess

import pytest

import rollout_io
from pipelines.generation.engines.base import Sampling
from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.fake_engine import FakeEngine, answer, running
from trainer.engine.embedded import TransformersEngine

pytestmark = [pytest.mark.nightly, pytest.mark.model]
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
TASKSET = ROOT / "tests" / "data" / "peers" / "verifiers"
OPTIONS = """-n 2 -r 2 --no-push --rich None --client.type train --client.api-key-var UNUSED
    --sampling.temperature 0.8 --sampling.max-tokens 12 --env.agent.harness.id sums
    --env.agent.runtime.type subprocess -o out"""


class ModelEngine(FakeEngine):
    """vLLM's interface of token ids, answered by a Transformers model."""

    def __init__(self, model):
        super().__init__()
        self.engine, self.sampled = TransformersEngine.load(str(model)), {}

    async def other(self, body, path, send):
        assert path.endswith("/generate"), path
        how = body["sampling_params"]
        settings = Sampling(temperature=how["temperature"], max_tokens=how["max_tokens"])
        sampled = await self.engine.sample(body["token_ids"], settings)
        ids, logprobs = sampled.response_ids, sampled.rollout_logprobs
        self.sampled[tuple(sampled.prompt_token_ids), tuple(ids)] = logprobs
        tokens = [
            {"token": f"token_id:{i}", "logprob": value}
            for i, value in zip(ids, logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": tokens}}
        choice["finish_reason"] = sampled.stop_reason
        await answer(send, {"request_id": "1", "choices": [choice]})
        return True


def test_the_rows_have_every_digit_of_the_engine_and_audit_as_labelled(
    small_smollm2, tmp_path, capsys
):
    if not PYTHON.exists():
        pytest.skip("no .venv-verifiers: run `make test-hooks`")
    engine = ModelEngine(small_smollm2)
    (tmp_path / "smollm2").symlink_to(small_smollm2)
    with running(engine) as url:
        hook = ROOT / "examples" / "hooks" / "verifiers_eval.py"
        endpoint = ["-m", "smollm2", "--client.base-url", f"{url}/v1"]
        done = subprocess.run(
            [PYTHON, hook, "sums", *endpoint, *OPTIONS.split()],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{TASKSET}", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    dataset = str(tmp_path / "ds")
    assert run(["convert", str(tmp_path / "out"), "--out", dataset]) == 0
    rows = rollout_io.read(dataset).to_pylist()
    kept = {(*map(tuple, (r["prompt_token_ids"], r["response_ids"])),): r for r in rows}
    assert kept.keys() == engine.sampled.keys()
    for tokens, logprobs in engine.sampled.items():
        assert kept[tokens]["rollout_logprobs"] == pytest.approx(logprobs, rel=1e-6)
    assert run(["validate", dataset]) == 0
    capsys.readouterr()
    assert run(["audit", dataset, "--weights", f"0={small_smollm2}", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdicts.keys() == {"as_labelled"}
    assert verdicts["as_labelled"]["rows"] == len(rows)
