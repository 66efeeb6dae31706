"""Training of small models on text that the caller has; knows nothing of quantization or bundles."""
