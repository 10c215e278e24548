"""`rollouts templates`: list the chat templates in the package, and their files."""

from __future__ import annotations

import click

from rollout_io.cli.output import emit, emit_json, example, next_command


@click.command(
    epilog=example('vllm serve MODEL --chat-template "$(rollouts templates chatml_tools_thinking)"')
)
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, including the paths.")
def templates(name: str | None, *, as_json: bool) -> None:
    """List the chat templates in the package, or print the path of the template NAME.

    Options and keys of `rollouts` that expect a chat template accept its name. Engines need the
    path: with `vllm serve --chat-template PATH`, vLLM renders the prompts of agents and harnesses.
    """
    from rollout_io.retokenize.chat_template import TEMPLATES, template_path

    chosen = list(TEMPLATES) if name is None else [name]
    paths = {one: str(template_path(one)) for one in chosen}
    if as_json:
        emit_json([{"name": n, "summary": TEMPLATES[n], "path": p} for n, p in paths.items()])
    elif name is not None:
        emit(paths[name])
    else:
        width = max(map(len, TEMPLATES))
        for one, summary in TEMPLATES.items():
            emit(f"{one:<{width}}  {summary}")
        next_command("rollouts templates NAME")
