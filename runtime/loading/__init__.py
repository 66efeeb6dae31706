"""The choice of a bundle's backend, above all backends."""
