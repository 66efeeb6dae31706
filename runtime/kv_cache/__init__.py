"""Rows of the KV cache beyond one pass: prefixes, session files, calibration, context shift."""
