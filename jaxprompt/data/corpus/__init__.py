"""A corpus of raw text, indexed once into token ids on disk: any document of it by its number."""

from jaxprompt.data.corpus.index import check_vocabulary, index_corpus
from jaxprompt.data.corpus.order import Share, Shuffle, divide
from jaxprompt.data.corpus.read import TextSettings
from jaxprompt.data.corpus.store import Corpus, check_unchanged
from jaxprompt.data.corpus.train_tokenizer import train_tokenizer

__all__ = [
    "Corpus", "Share", "Shuffle", "TextSettings", "check_unchanged", "check_vocabulary", "divide",
    "index_corpus", "train_tokenizer",
]  # fmt: skip
