"""Advantages, policy losses and the objective: tensors in, tensors out."""
