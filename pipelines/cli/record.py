"""`rollouts record`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from rollout_io.cli.output import emit, example, next_command, note
from schemas.errors import RolloutError
from schemas.extras import requires_extra

_EXAMPLE = "rollouts record --upstream http://127.0.0.1:8000/v1 --out rollouts/ --port 8100"


@click.command(epilog=example(_EXAMPLE))
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    required=True,
    metavar="URL",
    help="Root URL of an engine (vLLM); repeat for more: each session uses one of them.",
)
@click.option("--out", required=True, metavar="DS", help="Dataset to append shards to.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A host name that remote clients use; may be repeated.",
)
@click.option("--port", default=8100, show_default=True, help="Port; 0 picks a free one.")
@click.option("--served-model-name", metavar="NAME", help="Name of the model for clients.")
@click.option(
    "--upstream-api-key",
    envvar="ROLLOUTS_UPSTREAM_API_KEY",
    metavar="KEY",
    help="Key sent to the engines.  [default: the client's; env: ROLLOUTS_UPSTREAM_API_KEY]",
)
@click.option(
    "--admin-key",
    envvar="ROLLOUTS_ADMIN_KEY",
    metavar="KEY",
    help="Required to open sessions; each session then has a key for writing.  "
    "[env: ROLLOUTS_ADMIN_KEY]",
)
@click.option("--policy-version", type=click.IntRange(min=0), help="Version of the weights.")
@click.option(
    "--exact-prefix",
    type=click.Path(),
    metavar="DIR",
    help="Continue growing chats token by token, with the tokenizer in DIR.",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["raw", "processed"]),
    help="Distribution of the engines' log-probabilities.",
)
@click.option(
    "--idle-timeout",
    "idle_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    metavar="S",
    help="Abandon a session after S seconds without a call.",
)
@click.option(
    "--max-request-mb",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum size of a request body, MiB.",
)
@click.option(
    "--max-answer-mb",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum size of an engine's answer, MiB; of one event or line, a quarter of it.",
)
@click.option(
    "--max-concurrency",
    default=1024,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum number of concurrent calls; more wait.",
)
@click.option(
    "--on-full",
    type=click.Choice(["refuse", "serve"]),
    default="refuse",
    show_default=True,
    help="If a call cannot be written: return an error, or answer without recording.",
)
@click.option(
    "--unassigned",
    type=click.Choice(["keep", "refuse"]),
    default="keep",
    show_default=True,
    help="Calls without a session: record each as its own session, or return an error.",
)
@click.option("--end-open", is_flag=True, help="On exit, end open sessions too, without a reward.")
def record(*, host: str, port: int, max_request_mb: int, max_answer_mb: int, **given: Any) -> None:
    """Record the calls of any harness: a proxy that speaks the OpenAI API.

    Set a harness's base URL to URL/s/INSTANCE/REPETITION[/AGENT]/v1. POST {"reward": 1.0} to
    URL/s/INSTANCE/REPETITION/end to add the session to DS as a trajectory. Pending sessions are
    kept in DS/.recording, and the next start resumes them. See docs/record.md.
    """
    for url in given["upstreams"]:
        if not url.startswith(("http://", "https://")):
            raise RolloutError("config_value", "--upstream", url, "http://HOST:PORT/v1")
        if {"@", "?", "#"} & set(url):
            hint = "a key goes into ROLLOUTS_UPSTREAM_API_KEY"
            got, expected = "a URL with a user, a query or a fragment", "http://HOST:PORT/v1"
            raise RolloutError("config_value", "--upstream", got, expected, hint)
    from pipelines.origin_guard import is_host_name, is_loopback

    for name in given["allowed_hosts"]:
        if not is_host_name(name):
            raise RolloutError("config_value", "--allow-host", repr(name), "a name without a port")
    from pipelines.record.settings import RecordSettings
    from schemas.metadata import DatasetMetadata

    with requires_extra("record", "rollouts record"):
        import uvloop

        from pipelines.record.serving import serve
    if not is_loopback(host) and given["admin_key"] is None:
        note(f"warning: whoever reaches {host} can call the engine and write: --admin-key KEY")
    settings = RecordSettings(
        max_request_bytes=max_request_mb << 20, max_answer_bytes=max_answer_mb << 20, **given
    )
    metadata = DatasetMetadata(logprobs_mode=settings.logprobs_mode)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, host=host, port=port, metadata=metadata, announce=_announce))
    next_command(f"rollouts validate {settings.out}")


def _announce(url: str) -> None:
    emit(url)
    note(f"base URL of a harness: {url}/s/INSTANCE/REPETITION/v1; its outcome: POST to .../end")
