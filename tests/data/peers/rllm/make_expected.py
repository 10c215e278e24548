"""What rLLM trains on, of the episodes here: `python make_expected.py` (tinker, tinker-cookbook).

Needs rLLM's `rllm` on the path (types, trainer.tinker.transform). A sequence is shifted by one, as
for the loss: `targets`, `mask` and `logprobs` begin with the second token of `inputs`.
"""

import json
from pathlib import Path

from rllm.trainer.tinker.transform import trajectory_to_datums
from rllm.types import Step, Trajectory

HERE = Path(__file__).parent
FIELDS = ("prompt_ids", "response_ids", "logprobs", "metadata")


def trajectories():
    for path in sorted((HERE / "eval_results" / "episodes").iterdir()):
        episode = json.loads(path.read_text())
        for saved in episode["trajectories"]:
            steps = [Step(**{k: s[k] for k in FIELDS}, advantage=1.0) for s in saved["steps"]]
            yield episode["id"], Trajectory(uid=saved["uid"], name=saved["name"], steps=steps)


def sequences():
    for episode, trajectory in trajectories():
        for datum in trajectory_to_datums(trajectory):
            of = datum.loss_fn_inputs
            fields = {"episode": episode, "uid": trajectory.uid, "name": trajectory.name}
            inputs = datum.model_input.to_ints()
            rows = {"targets": of["target_tokens"], "mask": of["mask"], "logprobs": of["logprobs"]}
            yield {**fields, "inputs": inputs, **{name: list(rows[name].data) for name in rows}}


if __name__ == "__main__":
    text = json.dumps(list(sequences()), separators=(",", ":"))
    (HERE / "expected.json").write_text(text)
