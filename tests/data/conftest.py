"""The two kinds of tokenizer: WordPiece and byte-level BPE."""

import functools

import pytest

from jaxprompt.data.tokenizer import load_tokenizer

load = functools.cache(load_tokenizer)


@pytest.fixture
def bert(shared):
    return load(shared / "tokenizers/bert-uncased")


@pytest.fixture
def roberta(shared):
    return load(shared / "tokenizers/roberta")


@pytest.fixture(params=["bert-uncased", "roberta"])
def tokenizer(request, shared):
    return load(shared / "tokenizers" / request.param)
