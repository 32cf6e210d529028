"""The corpus of a config, indexed once."""

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
from jaxprompt.corpus.read import root_folder
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, escape


def require_corpus(config: RunConfig, *, held_out: bool = False) -> None:
    """Raises InputError if a config has no corpus, or holds no documents out of it."""
    if not config.corpus.path:
        raise InputError(
            "corpus.path is empty; give a folder, a file or a glob of text, hub:ID or tfds:NAME"
        )
    if held_out and not config.corpus.held_out:
        raise InputError("corpus.held_out=0 leaves no document to evaluate on; use a share above 0")


def text_settings(config: RunConfig) -> TextSettings:
    """Returns the settings that divide a corpus into documents and sequences."""
    return TextSettings(
        **{
            field.name: getattr(config.corpus, field.name)
            for field in dataclasses.fields(TextSettings)
        }
    )


def learn_tokenizer(
    config: RunConfig, family: str, folder: str, size: int, *, lowercase: bool
) -> Tokenizer:
    """Trains a tokenizer of `size` tokens on the corpus of a checked config, and saves it."""
    require_corpus(config)
    return train_tokenizer(
        family,
        config.corpus.path,
        folder,
        size,
        text_settings(config),
        lowercase=lowercase,
        cache_dir=config.data.cache_dir or None,
    )


def read_corpus(config: RunConfig, tokenizer: Tokenizer, vocab: int, workdir: str | Path) -> Corpus:
    """Opens the indexed corpus of a config; indexes it first if necessary, and logs that."""
    check_vocabulary(tokenizer, vocab)
    root = root_folder(config.corpus.path)
    if root and root.resolve() == Path(workdir).resolve():
        raise InputError(
            f"--workdir={workdir} is the folder of corpus.path={config.corpus.path}, so the files "
            "of the run would be read as text; use another folder, e.g. a new one in it"
        )
    return index_corpus(
        config.corpus.path,
        tokenizer,
        config.corpus.store or Path(workdir) / "corpus",
        text_settings(config),
        processes=config.corpus.processes,
        cache_dir=config.data.cache_dir or None,
        report=log_to_stderr,
    )


def log_to_stderr(line: str) -> None:
    """Prints a line to standard error."""
    print(escape(line), file=sys.stderr, flush=True)
