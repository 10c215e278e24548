"""HTTP calls to equivalent servers, with limits, retries and cancellation."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from pipelines.generation.engines.base import CONTEXT_LENGTH, ENGINE_DOWN
from schemas.errors import EngineError, count
from schemas.imports import requires_extra

with requires_extra("generate", "an engine over HTTP"):
    import aiohttp
    from yarl import URL

Body = Mapping[str, Any] | None
T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

_NO_ROOM = ("context length", "max_tokens must be at least 1")
_EACH_ATTEMPTS = 3
_LARGE_BYTES = 1 << 20  # larger bodies are sent in parts, between which other calls can run

BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError)
"""Exceptions raised if a connection fails, breaks or times out."""

KEEP_ALIVE_S = 4.0
"""Seconds to keep an idle connection: less than the 5 s after which uvicorn closes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the concurrency, rate, duration and retries of calls.

    A call is retried, on the next server if there are several, after a failed, broken or timed-out
    connection, after status 408, 429 or 5xx, and after a response that the engine aborted. This is
    safe because sampling has no side effects and only one response is kept. Once each server was
    tried, retry n waits backoff_s * 2^(n-1) seconds, or longer if the server asks for it, but at
    most max_backoff_s; the wait is then multiplied by a random factor from 0.5 to 1.5.

    Attributes:
        max_concurrent: Maximum number of concurrent calls.
        requests_per_s: Maximum number of calls started per second; None: unlimited.
        timeout_s: Time limit for one complete response, in seconds.
        connect_timeout_s: Time limit for connecting, in seconds.
        max_attempts: Attempts per call. The default waits about three minutes for a
            server that is down.
        backoff_s: Wait before the first retry, in seconds.
        max_backoff_s: Maximum wait between attempts, before the random factor.
    """

    max_concurrent: int = 64
    requests_per_s: float | None = None
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    max_attempts: int = 12
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def wait_s(self, attempt: int, asked_s: float = 0.0) -> float:
        """Compute the wait after attempt `attempt` (from 1); `asked_s` is the server's Retry-After."""
        backoff_s: float = self.backoff_s * 2 ** min(attempt - 1, 60)
        return min(max(backoff_s, asked_s), self.max_backoff_s) * random.uniform(0.5, 1.5)


class ServerError(EngineError):
    """Error raised if all attempts at a call failed.

    Attributes:
        status: HTTP status of the last response; None if there was none.
        is_unreachable: True if the last connection failed or broke.
    """

    status: int | None = None
    is_unreachable: bool = False


class _Answer(NamedTuple):
    status: int
    reason: str
    retry_after: str
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Failed(NamedTuple):
    """An attempt at a request that another one may follow.

    Attributes:
        finding: What happened.
        asked_s: Wait that the server asked for, in seconds.
        status: HTTP status; None if there was no response.
        is_unreachable: True if the connection failed or broke.
        response: The response, with its body unread, if the client may get it in the end.
    """

    finding: str
    asked_s: float = 0.0
    status: int | None = None
    is_unreachable: bool = False
    response: Any = None


class HttpClient:
    """Connections to servers that return equivalent responses, and the way to try them.

    Args:
        urls: Root of each server, such as "http://127.0.0.1:8000"; a trailing "/v1" is removed.
        limits: Limits shared by all servers.
        trust_env: Whether proxies are taken from the environment.
    """

    def __init__(self, urls: Sequence[str], limits: Limits, *, trust_env: bool) -> None:
        self.urls = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
        self.limits, self._trust_env = limits, trust_env

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self.limits.connect_timeout_s,
                sock_read=self.limits.timeout_s,
            ),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            skip_auto_headers=("User-Agent", "Content-Type"),
            trust_env=self._trust_env,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request, and wait for the headers of its response; redirects are not followed."""
        data = None if body is None else body if len(body) < _LARGE_BYTES else io.BytesIO(body)
        where = URL(url, encoded=True)
        return await self._client.request(
            method, where, data=data, headers=headers, allow_redirects=False
        )

    async def repeat(
        self,
        urls: Callable[[], Sequence[str]],
        attempts: int,
        once: Callable[[str], Awaitable[T | Failed]],
        retried: Callable[[], object] = lambda: None,
    ) -> tuple[str, T | Failed]:
        """Try servers in turn until one succeeds; each of them is tried before the first wait.

        Args:
            urls: Returns the roots to choose from, before every attempt.
            attempts: Number of attempts.
            once: Makes one attempt at a root.
            retried: Callback for every retry.

        Returns:
            The last root, and its result.
        """
        for attempt in itertools.count(1):
            usable = urls()
            root = usable[(attempt - 1) % len(usable)]
            result = await once(root)
            if not isinstance(result, Failed) or attempt >= attempts:
                break
            if result.response is not None:
                result.response.close()
            retried()
            num_waits = attempt - len(usable) + 1  # none before each server was tried
            await asyncio.sleep(
                0 if num_waits < 1 else self.limits.wait_s(num_waits, result.asked_s)
            )
        return root, result


class Servers(HttpClient):
    """Servers that are called for whole JSON responses.

    Args:
        urls: Root of each server.
        limits: Limits shared by all servers.
        api_key: Bearer token of every request.

    Attributes:
        when_returned: Requests (path and body) to send to a server after a connection to it failed,
            before any other request, because it may have been restarted.
    """

    def __init__(self, urls: Sequence[str], limits: Limits, *, api_key: str | None = None) -> None:
        super().__init__(urls, limits, trust_env=True)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._slots = asyncio.Semaphore(limits.max_concurrent)
        self._next_start_s = 0.0
        self._turn = itertools.count()
        self.when_returned: Sequence[tuple[str, Body]] = ()
        self._lost: dict[str, float] = {}  # and the time of the next attempt, in monotonic seconds
        self._returning = asyncio.Lock()

    async def call(
        self, path: str, body: Callable[[], Body] | Body = None, *, session: str | None = None
    ) -> bytes:
        """Call one of the servers and return the body of a successful response (2xx).

        Args:
            path: Path such as "/v1/completions".
            body: Body of a POST request, sent as JSON, or a function that is called for every
                attempt to build it; None sends a GET request.
            session: Calls with the same session go to the same server as long as it responds. None:
                the servers are used in turn.

        Raises:
            EngineError: `engine_down`, `context_length`, `engine_refused`: see `Engine.sample`.
        """
        urls = self._order(session)
        headers = {} if session is None else {"X-Session-ID": session}
        attempts = self.limits.max_attempts + len(urls) - 1  # as many waits as for one server
        return await self._repeat(self._within_limits, urls, path, body, headers, attempts)

    async def call_each(self, path: str, body: Body = None) -> list[bytes]:
        """Call every server, as `call` does; responses are in the order of `urls`.

        There are at most three attempts, because these requests have side effects.
        """
        return list(await asyncio.gather(*(self.call_one(url, path, body) for url in self.urls)))

    async def call_one(
        self, url: str, path: str, body: Body = None, *, attempts: int = _EACH_ATTEMPTS
    ) -> bytes:
        """Call the server at this root like `call`, but ignore the limits on concurrency and rate.

        Running calls may occupy all slots until such a request lets them continue.
        """
        attempts = min(self.limits.max_attempts, attempts)
        return await self._repeat(self._send, [url], path, body, {}, attempts)

    async def change_each(self, change: Callable[[str], Awaitable[None]]) -> None:
        """Change the weights of all servers concurrently; `change` is called with each root.

        A server that fails while another one succeeds gets no calls until it has accepted
        `when_returned`, so set `when_returned` first.

        Raises:
            EngineError: As for `call`; a request was refused, or all servers failed.
        """

        async def try_to(url: str) -> ServerError | None:
            try:
                await change(url)
            except ServerError as error:
                return error
            return None

        found = await asyncio.gather(*(try_to(url) for url in self.urls))
        failed = [(url, error) for url, error in zip(self.urls, found, strict=True) if error]
        if len(failed) == len(self.urls):
            raise failed[0][1]
        for url, error in failed:
            _LOGGER.warning("%s did not load new weights, and is skipped: %s", url, error.got)
            self.lose(url)

    async def wait_while_down(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, and repeat it while the servers are down, for as long as `call` waits.

        Args:
            work: Requests to the servers, which may be repeated without harm.

        Raises:
            EngineError: As for `change_each`.
        """
        for attempt in itertools.count(1):
            try:
                return await work()
            except ServerError as error:
                if not error.is_unreachable or attempt >= self.limits.max_attempts:
                    raise
                if attempt == 1:
                    _LOGGER.warning("%s: waiting for the server: %s", error.where, error.got)
            await asyncio.sleep(self.limits.wait_s(attempt))

    def _order(self, session: str | None) -> list[str]:
        if session is None:
            first = next(self._turn) % len(self.urls)
            return [*self.urls[first:], *self.urls[:first]]
        return by_preference(self.urls, session)

    async def _repeat(
        self,
        send: Callable[[str, Callable[[], Body] | Body, dict[str, str]], Awaitable[_Answer]],
        urls: Sequence[str],
        path: str,
        body: Callable[[], Body] | Body,
        headers: dict[str, str],
        attempts: int,
    ) -> bytes:
        async def once(root: str) -> bytes | Failed:
            url = root + path
            try:
                await self.welcome_back(root)
                answer = await send(url, body, headers)
            except (aiohttp.ClientError, ConnectionError) as error:
                self.lose(root)
                return Failed(f"{type(error).__name__} {error}".strip(), is_unreachable=True)
            except TimeoutError:
                return Failed(f"no response within {self.limits.timeout_s:g} s")
            if answer.is_success:
                return answer.content
            if answer.status < 500 and answer.status not in {408, 429}:
                raise _refused(url, answer)
            finding = f"status {answer.status}: {_message(answer)}"
            return Failed(finding, _seconds(answer.retry_after), answer.status)

        root, result = await self.repeat(lambda: self._usable(urls), attempts, once)
        if not isinstance(result, Failed):
            return result
        hint = f"check that the server is up: {root}/health"
        finding = f"no usable response after {count(attempts, 'attempt')}: {result.finding}"
        failure = ServerError(ENGINE_DOWN, root + path, finding, hint=hint)
        failure.status, failure.is_unreachable = result.status, result.is_unreachable
        raise failure

    def _usable(self, urls: Sequence[str]) -> Sequence[str]:
        """Exclude lost servers that are not due for a retry yet, unless that excludes all."""
        now = time.monotonic()
        return [url for url in urls if self._lost.get(url, now) <= now] or urls

    def lose(self, *roots: str) -> None:
        """Mark servers as lost: each gets `when_returned` before its next call."""
        for root in roots:
            self._lost.setdefault(root, time.monotonic())

    async def welcome_back(self, root: str) -> None:
        """If a server was lost, send it `when_returned` before any other request.

        Raises:
            aiohttp.ClientError: The server is still down, or rejects a request.
        """
        if root not in self._lost:
            return
        async with self._returning:
            if root not in self._lost:
                return
            self._lost[root] = time.monotonic() + self.limits.max_backoff_s
            for path, body in self.when_returned:
                answer = await self._send(root + path, body, {})
                if not answer.is_success:
                    raise aiohttp.ClientConnectionError(f"status {answer.status} from {path}")
            del self._lost[root]

    async def _within_limits(
        self, url: str, body: Callable[[], Body] | Body, headers: dict[str, str]
    ) -> _Answer:
        async with self._slots:
            await self._start()
            return await self._send(url, body, headers)

    async def _send(
        self, url: str, body: Callable[[], Body] | Body, headers: dict[str, str]
    ) -> _Answer:
        async with asyncio.timeout(self.limits.timeout_s):
            asked = body() if callable(body) else body
            method, data = ("GET", None) if asked is None else ("POST", msgspec.json.encode(asked))
            headers = {"Content-Type": "application/json", **self._headers, **headers}
            async with await self.request(method, url, data, headers) as response:
                content = await response.read()
            retry_after = response.headers.get("Retry-After", "")
            return _Answer(response.status, response.reason or "", retry_after, content)

    async def _start(self) -> None:
        """Wait until the rate limit allows another call."""
        if self.limits.requests_per_s is not None:
            now = time.monotonic()
            start = max(now, self._next_start_s)
            self._next_start_s = start + 1 / self.limits.requests_per_s
            await asyncio.sleep(start - now)


def by_preference(urls: Sequence[str], session: str) -> list[str]:
    """Order servers by rendezvous hashing: adding or removing a server moves only its sessions."""
    return sorted(urls, key=lambda url: hashlib.sha256(f"{session} {url}".encode()).digest())


def _refused(url: str, answer: _Answer) -> EngineError:
    message = _message(answer)
    if any(words in message for words in _NO_ROOM):
        return EngineError(CONTEXT_LENGTH, url, f"the prompt leaves no room to respond: {message}")
    hint = None
    if "tool" in message and "--" in message:
        hint = "start the server with --enable-auto-tool-choice --tool-call-parser NAME"
    if answer.status in {404, 405} and "/v1/" not in url:
        hint = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
    finding = f"status {answer.status}: {message}"
    return EngineError("engine_refused", url, finding, hint=hint)


def _message(answer: _Answer) -> str:
    """Extract the server's error message, on one line."""
    try:
        body = json.loads(answer.content)
        text = str(body["error"]["message"] if "error" in body else body)
    except (ValueError, TypeError, KeyError, RecursionError):
        text = answer.content.decode(errors="replace")
    return " ".join(text.split())[:300] or answer.reason


def _seconds(retry_after: str) -> float:
    try:
        return max(float(retry_after), 0.0)
    except ValueError:
        return 0.0
