"""Pre-training objectives: they turn a row of text into input and targets.

Each module has an `Objective` and `make(tokenizer, length, ...)`, which builds one. An Objective
has the widths of its arrays (`lengths`, `reads`), the amount of text per row (`fit`) and the tokens
that end a document (`tail`). It makes a row from pieces of text and a random state, as a pure
function of these. With `apart` the documents of a row are segments, each processed on its own;
otherwise they are one text.
"""
