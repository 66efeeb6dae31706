"""Decoding with less than the whole model: policies, what repairs the cache behind them, and what limits their harm."""
