"""What an export reads: a checkpoint's tensors, configuration and small files, and texts to calibrate with."""
