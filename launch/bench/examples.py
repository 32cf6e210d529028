"""Examples a second that pre-train prompts, made of the text of a corpus.

Each of --processes makes batches of its own, as hosts do, and their rates are added up; beside it
stands the rate of one process whose batches are prefetched by threads, as in training.
"""

import argparse
import multiprocessing
import os
import tempfile
import time

LENGTHS = {"nsp": 512, "nss": 1024, "unified": 768}
SLOTS = 100


def index(args: argparse.Namespace, store: str):
    """Indexes the source, or opens what was indexed."""
    from jaxprompt.corpus import index_corpus
    from jaxprompt.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    return index_corpus(args.source, tokenizer, store, processes=args.processes)


def make_rows(args: argparse.Namespace, name: str, folder: str):
    """Makes the rows of a task from all documents of an indexed corpus."""
    from jaxprompt.corpus import Corpus, ppt
    from jaxprompt.corpus.ppt import nsp, selection
    from jaxprompt.data.batches.batching import Layout
    from jaxprompt.data.text.tokenizer import load_tokenizer

    tokenizer, corpus = load_tokenizer(args.tokenizer), Corpus(folder)
    options = (0,) if name == "nsp" else ppt.option_counts(name)
    forms = ppt.make_forms(
        ppt.get_pattern(name, args.style), tokenizer, args.backbone, num_slots=SLOTS,
        max_len=LENGTHS[name], options=options,
    )  # fmt: skip
    documents = range(len(corpus))
    if name == "nsp":
        task = nsp.make(corpus, documents, forms)
    else:
        task = selection.make(name, corpus, documents, forms)
    return ppt.PptSamples(task, forms, Layout(args.batch, LENGTHS[name], forms.pad))


def make_batches(args: argparse.Namespace, name: str, folder: str, prefetch: int, seed: int):
    """Returns examples a second of one stream of batches."""
    from jaxprompt.corpus.denoise.batches import ShuffledBatches

    stream = ShuffledBatches(
        make_rows(args, name, folder), batch=args.batch, seed=seed, prefetch=prefetch
    )
    for _ in range(8):
        next(stream)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < args.seconds:
        next(stream)
        count += args.batch
    rate = count / (time.perf_counter() - start)
    stream.close()
    return rate


def time_task(args: argparse.Namespace, name: str, folder: str) -> dict:
    """Measures one task."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(args.processes) as pool:
        jobs = [(args, name, folder, 0, seed) for seed in range(args.processes)]
        rates = pool.starmap(make_batches, jobs, chunksize=1)
        (alone,) = pool.starmap(make_batches, [(args, name, folder, 4, 0)])
    return {
        "task": name, "length": LENGTHS[name], "processes": args.processes,
        "examples/s": sum(rates), "one process with threads": alone,
        "load average": os.getloadavg()[0],
    }  # fmt: skip


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--source", required=True, help="the text, as corpus.path takes it")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--style", default="en", help="of the patterns")
    parser.add_argument("--backbone", default="seq2seq", help="seq2seq or masked")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--store", help="where the indexed text is kept")


def measure(args: argparse.Namespace) -> list[dict]:
    """Makes examples of each task."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(index(args, args.store or scratch).folder)
        return [time_task(args, name, folder) for name in LENGTHS]
