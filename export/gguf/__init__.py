"""The way from a checkpoint to a GGUF file: llama.cpp's names, metadata and types; knows nothing of running one."""
