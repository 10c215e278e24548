"""`python -m rollout_io` is the `rollouts` command."""

from rollout_io.cli.main import main

main()
