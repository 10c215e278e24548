"""A trajectory produced by a harness that calls its base URL."""

from __future__ import annotations

from pipelines.generation.config import GenerateConfig
from pipelines.generation.tasks import Task
from pipelines.harness.launchers import Harness
from pipelines.harness.recorded_calls import Calls
from rollout_io.conversion.rewards import Outcome
from rollout_io.formats.base import Step
from schemas.errors import InputError, RolloutError, count


class HarnessTrajectory:
    """One run of a harness.

    Args:
        harness: The harness to run.
        calls: Server of the harness's calls.
        task: The task to attempt.
        config: Sampling settings for fields that calls omit, and the time limit.

    Attributes:
        steps: Recorded calls, set when the harness ends; kept if the trajectory fails.
        warnings: Always empty.
    """

    def __init__(self, harness: Harness, calls: Calls, task: Task, config: GenerateConfig) -> None:
        self._harness, self._calls, self._task, self._config = harness, calls, task, config
        self.where = f"trajectory {task.trajectory_id!r}"
        self.steps: list[Step] = []
        self.warnings: list[str] = []

    async def run(self) -> None:
        """Run the harness; the last step gets its reward and stop reason, earlier steps get 0.

        Raises:
            RolloutError: `harness_error`: the harness reports a failure; `no_calls`: no call got a
                response; `engine_down`: the engine fails; or any error of `Harness.run`, or the
                error that makes the calls unusable.
        """
        failure: RolloutError | None = None
        async with self._calls.trajectory(self._task, self._config) as (opened, endpoint):
            try:
                outcome = await self._harness.run(
                    endpoint, self._task, self._config.agent_timeout_s, self._calls.watch
                )
            except RolloutError as error:
                failure = error
                outcome = _failed(self.where, error.failure)
            await opened.end_calls()
            if opened.failure is not None:
                raise opened.failure
            if opened.session.places:
                self.steps, fault = await self._calls.steps(opened, outcome)
                failure = failure or fault
                if self.steps and outcome.stop_reason is not None:
                    self.steps[-1].stop_reason = outcome.stop_reason
        if failure is None and outcome.error is not None:
            failure = InputError("harness_error", self.where, outcome.error)
        if failure is None and not self.steps:
            calls = count(opened.num_calls, "call")
            got = f"the harness made {calls} but received no response"
            if not opened.num_calls:
                got = "the harness made no calls to the model"
            hint = f"check that the harness uses its base URL, {endpoint.base_url}"
            raise InputError("no_calls", self.where, got, hint=hint)
        if failure is not None:
            raise failure


def _failed(where: str, error: str) -> Outcome:
    return Outcome(where=where, reward=None, error=error, metrics={}, user_values={})
