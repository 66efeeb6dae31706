"""One file for each backend: how it is made, and what it can do for a bundle before it is."""
