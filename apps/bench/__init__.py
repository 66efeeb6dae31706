"""Benchmark scripts: speed beside peers and limits, memory of exporting, chatting and loading, quality of weights."""
