"""From an example and a template to token ids, slots and roles."""
