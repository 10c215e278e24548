"""Run the `rollouts` command as `python -m rollout_io`."""

try:
    from rollout_io.cli.main import main
except KeyboardInterrupt:  # Ctrl-C to a process of `--num-processes` that has just started
    raise SystemExit(130) from None

main()
