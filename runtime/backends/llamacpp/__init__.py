"""The backend of GGUF files: llama.cpp through llama-cpp-python's low-level calls."""
