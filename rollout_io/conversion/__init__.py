"""Conversion of harness logs to a rollout dataset: plan, chunks, outcomes, staging."""
