"""The reference of the command line in docs/cli.md, read from the verbs themselves."""

from __future__ import annotations

import inspect
from itertools import chain

import click

from rollout_io.cli.main import SECTIONS, rollouts

INTRO = """\
# The command line

Every verb of `rollouts`, with its options, as `rollouts VERB --help` shows them; each also takes `-q, --quiet` (no notes, no
progress), `-v, --verbose` (debug messages) and `-h, --help`. [Install](install.md#the-command-line) says
how to complete them with the Tab key.
"""
COMMON = ("help", "quiet", "verbose")


def page() -> str:
    """Write the page, with the verbs in the sections of `rollouts --help`."""
    with click.Context(rollouts, info_name="rollouts") as root:
        sections = (
            [f"## {title}", *chain.from_iterable(_verb(name, root) for name in names)]
            for title, names in SECTIONS.items()
        )
        return "\n".join([INTRO, *chain.from_iterable(sections)]).rstrip() + "\n"


def _verb(name: str, root: click.Context) -> list[str]:
    command = rollouts.get_command(root, name)
    assert command is not None
    with click.Context(command, info_name=name, parent=root) as ctx:
        usage = " ".join(command.collect_usage_pieces(ctx))
        options = [p for p in command.params if isinstance(p, click.Option)]
        records = [p.get_help_record(ctx) for p in options if p.name not in COMMON]
    lines = ["", f"### {name}", "", f"    rollouts {name} {usage}", "", *_text(command.help)]
    if shown := [record for record in records if record]:
        lines += ["", "| option | meaning |", "|---|---|"]
        lines += [f"| {_code(names)} | {_cell(meaning)} |" for names, meaning in shown]
    return [*lines, "", *_text(command.epilog), ""]


def _text(text: str | None) -> list[str]:
    r"""Return click's help as Markdown: paragraphs after `\b` keep their lines, as code."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            title, *rest = paragraph.removeprefix("\b\n").splitlines()
            is_code = rest and all(line.startswith(" ") for line in rest)
            lines += (
                [title, "", *(f"    {line.strip()}" for line in rest)]
                if is_code
                else [f"    {line}" for line in (title, *rest)]
            )
        else:
            lines += [paragraph.replace("<", "&lt;").replace("*", r"\*")]
        lines.append("")
    return lines[:-1]


def _code(names: str) -> str:
    return "`" + names.replace("|", r"\|") + "`"


def _cell(meaning: str) -> str:
    return " ".join(meaning.split()).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
