"""The three kinds of tokenizer: WordPiece, byte-level BPE, SentencePiece."""

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


@pytest.fixture
def t5(shared):
    return load(shared / "tokenizers/t5")


@pytest.fixture(params=["bert-uncased", "roberta"])
def tokenizer(request, shared):
    return load(shared / "tokenizers" / request.param)
