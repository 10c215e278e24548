"""Run harnesses during generation: each trajectory has a base URL, and its calls become steps."""
