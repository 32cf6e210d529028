"""GGUF files: their tensors, and the config of the model in one."""
