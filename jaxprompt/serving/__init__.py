"""Prompts out of runs and at work: exports, banks, answers, adapters of other libraries."""
