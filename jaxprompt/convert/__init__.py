"""Imports pre-trained weights and exports prompts: Hugging Face folders and PEFT adapters."""
