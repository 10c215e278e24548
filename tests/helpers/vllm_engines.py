"""Clients of vLLM servers, with small waits."""

from contextlib import ExitStack, asynccontextmanager

from pipelines.generation import Sampling
from pipelines.generation.engines.http_pool import Limits
from pipelines.generation.engines.vllm import VllmEngine
from tests.helpers.http_server import serving

FAST = Limits(backoff_s=0.01, max_backoff_s=0.04, max_attempts=6, timeout_s=5)
SAMPLING = Sampling(max_tokens=3)


@asynccontextmanager
async def connected(*servers, **settings):
    """An engine of servers, which are served meanwhile unless they were before."""
    usual = {"model": "m", "limits": FAST, "logprobs_mode": "raw"}
    with ExitStack() as stack:
        for server in servers:
            if not hasattr(server, "port"):
                stack.enter_context(serving(server))
        urls = [server.url for server in servers]
        async with VllmEngine(urls, **usual | settings) as engine:
            yield engine
