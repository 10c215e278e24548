"""Find the weights and settings that sampled stored tokens, and report wrong labels."""
