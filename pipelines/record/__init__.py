"""A proxy between harnesses and engines that records the exact tokens of every call."""
