"""GGUF files: their tensors, and the config of the model that they contain."""
