"""The paged KV cache's memory: how rows are stored, where they lie in a page, and who holds which page."""
