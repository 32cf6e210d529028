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
from jaxprompt.corpus.encode import EncodedDocuments, TextEncoder, encode_in_worker, start_worker
from jaxprompt.corpus.read import SUFFIXES, DocumentSource, TextSettings
from jaxprompt.corpus.split import sentencex_version
from jaxprompt.corpus.store import (
    FORMAT,
    META,
    Corpus,
    StoreWriter,
    damage_error,
    read_meta,
    store_name,
)
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.files import make_folder, open_scratch, write_error

_MAX_DEFAULT_PROCESSES = 6  # each takes some 100 MB
_BATCH_CHARS = 2**19  # characters that a process gets at once
# One at work and one waiting, so that no process is idle.
_BATCHES_PER_PROCESS = 2
_REPORT_SECONDS = 10.0
_SIGNAL_SECONDS = 0.3  # in which a signal that ended a worker reaches this process too


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
    root = make_folder(folder)
    documents = DocumentSource(source, settings, cache_dir)
    if report:
        _report_excluded(documents, report)
    encoder = TextEncoder(tokenizer, settings)
    # Files that are in another store, of another tokenizer for example, are not read again.
    fingerprint = {
        "files": documents.fingerprint(_recorded_checksums(root)),
        "settings": _settings_fingerprint(settings),
        "tokenizer": encoder.fingerprint(),
    }
    path = root / store_name(fingerprint)
    if read_meta(path / META, FORMAT) is None:
        processes = processes or min(_available_cores(), _MAX_DEFAULT_PROCESSES)
        # Processes before the lock: those of a script without a guard would wait for it for ever.
        note = "while indexing the corpus; the index is not saved, run the same command again"
        with signals.noted(note), _workers(encoder, processes) as encode, _locked(root, path.name):
            # Again, under the lock: its previous holder may have built the same store.
            if read_meta(path / META, FORMAT) is None:
                _build_store(documents, encode, path, encoder.dtype, fingerprint, report)
    corpus = Corpus(path)
    if corpus.skipped and settings.on_error == "raise":  # built with on_error=skip
        raise InputError(
            f"{corpus.first_skipped}; to skip such documents, set corpus.on_error=skip"
        )
    return corpus


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Raises InputError if a tokenizer has ids beyond an embedding of `rows` rows."""
    token, max_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if max_id >= rows:
        raise InputError(
            f"the tokenizer has ids up to {max_id} ({token!r}), but the embedding has only {rows} "
            f"rows; use the backbone's tokenizer, or a vocab_size of at least {max_id + 1}"
        )


def _report_excluded(documents: DocumentSource, report: Callable[[str], None]) -> None:
    if documents.runs:
        report(f"excluded from the corpus, as runs wrote there: {', '.join(documents.runs)}")
    if others := documents.others:
        suffixes, listed = ", ".join(SUFFIXES), ", ".join(others[:8])
        report(f"excluded from the corpus: {len(others)} files that are not {suffixes}: {listed}")


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _settings_fingerprint(settings: TextSettings) -> dict[str, Any]:
    fields = dataclasses.asdict(settings)
    del fields["on_error"]  # does not change the readable documents
    if settings.units == "sentence":
        # Another release may split sentences differently, so that unit numbers mean other text.
        fields["sentencex"] = sentencex_version()
    return fields


def _recorded_checksums(root: Path) -> dict[str, int]:
    """Returns the CRC-32 of files recorded in finished stores, by `stat_key`."""
    checksums: dict[str, int] = {}
    for folder in root.iterdir():
        # A store that is damaged or of an earlier format is ignored.
        with contextlib.suppress(InputError):
            checksums |= (read_meta(folder / META, FORMAT) or {"stats": {}})["stats"]
    return checksums


@contextlib.contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """Holds the lock of one store; the system releases it when its holder exits."""
    path = root / f".{name}.lock"
    try:
        file = open_scratch(path)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise write_error(path, error) from error
    # The file is not removed: a process waiting for it would then lock a file that others cannot
    # see.
    with file:
        yield


def _build_store(
    documents: DocumentSource,
    encode: Callable[[Iterable[list[str]]], Iterator[EncodedDocuments]],
    path: Path,
    dtype: str,
    fingerprint: dict[str, Any],
    report: Callable[[str], None] | None,
) -> None:
    """Writes a store to a temporary folder, then moves it; on any error nothing is left."""
    if path.exists():  # checked before hours of work that could not be moved there
        raise damage_error(path / META)
    scratch = path.with_name(f".{path.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    try:
        scratch.mkdir()
        writer = StoreWriter(scratch, dtype)
        with contextlib.closing(writer):
            start = last_report = time.monotonic()
            for encoded in encode(_batches(documents)):
                writer.add(encoded)
                if report and time.monotonic() - last_report > _REPORT_SECONDS:
                    last_report = time.monotonic()
                    report(_progress_message(writer, last_report - start))
            # Before the seal: of a file that changed meanwhile, old and new text would be mixed.
            _check_documents(writer, documents)
            writer.seal(
                fingerprint=fingerprint,
                stats=documents.stats,
                source=documents.place,
                skipped=documents.skipped,
                first_skipped=documents.first_skipped,
            )
        # Atomic: other processes see either no store or a complete one.
        os.rename(scratch, path)
        if report:
            report(_progress_message(writer, time.monotonic() - start))
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _progress_message(writer: StoreWriter, seconds: float) -> str:
    return (
        f"indexed {writer.documents:,} documents, {writer.num_units:,} units, "
        f"{writer.tokens:,} tokens in {seconds:.0f} s"
    )


def _check_documents(writer: StoreWriter, documents: DocumentSource) -> None:
    """Raises InputError if there is no text, or files changed while they were read."""
    if not writer.tokens:
        raise InputError(
            f"corpus {documents.place!r} is empty: no document has text, {writer.empty} are blank, "
            f"{documents.skipped} skipped {documents.first_skipped}".rstrip()
        )
    documents.check_files_unchanged()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields lists of consecutive documents, divided by their size alone."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _workers(
    encoder: TextEncoder, processes: int
) -> Iterator[Callable[[Iterable[list[str]]], Iterator[EncodedDocuments]]]:
    """Starts the processes; yields a function that encodes batches with them, in order."""
    if processes == 1:
        # In this process: none is started, and nothing is pickled.
        yield partial(map, encoder)
        return
    # Not fork: this process may run JAX's threads, and a child would inherit their locks as held.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, initializer=start_worker, initargs=(encoder,))
    try:
        _submit(pool, os.getpid).result()  # waits until they have started
        yield partial(_encode_in_order, pool, processes * _BATCHES_PER_PROCESS)
    except BrokenProcessPool as error:
        time.sleep(_SIGNAL_SECONDS)
        raise InputError(
            "an indexing process ended without a result: out of memory, killed, or started from a "
            'script without if __name__ == "__main__"; reduce corpus.processes (1 starts none)'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, function: Callable, *args: Any) -> Future:
    """Submits a call; the pool may start a process for it."""
    with signals.starting_children():
        return pool.submit(function, *args)


def _encode_in_order(
    pool: ProcessPoolExecutor, max_pending: int, batches: Iterable[list[str]]
) -> Iterator[EncodedDocuments]:
    """Encodes batches with at most `max_pending` of them in memory."""
    pending: deque[Future[EncodedDocuments]] = deque()
    for batch in batches:
        pending.append(_submit(pool, encode_in_worker, batch))
        # The oldest first: the store keeps the order of the documents.
        if len(pending) == max_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
