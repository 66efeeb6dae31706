"""Exporting a checkpoint to a GGUF file: llama.cpp's names, metadata and types."""
