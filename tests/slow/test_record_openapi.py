import os
import subprocess

import pytest

from tests.conftest import ROOT
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.recorder_helpers import recorder_process

CHECKS = (
    "not_a_server_error,content_type_conformance,response_schema_conformance,unsupported_method"
)


@pytest.mark.nightly
def test_no_request_that_its_own_description_leads_to_is_a_server_error_or_hangs(tmp_path):
    program = ROOT / ".venv-clients" / "bin" / "st"
    if not program.exists():
        pytest.skip("no .venv-clients: run `make test-vllm`")
    with (
        running(FakeEngine()) as engine,
        recorder_process(tmp_path / "ds", "--upstream", engine) as (_, url),
    ):
        done = subprocess.run(
            [
                *(program, "run", f"{url}/openapi.json", "--url", url, "--checks", CHECKS),
                *("--max-response-time", "10", "--max-examples", "30", "--continue-on-failure"),
            ],
            cwd=tmp_path,
            env=os.environ | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout
