"""The `rollouts drift` command."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import dataset_argument, workers_of, workers_options
from rollout_io.cli.output import emit, emit_json, example, note, warn
from rollout_io.retokenize.local import about_other_tokenizer, tokenizer_directory
from rollout_io.startup import keep_pandas_out_of_arrow
from schemas.errors import ConfigError, RolloutError, count

if TYPE_CHECKING:
    from rollout_io.retokenize import ChatTokenizer


@click.command(epilog=example("rollouts drift shop/ --tokenizer .cache/smollm2"))
@dataset_argument()
@click.option(
    "--tokenizer", type=click.Path(), metavar="DIR|NAME", help="Decode with this model's tokenizer."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help="Maximum number of breaks to list.  [default: 20; all with --json]",
)
@click.option(
    "--retokenize",
    "compares_text",
    is_flag=True,
    help="Also compare the exact ids with ids recomputed from the logged text.",
)
@workers_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def drift(
    dataset: str,
    tokenizer: str | None,
    limit: int | None,
    workers: int | None,
    engine: Any,
    *,
    compares_text: bool,
    as_json: bool,
) -> None:
    """Explain why steps do not continue the previous step.

    Causes: retokenized, template, edited, reset, new_agent, overlap, unknown. Prints a summary with
    a hint for each cause, then each break as: kept tokens | lost tokens -> new tokens.
    """
    if tokenizer is not None:
        tokenizer_directory(tokenizer)  # before slow imports
    keep_pandas_out_of_arrow()
    from pipelines.drift_diagnosis.diagnosis import Report, diagnose_dataset, render
    from pipelines.drift_diagnosis.texts import TextReading
    from rollout_io.cli.options import open_valid
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.retokenize import load_tokenizer

    if tokenizer is None:
        loaded = _own_tokenizer(dataset, needs_template=compares_text)
    else:
        loaded = load_tokenizer(tokenizer, needs_template=compares_text)
    if compares_text and loaded is None:
        hint = "run rollouts drift DS --tokenizer DIR --retokenize"
        raise ConfigError("tokenizer", "--retokenize", "a tokenizer is required", hint=hint)
    metadata = read_metadata(dataset)
    if loaded and metadata.tokenizer_fingerprint not in {None, loaded.fingerprint}:
        warn(about_other_tokenizer(str(tokenizer), metadata))
    shown = 20 if limit is None and not as_json else limit
    chosen = workers_of(workers, engine, dataset)
    open_valid(dataset, chosen)
    report = Report.of(diagnose_dataset(dataset, loaded, chosen), shown)
    texts = TextReading.of_dataset(dataset, loaded) if compares_text and loaded else None
    if as_json:
        emit_json(report.to_dict() | ({"retokenized": texts.to_dict()} if texts else {}))
        return
    for line in render(report):
        emit(line)
    if texts:
        emit("\nids recomputed from the logged text, compared with the exact ids")
        for name, value in texts.to_dict().items():
            emit(f"  {name:<24} {'-' if value is None else value}")
    if len(report.shown) < report.num_breaks:
        listed = f"{len(report.shown)} of {count(report.num_breaks, 'break')}"
        note(f"listed {listed}; pass --limit N or --json for more")


def _own_tokenizer(dataset: str, *, needs_template: bool) -> ChatTokenizer | None:
    """Load the tokenizer named in the dataset; None if it is not on this machine or has changed."""
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.retokenize import load_tokenizer
    from rollout_io.retokenize.local import find_tokenizer

    metadata = read_metadata(dataset)
    directory = find_tokenizer(metadata.tokenizer) if metadata.tokenizer_fingerprint else None
    if directory is None or find_spec("transformers") is None:
        return None
    try:
        loaded = load_tokenizer(directory, needs_template=needs_template)
    except RolloutError:
        return None
    return loaded if loaded.fingerprint == metadata.tokenizer_fingerprint else None
