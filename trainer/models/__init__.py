"""Models and optimizers: policy, critic, attention, adapters."""
