"""Conversations in the chat template of a tokenizer."""
