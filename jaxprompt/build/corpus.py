"""The running text of a config, indexed once."""

import dataclasses
import sys
from pathlib import Path

from jaxprompt.config.run import RunConfig
from jaxprompt.corpus import (
    Corpus,
    TextSettings,
    check_vocabulary,
    index_corpus,
    train_tokenizer,
)
from jaxprompt.corpus.read import root_of
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, escape


def need_corpus(config: RunConfig) -> None:
    """Raises InputError where a config names no text."""
    if not config.corpus.path:
        raise InputError(
            "corpus.path is empty; give a folder, a file or a glob of text, hub:ID or tfds:NAME"
        )


def text_settings(config: RunConfig) -> TextSettings:
    """Tells how the text of a config becomes documents and units."""
    names = (field.name for field in dataclasses.fields(TextSettings))
    return TextSettings(**{name: getattr(config.corpus, name) for name in names})


def learn_tokenizer(
    config: RunConfig, family: str, folder: str, size: int, *, lowercase: bool
) -> Tokenizer:
    """Learns a tokenizer of `size` tokens from the text of a checked config. -> it, saved"""
    need_corpus(config)
    return train_tokenizer(
        family, config.corpus.path, folder, size, text_settings(config), lowercase=lowercase,
        cache_dir=config.data.cache_dir or None,
    )  # fmt: skip


def read_corpus(config: RunConfig, tokenizer: Tokenizer, vocab: int, workdir: str | Path) -> Corpus:
    """Opens the indexed text of a config; indexes it where that was not done yet, and says so."""
    check_vocabulary(tokenizer, vocab)
    root = root_of(config.corpus.path)
    if root and root.resolve() == Path(workdir).resolve():
        raise InputError(
            f"--workdir={workdir} is the folder of corpus.path={config.corpus.path}, and what a "
            "run writes would be read as text; take another folder, a new one in it for example"
        )
    return index_corpus(
        config.corpus.path,
        tokenizer,
        config.corpus.store or Path(workdir) / "corpus",
        text_settings(config),
        processes=config.corpus.processes,
        cache_dir=config.data.cache_dir or None,
        report=tell,
    )


def tell(line: str) -> None:
    """Says a line on standard error."""
    print(escape(line), file=sys.stderr, flush=True)
