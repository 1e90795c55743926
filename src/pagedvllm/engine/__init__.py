"""Engines: scheduler, KV-cache manager and model put together."""
