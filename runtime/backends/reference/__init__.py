"""The plain numpy backend."""
