"""A job of Harbor 0.25.0: `python make.py http://127.0.0.1:8000/v1`, in an empty directory.

Needs tmux, and a vLLM started with `--served-model-name smollm2 --max-model-len 4096`. Answers are
held to the agent's JSON by vLLM's structured outputs: the model is too small to keep to it. The
agent is terminus-2 with a short prompt, so that the files are small.
"""

import asyncio
import os
import shutil
import sys
from pathlib import Path

from harbor.job import Job
from harbor.models.job.config import JobConfig

HERE = Path(__file__).parent
KEPT = {"result.json", "reward.json"}
HELLO, HI = "echo hello > /app/hello.txt\n", "echo hi > /app/note.txt\n"


def closed(**properties):
    keys = {"properties": properties, "required": list(properties)}
    return {"type": "object", **keys, "additionalProperties": False}


def answer_schema(keystrokes):
    text = {"type": "string", "maxLength": 16}
    command = closed(keystrokes={"enum": keystrokes}, duration={"enum": [0.1]})
    commands = {"type": "array", "minItems": 1, "maxItems": 1, "items": command}
    return closed(analysis=text, plan=text, commands=commands)


def agent(base_url, keystrokes, max_turns, timeout_s=60.0, **options):
    outputs = {"json": answer_schema(keystrokes), "disable_any_whitespace": True}
    limits = {"max_input_tokens": 4096, "max_output_tokens": 512}
    limits |= {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
    call = {"max_tokens": 160, "extra_body": {"structured_outputs": outputs}}
    fixed = {"api_base": base_url, "collect_rollout_details": True, "temperature": 1.0}
    fixed |= {"model_info": limits, "llm_call_kwargs": call, "record_terminal_session": False}
    fixed |= {"max_turns": max_turns, "tmux_pane_height": 12, "tmux_pane_width": 80}
    fixed |= {"proactive_summarization_threshold": 0, "suppress_max_turns_warning": True}
    identity = {"import_path": "shell:ShortTerminus", "model_name": "hosted_vllm/smollm2"}
    return {**identity, "override_timeout_sec": timeout_s, "kwargs": {**fixed, **options}}


def config(name, agents):
    environment = {"import_path": "shell:ShellEnvironment"}
    fields = {"job_name": name, "jobs_dir": "jobs", "n_concurrent_trials": 1, "quiet": True}
    fields |= {"tasks": [{"path": "task"}], "environment": environment}
    return JobConfig(**fields, agents=agents)


def keep(path):
    """Copy a file of the job, the paths of this machine in its tracebacks replaced."""
    target = HERE / path
    target.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text().replace(str(HERE), "/job").replace(sys.prefix, "/venv")
    target.write_text(text.replace(sys.base_prefix, "/usr").replace(str(Path.cwd()), "/run"))


async def run(name, agents):
    job = await Job.create(config(name, agents))
    await job.run()
    for path in Path("jobs", name).rglob("*"):
        if path.name in KEPT or path.match("agent/trajectory*.json"):
            keep(path)


def main(base_url):
    os.environ["HOSTED_VLLM_API_KEY"] = "EMPTY"
    shutil.copytree(HERE / "task", "task", dirs_exist_ok=True)
    shutil.rmtree(HERE / "jobs", ignore_errors=True)
    plain = agent(base_url, [HI], 2)
    summary = agent(base_url, [HELLO, HI], 2, proactive_summarization_threshold=4050)
    late = agent(base_url, [HELLO], 20, timeout_s=4.0)
    asyncio.run(run("hello", [plain, summary, late]))


if __name__ == "__main__":
    main(sys.argv[1])
