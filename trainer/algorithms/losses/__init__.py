"""Losses per target token, the weights that reduce them, and corrections for sampler mismatch.

Everything is elementwise over targets (trained response tokens). A token whose `loss_mask` is
false is never a target, so no masks are needed. Functions that combine several tokens take `row`,
the row of each target. Denominators are counts over the global mini-batch, and never scale
advantages.
"""
