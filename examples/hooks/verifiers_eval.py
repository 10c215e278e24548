"""vf-eval with exact log-probabilities: python examples/hooks/verifiers_eval.py TASKSET [options of vf-eval]."""

from verifiers.v1.cli.eval.main import main

from rollout_io.hooks.verifiers import keep_digits

keep_digits()
main()
