"""Sessions of a recorder from Python."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from schemas.errors import RolloutError

try:
    import httpx2
except ImportError:
    _HINT = 'pip install "rollout-io[record]"'
    raise RolloutError("extra_installed", "recorder", "no `httpx2` package", "", _HINT) from None


@dataclass(kw_only=True, slots=True)
class RecordedSession:
    """A session that is open.

    Attributes:
        name: "instance/repetition".
        base_url: What a harness is given for the engine's.
        reward: Its outcome, to be set; None: unknown.
        error: Why it failed, to be set; None: it did not.
        metrics: Numbers about it, to be set.
    """

    name: str
    base_url: str
    reward: float | None = None
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class RecorderClient:
    """A recorder that is up.

    Args:
        url: Its root.
        admin_key: As it was started with.
        timeout_s: For one answer.

    Example:
        recorder = RecorderClient("http://127.0.0.1:8100")
        async with recorder.session("shop-1", 0) as session:
            answer = await harness(base_url=session.base_url)
            session.reward = float(answer == "42")
    """

    def __init__(self, url: str, *, admin_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}

    @asynccontextmanager
    async def session(
        self, instance_id: str, repetition_id: int | None = None
    ) -> AsyncIterator[RecordedSession]:
        """Open a session; it ends with the block, and has failed if that raised.

        Args:
            instance_id: Its task.
            repetition_id: Which attempt; None: the first number that is free.

        Raises:
            RolloutError: recorder: it does not answer, or refuses.
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
            said = {"reward": session.reward, "error": session.error, "metrics": session.metrics}
            await self._post(path, said)

    async def set_policy_version(self, version: int) -> None:
        """Calls from here on are of these weights.

        Raises:
            RolloutError: As `session`.
        """
        await self._post("/policy_version", {"policy_version": version})

    async def _post(self, path: str, body: object) -> dict[str, str]:
        url = path if path.startswith("http") else self._url + path
        try:
            async with httpx2.AsyncClient(timeout=self._timeout_s, headers=self._headers) as client:
                answer = await client.post(url, json=body)
            found: dict[str, str] = answer.json()
        except (httpx2.TransportError, ValueError) as error:
            got = f"{type(error).__name__} {error}".strip()
            hint = "is `rollouts record` up?"
            raise RolloutError("recorder", self._url, got, "an answer", hint) from None
        if not answer.is_success:
            raise RolloutError(
                "recorder", self._url, str(found.get("error", found)), "an answer of 2xx"
            )
        return found
