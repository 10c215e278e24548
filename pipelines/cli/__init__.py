"""Commands that this package adds to `rollouts`, and the option that several of them have."""

import click

outcome_option = click.option(
    "--outcome",
    type=click.Choice(["last", "sum"]),
    help="Return of a trajectory: its last step's reward, or the sum over its steps.  [default: "
    "from the dataset, else last]",
)
