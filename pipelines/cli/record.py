"""`rollouts record`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from rollout_io.cli.output import emit, example, next_command, note
from schemas.errors import RolloutError

_EXAMPLE = "rollouts record --upstream http://127.0.0.1:8000/v1 --out rollouts/ --port 8100"


@click.command(epilog=example(_EXAMPLE))
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    required=True,
    metavar="URL",
    help="Root of an engine (vLLM); may be repeated: a session stays with one of them.",
)
@click.option("--out", required=True, metavar="DS", help="Dataset; shards are added.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8100, show_default=True, help="0: a free one.")
@click.option("--served-model-name", metavar="NAME", help="The model's name for clients.")
@click.option(
    "--upstream-api-key",
    envvar="ROLLOUTS_UPSTREAM_API_KEY",
    metavar="KEY",
    help="Sent to the engines.  [default: the client's own; env: ROLLOUTS_UPSTREAM_API_KEY]",
)
@click.option(
    "--admin-key",
    envvar="ROLLOUTS_ADMIN_KEY",
    metavar="KEY",
    help="Sessions are opened with it alone, and written to with their own keys.  "
    "[env: ROLLOUTS_ADMIN_KEY]",
)
@click.option("--policy-version", type=click.IntRange(min=0), help="Of the engines' weights.")
@click.option(
    "--exact-prefix",
    type=click.Path(),
    metavar="DIR",
    help="Continue growing chats token by token, with the tokenizer in DIR.",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["raw", "processed"]),
    help="What the engines' log-probabilities are of.",
)
@click.option(
    "--idle-timeout",
    "idle_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    metavar="S",
    help="A session without a call for so long is abandoned.",
)
@click.option(
    "--max-request-mb", default=64, show_default=True, type=click.IntRange(min=1), help="Of a body."
)
@click.option(
    "--max-concurrency",
    default=1024,
    show_default=True,
    type=click.IntRange(min=1),
    help="Calls under way at once; others wait.",
)
@click.option(
    "--on-full",
    type=click.Choice(["refuse", "serve"]),
    default="refuse",
    show_default=True,
    help="When a call cannot be written: an error to the client, or an unrecorded answer.",
)
@click.option(
    "--unassigned",
    type=click.Choice(["keep", "refuse"]),
    default="keep",
    show_default=True,
    help="Calls of no session: a session each, or an error to the client.",
)
@click.option(
    "--end-open", is_flag=True, help="At the end, end open sessions too, without a reward."
)
def record(*, host: str, port: int, max_request_mb: int, **given: Any) -> None:
    """Record the calls of any harness: a proxy that speaks the OpenAI API.

    Base URL of a harness: URL/s/INSTANCE/REPETITION[/AGENT]/v1. POST {"reward": 1.0} to
    URL/s/INSTANCE/REPETITION/end and the session becomes a trajectory of DS. What is not in DS yet is
    in DS/.recording, and the next start goes on from there. docs/record.md has more.
    """
    for url in given["upstreams"]:
        if not url.startswith(("http://", "https://")):
            raise RolloutError("config_value", "--upstream", url, "http://HOST:PORT/v1")
    from pipelines.record.settings import RecordSettings
    from schemas.metadata import DatasetMetadata

    try:
        import uvloop

        from pipelines.record.serving import serve
    except ModuleNotFoundError as error:
        hint, got = 'pip install "rollout-io[record]"', f"no package {error.name!r}"
        raise RolloutError("extra_installed", "rollouts record", got, "", hint) from None
    if host not in {"127.0.0.1", "localhost", "::1"} and given["admin_key"] is None:
        note(f"warning: whoever reaches {host} can call the engine and write: --admin-key KEY")
    settings = RecordSettings(max_request_bytes=max_request_mb << 20, **given)
    metadata = DatasetMetadata(logprobs_mode=settings.logprobs_mode)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, host=host, port=port, metadata=metadata, announce=_announce))
    next_command(f"rollouts validate {settings.out}")


def _announce(url: str) -> None:
    emit(url)
    note(f"base URL of a harness: {url}/s/INSTANCE/REPETITION/v1; its outcome: POST to .../end")
