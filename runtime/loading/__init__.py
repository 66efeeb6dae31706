"""Which backend runs a bundle, above all backends."""
