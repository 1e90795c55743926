"""Workloads, and what vLLM 0.30.0's own scheduler and KV-cache manager made of them, step by step. See ../goldens.py."""
