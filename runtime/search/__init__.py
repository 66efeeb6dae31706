"""Searches: strategies that follow several continuations in one cache, or choose tokens by more than the model."""
