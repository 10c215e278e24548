"""The `rollouts audit` command."""

from __future__ import annotations

import click

from rollout_io.cli.options import dataset_argument
from rollout_io.cli.output import emit_json, emit_styled, example, note, shown_log, warn
from rollout_io.retokenize.local import about_other_tokenizer, tokenizer_directory
from schemas.errors import InputError, count

EXAMPLE = "rollouts audit run/rollouts/iteration_00005 --weights run --tokenizer smollm2/"


@click.command(
    short_help="Find how the stored log-probabilities were sampled.", epilog=example(EXAMPLE)
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
