"""The `rollouts view` command."""

from __future__ import annotations

import click

from rollout_io.cli.options import HintedUsageError
from rollout_io.cli.output import emit, example, note, warn

EXAMPLES = example(
    "rollouts view shop/\n  rollouts view runs/shop runs/baseline\n  rollouts view ~/.claude/projects"
    "\n  rollouts view shop/ verdicts.parquet"
    '\n  rollouts view shop/ --where "return < 0" --out report.html'
)
DEFAULT_LIMIT = 200


@click.command(epilog=EXAMPLES)
@click.argument(
    "paths", metavar="DS|RUN|LOGS [OTHER] [TABLE]...", nargs=-1, required=True, type=click.Path()
)
@click.option("--where", metavar="SQL", help="With --out: export only matching trajectories.")
@click.option("--out", metavar="FILE", help="Write one HTML file instead of starting a server.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"With --out: maximum number of trajectories.  [default: {DEFAULT_LIMIT}]",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; 0 picks a free one.")
@click.option("--no-browser", is_flag=True, help="Print the address; do not open a browser.")
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="DIR|NAME",
    help="Decode ids with this model's tokenizer, and re-tokenize the text of logs (approximate).  "
    "[default: named in the dataset or run]",
)
@click.option(
    "--format",
    "log_format",
    default="auto",
    show_default=True,
    help="Format of LOGS (see `rollouts formats`); auto detects it from the content.",
)
def view(
    paths: tuple[str, ...],
    where: str | None,
    out: str | None,
    limit: int | None,
    port: int,
    tokenizer: str | None,
    log_format: str,
    *,
    no_browser: bool,
) -> None:
    """Show a dataset, a run or logs in the browser.

    LOGS is a log, or a directory of logs, in any format that `rollouts convert` reads. It is shown as
    it is, without a conversion: conversations, tool calls, sub-agents, errors.

    Each TABLE is a file written by `rollouts audit` (verdicts on rows) or by `rollouts blame` (the
    rows' shares of an update).

    Serves a page on this machine only, at an address with a secret token, until Ctrl-C. With --out,
    writes the page and the selected trajectories as one file, which opens without a server.
    """
    if out is None and (where is not None or limit is not None):
        hint = "filter in the page, or pass --out report.html"
        raise HintedUsageError("--where and --limit need --out.", hint)
    import asyncio
    import webbrowser

    from rollout_io.startup import keep_pandas_out_of_arrow

    keep_pandas_out_of_arrow()

    from schemas.imports import requires_extra

    with requires_extra("view", "rollouts view"):
        from pipelines.view.api import Api
        from pipelines.view.app import Bundle, serve
        from pipelines.view.export import export
        from pipelines.view.paths import kind_of_path
        from pipelines.view.sources import Sources

    if sum(kind_of_path(path, log_format) != "table" for path in paths) > 2:
        raise click.UsageError("view shows at most two datasets, runs or logs.")
    bundle = Bundle.read()
    sources = Sources.open(paths, tokenizer, log_format, is_live=out is None)
    for text in [*sources.warnings, *sources.without_tokenizer()]:
        warn(text)
    if out is not None:
        summary = export(sources, bundle, out, where=where, limit=limit or DEFAULT_LIMIT)
        note(f"wrote {out}: {summary}")
        return

    def announce(address: str) -> None:
        emit(address)
        note("press Ctrl-C to stop the viewer")
        if not no_browser:
            webbrowser.open(address)

    asyncio.run(serve(Api(sources), bundle, port=port, announce=announce))
