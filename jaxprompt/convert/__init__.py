"""Pre-trained weights in, prompts in and out: Hugging Face folders and PEFT adapters."""
