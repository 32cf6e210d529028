"""jaxprompt learns prompts for frozen pre-trained language models."""

__version__ = "0.1.0"
