"""The `rollouts` command: a thin shell over the library, verbs from entry points."""
