"""Indexes a corpus: tokenises a source's documents once, in several processes, into a store."""

import contextlib
import dataclasses
import fcntl
import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from jaxprompt import signals
from jaxprompt.corpus.encode import EncodedDocuments, TextEncoder, encode_here, start_worker
from jaxprompt.corpus.read import SUFFIXES, Source, TextSettings
from jaxprompt.corpus.split import check_sentences
from jaxprompt.corpus.store import META, Corpus, StoreWriter, damage_error, key_of, read_meta
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, at_least
from jaxprompt.files import make_folder, open_scratch, write_error

_MOST = 6  # processes unless told; each takes some 100 MB
_BATCH = 2**19  # characters that a process gets at once
# One at work and one waiting, so that no process is idle.
_AHEAD = 2  # batches a process
_PAUSE = 10.0  # seconds between two reports
_GRACE = 0.3  # seconds


def index_corpus(
    source: str,
    tokenizer: Tokenizer,
    folder: str | os.PathLike,
    settings: TextSettings | None = None,
    *,
    processes: int = 0,
    cache_dir: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Corpus:
    """Opens the store of `source` in `folder`, which may hold many; makes it if it is missing.

    A store is found by a fingerprint of text, settings and tokenizer, so it is made again if one of
    them changes. Its bytes do not depend on `processes` (0: one per core, at most 6). They are
    spawned, so a script must call this under `if __name__ == "__main__"`. A second caller waits for
    the first, then opens the store that the first one made. Raises InputError for a damaged store,
    with the folder to delete.
    """
    settings = settings or TextSettings()
    at_least("corpus.processes", processes, 0)
    root = make_folder(folder)
    texts = Source(source, settings, cache_dir)
    if texts.runs and report:
        report(f"excluded from the corpus, as runs wrote there: {', '.join(texts.runs)}")
    if texts.others and report:
        shown = ", ".join(texts.others[:8]) + ", ..." * (len(texts.others) > 8)
        kinds = ", ".join(SUFFIXES)
        report(f"excluded from the corpus: {len(texts.others)} files that are not {kinds}: {shown}")
    encoder = TextEncoder(tokenizer, settings)
    # Text that another store has read, by another tokenizer for example, is not read again.
    known = _known_files(root)
    fingerprint = {
        "files": texts.fingerprint(known),
        "settings": _settings(settings),
        "tokenizer": encoder.fingerprint(),
    }
    path = root / key_of(fingerprint)
    if read_meta(path) is None:
        processes = processes or min(_cores(), _MOST)
        # Processes before the lock: those of a script without a guard would wait for it for ever.
        note = "while indexing the corpus; the index is not saved, run the same command again"
        with signals.noted(note), _workers(encoder, processes) as encode, _locked(root, path.name):
            # Again, under the lock: whoever held it before may have built this very store.
            if read_meta(path) is None:
                _build(texts, encode, path, encoder.dtype, fingerprint, report or _say_nothing)
    corpus = Corpus(path)
    if corpus.skipped and settings.on_error == "raise":  # made when they were to be skipped
        raise InputError(
            f"{corpus.first_skipped}; to skip such documents, set corpus.on_error=skip"
        )
    return corpus


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Raises InputError if a tokenizer has ids beyond an embedding of `rows` rows."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= rows:
        raise InputError(
            f"the tokenizer has ids up to {highest} ({token!r}), but the embedding has only {rows} "
            f"rows; use the backbone's tokenizer, or a vocab_size of at least {highest + 1}"
        )


def _say_nothing(line: str) -> None:
    pass


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _settings(settings: TextSettings) -> dict[str, Any]:
    found = dataclasses.asdict(settings)
    del found["on_error"]  # changes nothing in what can be read
    if settings.units == "sentence":
        # Another release may cut sentences elsewhere: the numbers of units would mean other text.
        found["sentencex"] = check_sentences()
    return found


def _known_files(root: Path) -> dict[str, int]:
    """Returns the CRC-32 of files recorded in finished stores, by `stat_key`."""
    stats: dict[str, int] = {}
    for folder in root.iterdir():
        # Another store may be damaged or of an earlier format: then it is no help.
        with contextlib.suppress(InputError):
            stats |= (read_meta(folder) or {"stats": {}})["stats"]
    return stats


@contextlib.contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """Holds the lock of one store; the system releases it when its holder exits."""
    path = root / f".{name}.lock"
    try:
        file = open_scratch(path)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise write_error(path, error) from error
    # The file stays behind: were it removed, a process that waits for it would hold a lock that
    # nobody else can see.
    with file:
        yield


def _build(
    texts: Source,
    encode: Callable[[Iterable[list[str]]], Iterator[EncodedDocuments]],
    path: Path,
    dtype: str,
    fingerprint: dict[str, Any],
    report: Callable[[str], None],
) -> None:
    """Writes a store to a temporary folder, then moves it; on any error nothing is left."""
    if path.exists():  # told before hours of work that could not be moved there
        raise damage_error(path, f"it has no {META}")
    scratch = path.with_name(f".{path.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
    try:
        scratch.mkdir()
        writer = StoreWriter(scratch, dtype)
        with contextlib.closing(writer):
            start = said = time.monotonic()
            for part in encode(_batches(texts)):
                writer.add(part)
                if time.monotonic() - said > _PAUSE:
                    said = time.monotonic()
                    report(_progress(writer, said - start))
            # Before the seal: a file that changed meanwhile would be in the store half and half.
            _check(writer, texts)
            writer.seal(
                fingerprint=fingerprint, stats=texts.stats, source=texts.place,
                skipped=texts.skipped, first_skipped=texts.first_skipped,
            )  # fmt: skip
        # Other processes see no store or a whole one, never a part.
        os.rename(scratch, path)
        report(_progress(writer, time.monotonic() - start))
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _progress(writer: StoreWriter, seconds: float) -> str:
    return (
        f"indexed {writer.documents:,} documents, {writer.num_units:,} units, "
        f"{writer.tokens:,} tokens in {seconds:.0f} s"
    )


def _check(writer: StoreWriter, texts: Source) -> None:
    """Raises InputError if there is no text, or files changed while they were read."""
    if not writer.tokens:
        why = f"; {texts.skipped} skipped, the first: {texts.first_skipped}" * bool(texts.skipped)
        raise InputError(
            f"corpus {texts.place!r} is empty: no document has text, {writer.empty} are blank{why}"
        )
    texts.check_unmoved()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents, cut by their size alone."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _workers(
    encoder: TextEncoder, processes: int
) -> Iterator[Callable[[Iterable[list[str]]], Iterator[EncodedDocuments]]]:
    """Starts the processes; gives what encodes batches with them, in order."""
    if processes == 1:
        # In this process: no start of processes, and nothing is pickled.
        yield partial(map, encoder)
        return
    # Not fork: this process may run JAX's threads, and a child would inherit their locks as held.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, initializer=start_worker, initargs=(encoder,))
    try:
        _submit(pool, os.getpid).result()  # they have started
        yield partial(_in_order, pool, processes * _AHEAD)
    except BrokenProcessPool as error:
        time.sleep(_GRACE)  # a signal that ended them may be on its way to this process too
        raise InputError(
            "an indexing process ended without a result: out of memory, killed, or started from a "
            'script without if __name__ == "__main__"; reduce corpus.processes (1 starts none)'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, *given: Any) -> Future:
    """Submits a call; the pool may start a process for it."""
    with signals.starting_children():
        return pool.submit(*given)


def _in_order(
    pool: ProcessPoolExecutor, ahead: int, batches: Iterable[list[str]]
) -> Iterator[EncodedDocuments]:
    """Encodes batches with at most `ahead` of them in memory."""
    waiting: deque[Future[EncodedDocuments]] = deque()
    for batch in batches:
        waiting.append(_submit(pool, encode_here, batch))
        # The oldest first: the store has the documents in their order, whichever is ready.
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
