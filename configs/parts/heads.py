"""Heads by name; each function sets the block `head` with the `fields` of this head."""

from jaxprompt.config.open_blocks import make_block


def linear(config, **fields):
    """Classes by a linear layer on [CLS], on a pooled state, or on the mean."""
    config.head = make_block("head", "linear", **fields)


def verbalizer(config, **fields):
    """Classes by their label words, scored by the backbone's LM head."""
    config.head = make_block("head", "verbalizer", **fields)


def label_rows(config, **fields):
    """Classes by trained embeddings of their label words (DART)."""
    config.head = make_block("head", "label_rows", **fields)


def discriminator(config, **fields):
    """Classes listed in the input, scored by ELECTRA's replaced-token head (DPT)."""
    config.head = make_block("head", "discriminator", **fields)


def text(config):
    """Free text."""
    config.head = make_block("head", "text")


def regression(config, **fields):
    """A number by a linear layer, with the input of `linear`."""
    config.head = make_block("head", "regression", **fields)


def tags(config, **fields):
    """A tag for every word, e.g. named entities."""
    config.head = make_block("head", "tags", **fields)


def spans(config, **fields):
    """An answer that is a span of the text."""
    config.head = make_block("head", "spans", **fields)


def multi_spans(config, **fields):
    """All answer spans of a text; ELECTRA's replaced-token head scores each token (DPT)."""
    config.head = make_block("head", "multi_spans", **fields)


def topics(config):
    """Classes by a linear layer on a prompt computed from the text, to pre-train it (IPT)."""
    config.head = make_block("head", "topics")


HEADS = {
    head.__name__: head
    for head in (
        linear, verbalizer, label_rows, discriminator, text, regression, tags, spans, multi_spans,
        topics,
    )
}  # fmt: skip
