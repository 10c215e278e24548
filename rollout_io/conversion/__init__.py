"""From the logs of a harness to a rollout dataset: plan, chunks, outcomes, staging."""
