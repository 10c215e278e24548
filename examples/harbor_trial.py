"""Run one Harbor trial against the policy: a harness for `rollouts rl` and `rollouts generate`.

    [generate]
    harness = "HARBOR/bin/python examples/harbor_trial.py trial.json {path} {base_url} {model} {api_key} {reward_file}"

It needs only the package `harbor`, in an environment of its own (Python 3.12). `trial.json` is a
Harbor TrialConfig without a task; the task directory and the model's endpoint are added. Each call of
the agent is recorded with its exact tokens, so `collect_rollout_details` is not needed.

Outcomes are those of SkyRL's Harbor generator: a trial that exceeded the model's context has reward 0
and the stop reason `context_length`, which `mask_overlong` masks; a time-out of the agent fails the
trajectory; and after any other exception, such as an agent's exit status, the verifier's reward counts if
there is one.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

CONTEXT, TIMEOUT = "ContextLengthExceededError", "AgentTimeoutError"
REWARD = "reward"


def trial_settings(given: dict[str, Any], path: str, base_url: str, model: str) -> dict[str, Any]:
    """Add the task and the endpoint to a TrialConfig, without changing other settings."""
    agent = {"name": "terminus-2"} | given.get("agent", {})
    kwargs = {"enable_summarize": False} | agent.get("kwargs", {})
    if "model_info" in kwargs:  # Harbor asks for costs, which a policy does not have
        costs = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
        kwargs["model_info"] = costs | kwargs["model_info"]
    served = {"model_name": f"hosted_vllm/{model.rpartition('/')[2]}"}
    return given | {
        "task": {"path": path},
        "agent": agent | served | {"kwargs": kwargs | {"api_base": base_url}},
    }


def outcome_of(result: Any) -> dict[str, Any]:
    """Return the outcome of a TrialResult: `reward` or `error`, and `metrics`."""
    exception = result.exception_info
    kind = exception.exception_type if exception else None
    context = result.agent_result
    turns = ((context.metadata or {}) if context else {}).get("n_episodes")
    metrics = {"context_length_exceeded": float(kind == CONTEXT)}
    if turns is not None:
        metrics["num_turns"] = float(turns)
    if kind == CONTEXT:
        return {"reward": 0.0, "stop_reason": "context_length", "metrics": metrics}
    rewards = (result.verifier_result.rewards or {}) if result.verifier_result else {}
    if exception is not None and (kind == TIMEOUT or rewards.get(REWARD) is None):
        return {"error": f"{kind}: {exception.exception_message}", "metrics": metrics}
    if rewards.get(REWARD) is None:
        return {"error": f"the verifier returned no `{REWARD}`", "metrics": metrics}
    return {"reward": float(rewards[REWARD]), "metrics": metrics}


async def run(settings: dict[str, Any]) -> Any:
    """Run the trial."""
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    trial = await Trial.create(TrialConfig.model_validate(settings))
    return await trial.run()


def main(config: str, path: str, base_url: str, model: str, api_key: str, out: str) -> None:
    """Run the trial, and write its outcome to the file `out`."""
    os.environ["HOSTED_VLLM_API_KEY"] = api_key
    given = json.loads(Path(config).read_text(encoding="utf-8"))
    result = asyncio.run(run(trial_settings(given, path, base_url, model)))
    Path(out).write_text(json.dumps(outcome_of(result)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
