"""A corpus of raw text, indexed once into token ids on disk: any document of it by its number."""

from jaxprompt.corpus.index import check_vocabulary, index_corpus
from jaxprompt.corpus.order import Share, Shuffle, divide
from jaxprompt.corpus.read import TextSettings
from jaxprompt.corpus.store import Corpus, check_unchanged
from jaxprompt.corpus.train_tokenizer import train_tokenizer

__all__ = [
    "Corpus", "Share", "Shuffle", "TextSettings", "check_unchanged", "check_vocabulary", "divide",
    "index_corpus", "train_tokenizer",
]  # fmt: skip
