"""The `rollouts record` command."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import Number
from rollout_io.cli.output import emit, example, next_command, note, redraw, warn
from rollout_io.cli.redact import pattern_option, personal_option
from rollout_io.terminal import is_quiet
from schemas.errors import ConfigError, count
from schemas.imports import requires_extra

if TYPE_CHECKING:
    from pipelines.record.recorder import Recorder
    from pipelines.record.settings import RecordSettings

_EXAMPLE = "rollouts record --upstream http://127.0.0.1:8000/v1 --out rollouts/ --port 8100"


@click.command(
    short_help="Record the calls of any harness, through a proxy.", epilog=example(_EXAMPLE)
)
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    required=True,
    metavar="URL",
    help="Root URL of a vLLM engine; repeat it to spread sessions over several engines.",
)
@click.option("--out", required=True, metavar="DS", help="Dataset to append shards to.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name by which remote clients reach the recorder; may be repeated.",
)
@click.option("--port", default=8100, show_default=True, help="Port; 0 picks a free one.")
@click.option(
    "--served-model-name",
    metavar="NAME",
    help="Model name shown to clients.  [default: the engines' name]",
)
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
    help="Key required to open sessions; each session then has its own key for calls.  "
    "[env: ROLLOUTS_ADMIN_KEY]",
)
@click.option(
    "--policy-version", type=click.IntRange(min=0), help="Initial version of the engines' weights."
)
@click.option(
    "--exact-prefix",
    type=click.Path(),
    metavar="DIR",
    help="Send follow-up chat calls as exact token ids, using the tokenizer in DIR.",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["raw", "processed"]),
    help="Log-probabilities of the engines: before (raw) or after temperature and truncation.",
)
@click.option(
    "--sampling-defaults",
    metavar="DIR",
    help="Add sampling settings to requests that leave them out, so that they are recorded: those in "
    "DIR/generation_config.json, as vLLM does, or `neutral`.",
)
@click.option(
    "--idle-timeout",
    "idle_timeout_s",
    type=Number(min=0, min_open=True),
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
    help="Maximum size of an engine's response, MiB; one event or line may use a quarter of it.",
)
@click.option(
    "--max-concurrency",
    default=1024,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum number of concurrent calls; further calls wait.",
)
@click.option(
    "--on-full",
    type=click.Choice(["refuse", "serve"]),
    default="refuse",
    show_default=True,
    help="If a call cannot be written: return an error, or serve it without recording.",
)
@click.option(
    "--unassigned",
    type=click.Choice(["keep", "refuse"]),
    default="keep",
    show_default=True,
    help="Calls without a session: record each as its own session, or return an error.",
)
@click.option(
    "--redact",
    is_flag=True,
    help="Replace secrets in what is recorded, before it is on disk; needs --tokenizer.",
)
@pattern_option
@personal_option
@click.option(
    "--tokenizer",
    metavar="DIR",
    help="Directory of the engines' model or tokenizer, for --redact and for the tokens of pictures."
    "  [default: --exact-prefix]",
)
@click.option("--end-open", is_flag=True, help="On exit, also end open sessions, without a reward.")
def record(
    *, host: str, port: int, max_request_mb: int, max_answer_mb: int, **options: Any
) -> None:
    """Record the calls of any harness, as a proxy that serves the OpenAI API.

    Set a harness's base URL to URL/s/INSTANCE/REPETITION[/AGENT]/v1. POST {"reward": 1.0} to
    URL/s/INSTANCE/REPETITION/end to add the session to DS as a trajectory. Pending sessions are
    kept in DS/.recording, and the next start resumes them. See docs/record.md.
    """
    import asyncio

    from pipelines.origin_guard import is_loopback
    from pipelines.record.settings import RecordSettings

    settings = RecordSettings(
        max_request_bytes=max_request_mb << 20, max_answer_bytes=max_answer_mb << 20, **options
    )
    _check(settings)

    with requires_extra("record", "rollouts record"):
        import uvloop

        from pipelines.record.serving import serve
    if not is_loopback(host) and settings.admin_key is None:
        warn(
            f"anyone who can reach {host} can call the engine and write to the dataset; "
            "set --admin-key KEY"
        )
    status = _Status()
    serving = serve(
        settings,
        host=host,
        port=port,
        announce=_announce,
        show=status.show,
        tell=warn,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)
    status.close()
    next_command("rollouts", "validate", settings.out)


def _check(settings: RecordSettings) -> None:
    from pipelines.origin_guard import is_host_name
    from pipelines.sampling_defaults import request_defaults

    request_defaults(settings.sampling_defaults)
    expected = "a URL such as http://HOST:PORT/v1"
    for url in settings.upstreams:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("config_value", "--upstream", repr(url), expected)
        if {"@", "?", "#"} & set(url):
            finding, hint = "a user, query or fragment", "pass a key in ROLLOUTS_UPSTREAM_API_KEY"
            message = f"--upstream: the URL must not contain {finding}"
            raise ConfigError(
                "config_value", "--upstream", finding, expected, hint, message=message
            )
    for name in settings.allowed_hosts:
        if not is_host_name(name):
            expected = "a host name without a port"
            raise ConfigError("config_value", "--allow-host", repr(name), expected)


def _announce(url: str) -> None:
    emit(url)
    session = f"{url}/s/INSTANCE/REPETITION"
    note(f"base URL for a harness: {session}/v1; report its outcome with POST {session}/end")


class _Status:
    """Status line at the bottom of a terminal; without a terminal, prints nothing."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = (time.monotonic(), 0.0, 0.0)

    def show(self, recorder: Recorder) -> None:
        if self._is_terminal and not is_quiet():
            redraw(self._text(recorder))

    def _text(self, recorder: Recorder) -> str:
        """Format the status line, with rates since the previous call."""
        from pipelines.record.recorder import number

        metrics = recorder.metrics
        now_s, calls, tokens = time.monotonic(), number(metrics.calls), number(metrics.tokens)
        before_s, before_calls, before_tokens = self._last
        self._last = (now_s, calls, tokens)
        elapsed_s = max(now_s - before_s, 1e-9)
        parts = [
            count(recorder.sessions.num_open, "open session"),
            f"{(calls - before_calls) / elapsed_s:,.1f} calls/s",
            f"{(tokens - before_tokens) / elapsed_s:,.0f} tokens/s",
            count(int(number(metrics.drifts)), "drift"),
            count(recorder.sessions.num_written, "trajectory"),
        ]
        if unrecorded := number(metrics.unrecorded):
            parts.append(f"{unrecorded:,.0f} UNRECORDED")
        return ", ".join(parts)

    def close(self) -> None:
        """End the status line, so that further output starts on a new line."""
        if self._is_terminal:
            note("")
