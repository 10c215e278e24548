"""A proxy between a harness and its engine that records every call's exact tokens."""
