"""Decoder models on flat batches, and how their weights are read."""
