"""Code shared by exporters; `write` in the module of a format exports to it."""
