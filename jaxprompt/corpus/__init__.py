"""A corpus of raw text, indexed once into token ids on disk: any document of it by its number."""

from jaxprompt.corpus.index import check_vocabulary, index_corpus
from jaxprompt.corpus.order import Shuffle, split_held_out
from jaxprompt.corpus.read import TextSettings
from jaxprompt.corpus.store import Corpus, check_unchanged
from jaxprompt.corpus.train_tokenizer import train_tokenizer

__all__ = [
    "Corpus",
    "Shuffle",
    "TextSettings",
    "check_unchanged",
    "check_vocabulary",
    "index_corpus",
    "split_held_out",
    "train_tokenizer",
]
