"""A trial as Harbor runs it, but for the container: agent, verifier, result, each with its files.

python harbor_trial.py TASK_FILE API_BASE TRIAL_DIR
"""

import json
import sys
from pathlib import Path

import openai

task_file, api_base, trial = sys.argv[1], sys.argv[2], Path(sys.argv[3])
task = json.loads(Path(task_file).read_text())
for name in ("agent", "verifier"):
    (trial / name).mkdir(parents=True)
config = {"agent": {"model_name": "openai/policy", "kwargs": {"api_base": api_base}}}
(trial / "config.json").write_text(json.dumps(config))

messages, steps = list(task["prompt"]), []
with openai.OpenAI(base_url=api_base) as api:  # its key is in the environment
    for step_id in range(2):
        answer = api.chat.completions.create(model="policy", messages=messages, max_tokens=16)
        said = answer.choices[0].message.content
        steps.append({"step_id": step_id, "source": "agent", "message": said})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "More?"}]
(trial / "agent" / "trajectory.json").write_text(json.dumps({"steps": steps}))

reward = len(steps[-1]["message"]) % 97 / 96
(trial / "verifier" / "reward.txt").write_text(f"{reward}\n")
result = {"trial_name": trial.name, "verifier_result": {"rewards": {"reward": reward}}}
(trial / "result.json").write_text(json.dumps(result))
