"""Advantages, losses and reductions: tensors in, tensors out. `trainer.loss` puts them together."""
