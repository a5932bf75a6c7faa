"""Sharded tensors and data parallelism."""
