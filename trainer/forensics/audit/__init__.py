"""Find which weights and settings sampled the stored tokens, and report wrong labels."""
