"""Exports of runs, predictions with them, banks of prompts, and adapters of other libraries."""
