"""Layers, router statistics and call inputs shared by the model families."""
