"""The commands that explain finished runs: `rollouts audit`, `blame` and `replay`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import dataset_argument
from rollout_io.cli.output import (
    emit,
    emit_json,
    emit_styled,
    example,
    next_command,
    note,
    shown_log,
    warn,
)
from rollout_io.retokenize.local import about_other_tokenizer, tokenizer_directory
from rollout_io.terminal import columns
from schemas.errors import ConfigError, InputError, count

if TYPE_CHECKING:
    from trainer.forensics.replay import Replay

AUDIT_EXAMPLE = "rollouts audit run/rollouts/iteration_00005 --weights run --tokenizer smollm2/"
BLAME_EXAMPLES = """\
rollouts blame run/ --update 12
  rollouts blame run/ --update 12 --out run/blame/update_12.parquet"""
REPLAY_EXAMPLES = """\
rollouts replay run/ --update 12
  rollouts replay run/ --update 12 --without shop-1_0 --set optimizer.learning_rate=1e-6"""
MOST_SHOWN = 10
"""Differences that a replay lists."""

update_option = click.option(
    "--update",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Number of the update: its global_step in RUN/metrics.jsonl.",
)


@click.command(
    short_help="Find how the stored log-probabilities were sampled.", epilog=example(AUDIT_EXAMPLE)
)
@dataset_argument()
@click.option(
    "--weights",
    multiple=True,
    required=True,
    metavar="PATH",
    help="Candidate weights: a run, its weights/ folder, a model directory, an adapter, or"
    " VERSION=DIR; may be repeated.",
)
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="DIR|NAME",
    help="Tokenizer with the chat template, to look for prompts that were rendered differently.",
)
@click.option("--base", metavar="DIR", help="Model directory for adapters.")
@click.option("--out", metavar="FILE.parquet", help="Write the verdicts, one row per span.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=10, help="Maximum number of faults to list."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def audit(
    *,
    dataset: str,
    weights: tuple[str, ...],
    tokenizer: str | None,
    base: str | None,
    out: str | None,
    limit: int,
    as_json: bool,
) -> int:
    """Find the weights and sampling settings that best explain the stored log-probabilities.

    Forwards the stored tokens under the candidate weights, and compares the results with the
    log-probabilities that the engine reported. Reports, for each sampled span, wrong labels and
    broken data: other weights, a swap of weights within the response, another temperature or
    truncation, shifted log-probabilities, another precision, another prompt or model. Exits with
    code 1 if it reports any.

    By default, each row is forwarded under its labelled weights, and under the other candidates only
    if the labelled weights do not fit.
    """
    if tokenizer is not None:
        tokenizer_directory(tokenizer)  # before slow imports
    from rollout_io.dataset.locking import check_table_out, write_table

    if out is not None:
        check_table_out(out)
    from rollout_io.cli.options import open_valid
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.retokenize.tokenizer import load_tokenizer
    from rollout_io.terminal import Bar
    from schemas.imports import requires_extra

    with requires_extra("train", "rollouts audit"):
        from trainer.forensics.audit.audit import run_audit
        from trainer.forensics.audit.explanations import PromptVariants
        from trainer.forensics.audit.report import screen, summary
        from trainer.forensics.audit.rows import read_audit_rows
        from trainer.forensics.audit.weights import (
            Weights,
            defaults_of,
            find_candidates,
            num_distinct_tokens,
        )

    candidates = find_candidates(weights, base)
    metadata = read_metadata(dataset)
    variants = None
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        variants = PromptVariants(loaded)
        if metadata.tokenizer_fingerprint not in {None, loaded.fingerprint}:
            warn(about_other_tokenizer(tokenizer, metadata))
    defaults = defaults_of(candidates)
    chunks = read_audit_rows(open_valid(dataset), metadata, defaults)
    num_distinct = sum(map(num_distinct_tokens, chunks))
    note(f"{count(len(candidates), 'candidate')}, {num_distinct:,} distinct tokens")
    weights_of = Weights(candidates)
    with Bar(len(candidates) * num_distinct, "tokens", "forwarding") as bar, shown_log():
        weights_of.on_tokens = bar.update
        result = run_audit(chunks, weights_of, dataset=dataset, variants=variants)
    if out is not None:
        write_table(result.verdicts, out)
        note(f"{count(len(result.verdicts), 'verdict')} -> {out}")
    if not result.num_rows:
        reasons = result.verdicts["reason"].drop_nulls().value_counts(sort=True).rows()
        why = "; ".join(f"{count(number, 'span')}: {reason}" for reason, number in reasons)
        finding = "no row can be audited" + (f" ({why})" if why else "")
        hint = "pass the weights of the labelled versions, and a dataset with rollout_logprobs"
        raise InputError("audit_rows", dataset, finding, hint=hint)
    if as_json:
        emit_json(summary(result, limit))
    else:
        emit_styled(screen(dataset, result, limit))
    return 1 if len(result.faults) else 0


@click.command(epilog=example(BLAME_EXAMPLES))
@click.argument("run", metavar="RUN", type=click.Path())
@update_option
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Number of rows to show.",
)
@click.option(
    "--out",
    metavar="FILE.parquet",
    help="Write the shares of all rows and tokens in the update's gradient. `rollouts view` shows"
    " RUN/blame/*.parquet.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=PATH",
    help="Path of a dataset or model that has moved: dataset=PATH, model=PATH; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def blame(
    *,
    run: str,
    update: int,
    top: int,
    out: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> int:
    """Find the rows that drove an update of a training run.

    Reconstructs the update from the newest checkpoint before it, and computes the gradient of each
    row: its share of the update's gradient, and its norm. Rows are ordered by how far they stand out
    from the others in the norm of their gradient, their advantage, the mismatch with the sampler, or
    the improbability of their tokens (docs/audit.md). Nothing is written to RUN unless --out names a
    file there.
    """
    from rollout_io.dataset.locking import check_table_out, write_table

    if out is not None:
        check_table_out(out)
    from schemas.imports import requires_extra

    sys.path.append(str(Path.cwd()))  # for user functions; last, so that it shadows no module
    with requires_extra("train", "rollouts blame"):
        from trainer.forensics.blame import blame as attribute
        from trainer.forensics.blame import replay_without, screen, summary
    with shown_log():
        places = _places(settings)
        result = attribute(run, update, places=places)
    if out is not None:
        write_table(result.shares, out)
        note(f"{count(len(result.shares), 'row')} -> {out}")
    emit_json(summary(result, top)) if as_json else emit_styled(screen(result, top))
    if command := replay_without(result, places):
        next_command(*command)
    return 0


def _places(settings: tuple[str, ...]) -> dict[str, str]:
    from trainer.config.train_config import PATHS
    from trainer.forensics.replay import split_settings

    places, others = split_settings(settings)
    if others:
        hint = "to change other keys, use rollouts replay"
        expected = f"KEY=PATH, with one of the keys {', '.join(PATHS)}"
        raise ConfigError("config_key", "--set", others[0], expected, hint)
    return places


@click.command(
    short_help="Replay an optimizer step of a training run.", epilog=example(REPLAY_EXAMPLES)
)
@click.argument("run", metavar="RUN", type=click.Path())
@update_option
@click.option(
    "--without",
    "rows",
    multiple=True,
    metavar="ID[:STEP]",
    help="Leave a trajectory, or its row with this step_index, out of the loss; may be repeated.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the loss, the advantages or the optimizer, or give the new path of a "
    "dataset or model that has moved; may be repeated.",
)
@click.option("--out", metavar="DIR", help="New directory for the resulting model.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def replay(
    *,
    run: str,
    update: int,
    rows: tuple[str, ...],
    settings: tuple[str, ...],
    out: str | None,
    as_json: bool,
) -> int:
    """Replay an optimizer step of a training run, unchanged or with changes.

    Starts from the newest checkpoint before the update, or from the start model, and replays
    the updates in between. Compares the metrics, the recorded tokens, and the weights of a
    checkpoint saved after the update bit for bit; exits with code 1 if anything differs. With changes,
    prints the metrics of the unchanged and the changed update side by side. A row that is left out
    is removed from the loss and its denominators; the advantages of other rows do not change
    (docs/audit.md). RUN is only read, and may still be training.
    """
    from schemas.imports import requires_extra

    sys.path.append(str(Path.cwd()))  # for user functions; last, so that it shadows no module
    with requires_extra("train", "rollouts replay"):
        from trainer.forensics.replay import replay as make_again
    with shown_log():
        result = make_again(run, update, settings=settings, without=rows, out=out)
    emit_json(_replay_numbers(result)) if as_json else emit(_replay_text(result))
    for text in result.notes if result.differences else ():
        note(f"note: {text}")
    return int(result.changed is None and not result.is_identical)


def _replay_numbers(result: Replay) -> dict[str, Any]:
    """Convert the result to JSON types, with the recorded and replayed values of each metric."""
    columns_ = {"recorded": result.recorded, "replayed": result.replayed}
    if result.changed is not None:
        columns_["changed"] = result.changed
    names = dict.fromkeys(name for column in columns_.values() for name in column)
    of_metrics = {"recorded", "replayed", "changed"}
    values = {n: v for n, v in dataclasses.asdict(result).items() if n not in of_metrics}
    return values | {
        "identical": result.is_identical,
        "differences": [
            dataclasses.asdict(one) | {"sentence": one.sentence} for one in result.differences
        ],
        "metrics": {
            name: {kind: column.get(name) for kind, column in columns_.items()} for name in names
        },
    }


def _replay_text(result: Replay) -> str:
    where = "" if result.iteration is None else f" (iteration {result.iteration})"
    start = result.checkpoint or "the start model"
    if result.num_forwarded:
        start += f", {count(result.num_forwarded, 'mini-batch', 'es')} replayed before the update"
    verdict = "bit for bit the same"
    if not result.is_identical:
        verdict = f"differs: {result.differences[0].sentence}"
    lines = [
        f"update     {result.update} of {result.run}{where}",
        f"from       {start}",
        f"compared   {', '.join(result.compared)}",
        f"result     {verdict}",
    ]
    lines += [f"           {one.sentence}" for one in result.differences[1:MOST_SHOWN]]
    if len(result.differences) > MOST_SHOWN:
        more = count(len(result.differences) - MOST_SHOWN, "more difference")
        lines.append(f"           {more} (--json lists all)")
    if result.changed is not None:
        lines += [f"changed    {', '.join(result.changes)}", "", *columns(_table(result))]
    if result.out:
        lines.append(f"model      {result.out}")
    return "\n".join(lines)


def _table(result: Replay) -> list[list[str]]:
    """Build a table with the recorded, replayed and changed value of each numeric metric."""
    changed = result.changed or {}
    names = dict.fromkeys((*result.recorded, *result.replayed, *changed))
    table = [["metric", "recorded", "replayed", "changed", "difference"]]
    for name in names:
        if name in result.not_compared:
            continue
        values = [column.get(name) for column in (result.recorded, result.replayed, changed)]
        if any(isinstance(value, int | float) for value in values):
            table.append([name, *map(_shown, values), _gap(values[1], values[2])])
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _gap(before: Any, after: Any) -> str:
    are_numbers = isinstance(before, int | float) and isinstance(after, int | float)
    if not are_numbers:
        return "-"
    return "0" if after == before else f"{after - before:+.3g}"
