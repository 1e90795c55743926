"""Attention backends: one protocol, several ways to keep keys and values."""
