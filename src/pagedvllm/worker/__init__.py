"""One device: its memory, its weights, and a batch that lives as long as the engine."""
