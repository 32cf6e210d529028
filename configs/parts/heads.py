"""Kinds of answer by name; each function replaces the block `head`, `fields` are its own."""

from jaxprompt.config.open_blocks import make_block


def linear(c, **fields):
    """Classes by a linear layer on [CLS], on a pooled state, or on the mean."""
    c.head = make_block("head", "linear", **fields)


def verbalizer(c, **fields):
    """Classes by their label words, on the backbone's own language-model head."""
    c.head = make_block("head", "verbalizer", **fields)


def label_rows(c, **fields):
    """Classes by rows that the method trains for their label words, as DART has them."""
    c.head = make_block("head", "label_rows", **fields)


def discriminator(c, **fields):
    """Classes listed in the input, judged by ELECTRA's replaced-token head, as DPT has them."""
    c.head = make_block("head", "discriminator", **fields)


def text(c):
    """Free text."""
    c.head = make_block("head", "text")


def regression(c, **fields):
    """A number by a linear layer, on what `linear` reads."""
    c.head = make_block("head", "regression", **fields)


def tags(c, **fields):
    """A tag for every word, as of named entities."""
    c.head = make_block("head", "tags", **fields)


def spans(c, **fields):
    """An answer that stands in a text."""
    c.head = make_block("head", "spans", **fields)


def multi_spans(c, **fields):
    """All spans of a text that answer, each token judged by ELECTRA's head, as DPT has them."""
    c.head = make_block("head", "multi_spans", **fields)


def topics(c):
    """Classes read off a prompt that is computed from the text, which pre-trains it."""
    c.head = make_block("head", "topics")


HEADS = {
    head.__name__: head
    for head in (
        linear, verbalizer, label_rows, discriminator, text, regression, tags, spans, multi_spans,
        topics,
    )
}  # fmt: skip
