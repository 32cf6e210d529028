"""Turns an example and a template into token ids, slots and roles."""
