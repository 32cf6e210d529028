"""Objectives that a backbone is pre-trained by: a row of text becomes input and targets.

Each module has an `Objective` and `make(tokenizer, length, ...)`, which builds one. An Objective
tells the widths of its arrays (`lengths`, `reads`), how much text a row takes (`fit`), which tokens
end a document (`tail`), and makes a row of pieces of text and a random state: it is a pure function
of them. With `apart` the documents of a row are segments, each treated on its own; without it they
are one text.
"""
