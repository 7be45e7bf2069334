"""GGUF files, the checkpoint format of llama.cpp."""
