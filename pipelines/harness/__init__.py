"""Run harnesses in the loop: each trajectory has a base URL, and its calls become its steps."""
