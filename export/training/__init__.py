"""Training of drafters, draft heads and early exits on text that the caller has."""
