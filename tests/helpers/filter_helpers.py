"""Small step tables for the tests of filters, masks and mixing."""

from hypothesis import HealthCheck, settings

from schemas.strategies import table_of
from tests.helpers.examples import examples

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(50)
)


def table(*trajectories, optional=()):
    """Rows of trajectories: (instance, repetition, list of steps, error), a step is a dict."""
    rows = []
    for instance, repetition, steps, *error in trajectories:
        for index, step in enumerate(steps):
            rows.append(
                {
                    "instance_id": instance,
                    "repetition_id": repetition,
                    "trajectory_id": f"{instance}_{repetition}",
                    "step_index": index,
                    "is_last_step": index == len(steps) - 1,
                    "prompt_token_ids": [1 + n for n in range(1 + index)],
                    "response_ids": [2 + index],
                    "loss_mask": [True] * len(step.get("response_ids", [0])),
                    "token_source": "engine",
                    "error": error[0] if error else None,
                }
                | step
            )
    present = {name for row in rows for name in row} | {"error", "reward"}
    declared = ("reward", "stop_reason", "policy_version", "agent", "error")
    return table_of(rows, tuple(n for n in declared if n in present) + optional)


def one_step(*returns, instance="a", **step):
    """A group of trajectories of one step, one per return; "failed" stands for a failed one."""
    failed = {"reward": None}
    return [
        (instance, n, [step | failed], "timeout") if value == "failed"
        else (instance, n, [step | {"reward": value}])
        for n, value in enumerate(returns)
    ]  # fmt: skip


def ids(frame):
    """Trajectory ids of a frame, in order."""
    return (
        frame.select("trajectory_id")
        .unique(maintain_order=True)
        .collect()["trajectory_id"]
        .to_list()
    )
