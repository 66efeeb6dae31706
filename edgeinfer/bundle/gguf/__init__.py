"""GGUF files as bundles: their header read without trusting it, and the library that runs them."""
