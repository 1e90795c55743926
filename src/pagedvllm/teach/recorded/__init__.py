"""Workloads, and what vLLM 0.30.0 itself decided in each step of them. `..goldens` reads them."""
