"""Pre-training objectives: they turn text into the input and targets of a training sample.

Each module has an objective, `Denoiser`, and `make(tokenizer, length, ...)`, which builds one. An
objective has the widths of its arrays (`lengths`, `max_targets`), the amount of text per sample
(`capacity`) and the tokens that end a document (`end_ids`). It makes a sample from chunks of text
and a random state, as a pure function of these. With `separate` the documents of a sample are
segments, each processed on its own; otherwise they are one text.
"""
