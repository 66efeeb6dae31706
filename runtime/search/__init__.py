"""Searches: strategies that look at several continuations in one cache, or weigh one otherwise than the model."""
