"""Rows of the KV cache beyond one pass: prefixes, session files, context shift, what types of caches cost."""
