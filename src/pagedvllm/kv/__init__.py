"""The KV cache as pages: who owns which block, and what can be shared."""
