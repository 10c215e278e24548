"""Losses per target token, the weights that reduce them, and corrections for the sampler.

Everything is elementwise over targets (trained response tokens). A token whose `loss_mask` is
false is never a target, so no masks are needed. Functions that need more than one token take `row`,
the row of each target. Denominators count over the global mini-batch; advantages are never divided.
"""
