"""A report of benchmark results as one HTML page; each kind of result has a file of its own here."""
