"""HTTP to one or several equal servers: bounded, retried, and cancelled with its caller."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from pipelines.generation.engine import CONTEXT_LENGTH, ENGINE_DOWN
from schemas.errors import RolloutError

try:
    import httpx2
except ImportError:
    _HINT = 'pip install "rollout-io[generate]"'
    raise RolloutError("extra_installed", "engines", "no `httpx2` package", "", _HINT) from None

Body = Mapping[str, Any] | None

_NO_ROOM = ("context length", "max_tokens must be at least 1")
_KEEP_ALIVE_S = 4.0
_EACH_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How hard servers are asked, and how patiently.

    A call is repeated after a connection that failed, broke off or timed out, after 408, 429, 5xx
    and a response that the engine aborted, on the next server if there are several: sampling has no side effects, and only one answer
    is kept. The n-th repetition waits backoff_s * 2^(n-1) seconds, at most max_backoff_s, times a
    random number from 0.5 to 1.5, or as long as the server asks, within the same bound.

    Attributes:
        max_concurrent: Calls under way at once.
        requests_per_s: Calls that begin in a second; None: any number.
        timeout_s: For one answer, whole.
        connect_timeout_s: For a connection.
        max_attempts: Of one call. By default it waits about three minutes for a server to return.
        backoff_s: Before the first repetition.
        max_backoff_s: Between two attempts, but for the random factor.
    """

    max_concurrent: int = 64
    requests_per_s: float | None = None
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    max_attempts: int = 12
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def wait_s(self, attempt: int, asked_s: float = 0.0) -> float:
        """Seconds between attempt number `attempt`, from 1, and the next."""
        backoff_s: float = self.backoff_s * 2 ** min(attempt - 1, 60)
        return min(max(backoff_s, asked_s), self.max_backoff_s) * random.uniform(0.5, 1.5)


class Servers:
    """Servers that give the same answers.

    Args:
        urls: Their roots, "http://127.0.0.1:8000"; a trailing "/v1" is left out.
        limits: Shared by all of them.
        api_key: Sent as the bearer token.

    Attributes:
        when_returned: What a server is asked first, path and body, that a connection to has failed
            since: it may have been started anew.
    """

    def __init__(self, urls: Sequence[str], limits: Limits, *, api_key: str | None = None) -> None:
        self.urls = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
        self.limits = limits
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._slots = asyncio.Semaphore(limits.max_concurrent)
        self._next_start_s = 0.0
        self._turn = itertools.count()
        self.when_returned: Sequence[tuple[str, Body]] = ()
        self._lost: set[str] = set()
        self._returning = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            timeout=httpx2.Timeout(None, connect=self.limits.connect_timeout_s),
            limits=httpx2.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_KEEP_ALIVE_S,
            ),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def call(
        self, path: str, body: Callable[[], Body] | Body = None, *, session: str | None = None
    ) -> bytes:
        """The body of a good answer (2xx) of one of the servers.

        Args:
            path: "/v1/completions".
            body: Sent as JSON by POST; None: GET. A function is asked at every attempt.
            session: Its calls go to one server, as long as that one answers. None: in turn.

        Raises:
            RolloutError: engine_down, context_length, engine_refused.
        """
        urls = self._order(session)
        headers = {} if session is None else {"X-Session-ID": session}
        attempts = self.limits.max_attempts
        return await self._repeat(urls, path, body, headers, attempts)

    async def call_each(self, path: str, body: Body = None) -> list[bytes]:
        """The answers of all servers, as `call` gives them, in the order of `urls`.

        Three attempts at most: they are asked for more than samples here.
        """
        attempts = min(self.limits.max_attempts, _EACH_ATTEMPTS)
        calls = (self._repeat([url], path, body, {}, attempts) for url in self.urls)
        return list(await asyncio.gather(*calls))

    def _order(self, session: str | None) -> list[str]:
        if session is None:
            first = next(self._turn) % len(self.urls)
            return [*self.urls[first:], *self.urls[:first]]
        return by_preference(self.urls, session)

    async def _repeat(
        self,
        urls: Sequence[str],
        path: str,
        body: Callable[[], Body] | Body,
        headers: dict[str, str],
        attempts: int,
    ) -> bytes:
        for attempt in itertools.count(1):
            root, asked_s = urls[(attempt - 1) % len(urls)], 0.0
            url = root + path
            try:
                await self._welcome_back(root)
                answer = await self._once(url, body, headers)
            except TimeoutError:
                got = f"no answer within {self.limits.timeout_s:g} s"
            except httpx2.TransportError as error:
                self._lost.add(root)
                got = f"{type(error).__name__} {error}".strip()
            else:
                if answer.is_success:
                    return answer.content
                if answer.status_code < 500 and answer.status_code not in {408, 429}:
                    raise _refused(url, answer)
                got = f"status {answer.status_code}: {_message(answer)}"
                asked_s = _seconds(answer.headers.get("Retry-After", ""))
            if attempt >= attempts:
                break
            await asyncio.sleep(self.limits.wait_s(attempt, asked_s))
        hint = f"is the server up? {url.partition('/v1')[0]}/health"
        expected = f"an answer in one of {attempts} attempts"
        raise RolloutError(ENGINE_DOWN, url, got, expected, hint)

    async def _welcome_back(self, root: str) -> None:
        """Ask a server that was lost what `when_returned` says, once, before anything else."""
        if root not in self._lost:
            return
        async with self._returning:
            if root not in self._lost:
                return
            for path, body in self.when_returned:
                answer = await self._once(root + path, body, {})
                if not answer.is_success:
                    raise httpx2.ReadError(f"status {answer.status_code} of {path}")
            self._lost.discard(root)

    async def _once(
        self, url: str, body: Callable[[], Body] | Body, headers: dict[str, str]
    ) -> httpx2.Response:
        async with self._slots:
            await self._start()
            async with asyncio.timeout(self.limits.timeout_s):
                asked = body() if callable(body) else body
                if asked is None:
                    return await self._client.get(url, headers=headers)
                content = msgspec.json.encode(asked)
                headers = {"Content-Type": "application/json", **headers}
                return await self._client.post(url, content=content, headers=headers)

    async def _start(self) -> None:
        """Wait for this call's place among those that begin in a second."""
        if self.limits.requests_per_s is not None:
            now = time.monotonic()
            start = max(now, self._next_start_s)
            self._next_start_s = start + 1 / self.limits.requests_per_s
            await asyncio.sleep(start - now)


def by_preference(urls: Sequence[str], session: str) -> list[str]:
    """Servers in a session's order; one that is added or gone moves only its own sessions."""
    return sorted(urls, key=lambda url: hashlib.sha256(f"{session} {url}".encode()).digest())


def _refused(url: str, answer: httpx2.Response) -> RolloutError:
    message = _message(answer)
    if any(words in message for words in _NO_ROOM):
        return RolloutError(CONTEXT_LENGTH, url, message, "a prompt that leaves room to respond")
    hint = None
    if "tool" in message and "--" in message:
        hint = "start the server with --enable-auto-tool-choice --tool-call-parser NAME"
    if answer.status_code in {404, 405} and "/v1/" not in url:
        hint = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
    return RolloutError("engine_refused", url, f"status {answer.status_code}: {message}", "", hint)


def _message(answer: httpx2.Response) -> str:
    """What the server says is wrong, on one line."""
    try:
        body = answer.json()
        text = str(body["error"]["message"] if "error" in body else body)
    except (ValueError, TypeError, KeyError, RecursionError):
        text = answer.text
    return " ".join(text.split())[:300] or answer.reason_phrase


def _seconds(retry_after: str) -> float:
    try:
        return max(float(retry_after), 0.0)
    except ValueError:
        return 0.0
