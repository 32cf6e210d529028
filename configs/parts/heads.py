"""Kinds of answer by name; each function replaces the block `head`."""

from ml_collections import ConfigDict


def linear(c, pooler="auto", dropout=0.1):
    """Classes by a linear layer on [CLS], on a pooled state, or on the mean."""
    c.head = ConfigDict(dict(name="linear", pooler=pooler, dropout=dropout))


def verbalizer(c, scores="restricted", pieces="mean", span="label"):
    """Classes by their label words, on the backbone's own language-model head."""
    c.head = ConfigDict(dict(name="verbalizer", scores=scores, pieces=pieces, span=span))


def text(c):
    """Free text."""
    c.head = ConfigDict(dict(name="text"))


def tags(c, dropout=0.1, stride=32):
    """A tag for every word, as of named entities."""
    c.head = ConfigDict(dict(name="tags", dropout=dropout, stride=stride))


def spans(c, stride=128, max_answer=30, no_answer=False):
    """An answer that stands in a text."""
    c.head = ConfigDict(
        dict(
            name="spans",
            stride=stride,
            max_answer=max_answer,
            n_best=20,
            no_answer=no_answer,
            threshold=0.0,
        )
    )


HEADS = {head.__name__: head for head in (linear, verbalizer, text, tags, spans)}
