"""Options shared by several commands of this package."""

import click

algorithm_option = click.option(
    "--algorithm",
    metavar="NAME",
    help="Advantage estimator: grpo, rloo, maxrl, reinforce++, gae, or your module:function "
    "(advantage_estimator).",
)
