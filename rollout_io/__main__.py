"""Run the `rollouts` command as `python -m rollout_io`."""

from rollout_io.cli.main import main

main()
