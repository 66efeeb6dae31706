"""The weights of a bundle: planned, calibrated, quantized and written."""
