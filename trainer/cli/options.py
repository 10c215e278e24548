"""Options shared by several commands of this package."""

import click

algorithm_option = click.option(
    "--algorithm",
    metavar="NAME",
    help="Advantage estimator: grpo, rloo, maxrl, reinforce++, gae, or your module:function "
    "(advantage.estimator).",
)

update_option = click.option(
    "--update",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Number of the update: its global_step in RUN/metrics.jsonl.",
)
