"""Keep the rollouts of other trainers: one module for each framework, imported inside its process."""
