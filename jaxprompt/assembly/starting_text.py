"""The text that soft tokens start from: how often each token stands in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxprompt.assembly.denoising import read_corpus
from jaxprompt.assembly.method import starts_of
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.words import text_ids
from jaxprompt.models.scorer import Scorer


def count_tokens(
    c: Any, train: Split | None, count_corpus: Callable[[], np.ndarray]
) -> np.ndarray | None:
    """Counts the tokens of the text that prompt.start draws from. int64 [ids]

    That is the training examples (task) or a corpus (frequent), which only then is read; None where
    a prompt starts from no text.
    """
    starts = starts_of(c)
    if "task" in starts:
        return np.bincount(text_ids(train.rows))
    return count_corpus() if "frequent" in starts else None


def count_corpus(c: Any, scorer: Scorer, workdir: str | Path) -> np.ndarray:
    """Counts the tokens of the text at corpus.path, which is indexed where it was not. int64 [ids]

    Raises InputError for a text that cannot be read.
    """
    vocab = scorer.model.backbone.cfg.vocab
    return read_corpus(c, scorer.tokenizer, vocab, workdir).token_counts()
