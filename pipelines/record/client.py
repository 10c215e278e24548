"""Python client of a running recorder."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import InputError
from schemas.imports import requires_extra

with requires_extra("record", "a recorder's client"):
    import aiohttp


@dataclass(kw_only=True, slots=True)
class RecordedSession:
    """An open session; set its outcome before it ends.

    Attributes:
        name: "instance/repetition".
        base_url: Base URL for the harness to use instead of the engine's.
        reward: Reward of the run; None if unknown.
        error: Reason why the run failed; None if it succeeded.
        metrics: Metrics of the run, by name.
    """

    name: str
    base_url: str
    reward: float | None = None
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class RecorderClient:
    """Client for a running recorder.

    Args:
        url: Root URL of the recorder.
        admin_key: Admin key that the recorder was started with.
        timeout_s: Time limit for each request, in seconds.

    Example:
        recorder = RecorderClient("http://127.0.0.1:8100")
        async with recorder.session("shop-1", 0) as session:
            answer = await harness(base_url=session.base_url)
            session.reward = float(answer == "42")
    """

    def __init__(self, url: str, *, admin_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json"}
        if admin_key is not None:
            self._headers["Authorization"] = f"Bearer {admin_key}"

    @asynccontextmanager
    async def session(
        self, instance_id: str, repetition_id: int | None = None
    ) -> AsyncIterator[RecordedSession]:
        """Open a session for the `async with` block; it ends as failed if the block raises.

        Args:
            instance_id: Id of the task.
            repetition_id: Number of the attempt; None for the first unused number.

        Raises:
            InputError: `recorder`: the recorder does not respond, or rejects the request;
                `reward_line`: the outcome cannot be encoded as JSON (a NaN reward, for example);
                the session then remains open.
        """
        body = {"instance_id": instance_id, "repetition_id": repetition_id}
        opened = await self._post("/sessions", body)
        session = RecordedSession(name=opened["session"], base_url=opened["base_url"])
        path = opened["base_url"].removesuffix("/v1") + "/end"
        try:
            yield session
        except BaseException as error:
            text = " ".join(str(error).split())[:300]
            session.error = session.error or f"{type(error).__name__}: {text}".strip(": ")
            raise
        finally:
            outcome = {"reward": session.reward, "error": session.error, "metrics": session.metrics}
            await self._post(path, outcome, where=f"session {session.name}")

    async def set_policy_version(self, version: int) -> None:
        """Set the version of the engines' weights for calls from now on.

        Raises:
            InputError: As for `session`.
        """
        await self._post("/policy_version", {"policy_version": version})

    async def _post(self, path: str, body: object, *, where: str = "request") -> dict[str, Any]:
        url = path if path.startswith("http") else self._url + path
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            finding = f"cannot encode {body} as JSON: {error}"
            hint = "use finite numbers and strings; convert arrays and tensors with `float(...)`"
            raise InputError("reward_line", where, finding, hint=hint) from None
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=timeout, headers=self._headers, trust_env=True
                ) as client,
                client.post(url, data=content, allow_redirects=False) as answer,
            ):
                decoded: dict[str, Any] = json.loads(await answer.read())
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            reason = f"{type(error).__name__} {error}".strip()
            finding, hint = f"no response ({reason})", "check that `rollouts record` is running"
            raise InputError("recorder", self._url, finding, hint=hint) from None
        if not 200 <= answer.status < 300:
            problem = decoded.get("error", decoded)
            text = problem.get("message", problem) if isinstance(problem, dict) else problem
            raise InputError("recorder", self._url, f"status {answer.status}: {text}")
        return decoded
