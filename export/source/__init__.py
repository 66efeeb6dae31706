"""A checkpoint as it lies on disk: tensors, configuration, the small files beside them, texts to calibrate with."""
