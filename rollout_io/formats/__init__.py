"""Log formats in both directions; `base` is the contract, `parsing` is shared code."""
