"""The `rollouts` command: a thin layer over the library; verbs are entry points."""
