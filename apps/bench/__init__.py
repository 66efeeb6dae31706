"""Benchmark scripts: speed beside peers, memory of exporting and chatting, engine overhead."""
