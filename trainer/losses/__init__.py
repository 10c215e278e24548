"""Losses per target token, the weights that reduce them, and what corrects them.

Everything is elementwise over targets (response tokens that train): a token whose `loss_mask` is
false is never a target, so no mask appears. What looks past a token takes `row`, the row of each
target. Denominators count over the global mini-batch and never touch an advantage.
"""
