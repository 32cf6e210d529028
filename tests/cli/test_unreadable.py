"""What cannot be opened: a folder, a pipe or a ring of links for a file, another user's files."""

import contextlib
import os
import signal

import pytest
from fuzz import survive

from jaxprompt.build.initial_params import read_soft_tokens
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.build.word_list import read_words
from jaxprompt.config.load import load_config
from jaxprompt.convert.artifact import import_npy
from jaxprompt.convert.folder import read_config, resolve
from jaxprompt.convert.load import present_heads
from jaxprompt.convert.peft import read_peft
from jaxprompt.corpus.read import DocumentSource, TextSettings
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.files import acquire_lock
from jaxprompt.training.log import read_metrics
from jaxprompt.types import Dims

DIMS = Dims(*[8] * len(Dims._fields))
# File in a folder -> what opens it.
READERS = {
    "config.json": lambda path: read_config(path.parent),
    "model.safetensors": lambda path: present_heads(path.parent, "bert", {}),
    "pytorch_model.bin": lambda path: present_heads(path.parent, "bert", {}),
    "model.safetensors.index.json": lambda path: present_heads(path.parent, "bert", {}),
    "prompt.json": lambda path: read_export(str(path.parent)),
    "adapter_config.json": lambda path: read_peft(path.parent),
    "x.npy": lambda path: import_npy(path, 8),
    "y.npy": lambda path: read_soft_tokens(
        str(path), type("P", (), {"length": 1, "decoder": 0, "dims": Dims})
    ),
    "c.json": lambda path: load_config(str(path)),
    "c.py": lambda path: load_config(str(path)),
    "rows.csv": read_file,
    "rows.jsonl.gz": read_file,
    "rows.parquet": read_file,
    "train.csv": lambda path: read_split(get_task("topics"), "train", source=str(path.parent)),
    "text.txt": lambda path: list(DocumentSource(str(path), TextSettings())),
    "metrics.jsonl": lambda path: read_metrics(path.parent),
    "words": read_words,
    "lock": lambda path: acquire_lock(path, path.parent, ""),
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
}


@contextlib.contextmanager
def somebody_else():
    """Lets the block run without the rights of root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def deadline():
    """Ends a test that waits for the writer of a pipe."""

    def stop(*_):
        raise TimeoutError("a pipe is read")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("what", ["folder", "pipe", "ring", "secret", "secret folder"])
def test_what_cannot_be_opened_is_one_line(tmp_path, monkeypatch, deadline, name, what):
    path = tmp_path / "in" / name
    path.parent.mkdir()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "ring":
        path.symlink_to(path)
    else:
        path.write_text("{}")
        (path if what == "secret" else path.parent).chmod(0)
    for folder in tmp_path.parents:  # those that pytest made
        if folder.name.startswith("pytest-"):
            folder.chmod(0o755)
    tmp_path.chmod(0o755)
    with contextlib.suppress(InputError):  # what it imports may be root's alone
        READERS[name](path)
    with somebody_else():
        assert survive(monkeypatch, (name, what), READERS[name], path) == 2
    path.parent.chmod(0o755)


def test_folders_that_may_not_be_looked_into(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    (secret / "model").mkdir(parents=True)
    secret.chmod(0)
    with somebody_else():
        for action in (
            lambda: resolve(secret / "model"),
            lambda: list(DocumentSource(str(secret / "model"), TextSettings())),
            lambda: load_config(str(secret / "model" / "c.py")),
            lambda: read_split(get_task("topics"), "train", source=str(secret / "model")),
        ):
            assert survive(monkeypatch, "a secret folder", action) == 2
    secret.chmod(0o755)
