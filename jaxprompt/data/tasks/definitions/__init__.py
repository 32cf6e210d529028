"""The known tasks, by language and kind: fields, labels, templates and sources."""
