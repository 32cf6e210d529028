"""Speed and memory of indexing a corpus beside the tokenizer alone, on the same text.

The text of SOURCE is repeated up to --megabytes. Both sides of the speed run in one process, by
turns, on the same number of cores: the tokenizer's threads against our processes. Memory is the sum
of the resident bytes of a fresh process that indexes and of all its children, seen 20 times a
second; what they share counts in each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.bench.process import pinned, side

PAGE = os.sysconf("SC_PAGE_SIZE")
AT_ONCE = 1024  # units that the bare tokenizer gets in a call


def settings_of(args: argparse.Namespace):
    """Makes the settings of the corpus."""
    from jaxprompt.corpus import TextSettings

    return TextSettings(units=args.units, language=args.language)


def repeat(args: argparse.Namespace, folder: Path) -> int:
    """Writes the documents of the source to one file, as often as it takes. -> bytes of text"""
    from jaxprompt.corpus.read import DocumentSource

    size, wanted = 0, args.megabytes * 1e6
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        while size < wanted:
            for text in DocumentSource(args.source, settings_of(args)):
                size += len(text.encode())
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                if size >= wanted:
                    break
    return size


def index(args: argparse.Namespace, folder: str, store: str):
    """Indexes the written file."""
    from jaxprompt.corpus import index_corpus
    from jaxprompt.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    return index_corpus(folder, tokenizer, store, settings_of(args), processes=args.processes)


# -- speed ----------------------------------------------------------------------------------------


def bare(args: argparse.Namespace, texts: list[str]) -> float:
    """Seconds that the tokenizer's own encode_batch takes for the units of the corpus."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if args.processes > 1 else "false"
    start = time.perf_counter()
    for i in range(0, len(texts), AT_ONCE):
        tokenizer.encode_batch(texts[i : i + AT_ONCE], add_special_tokens=False)
    return time.perf_counter() - start


def units_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """Reads all units of the written file."""
    from jaxprompt.corpus.split import split_units

    at = settings_of(args)
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        texts = (json.loads(line)["text"] for line in file)
        cut = dict(units=at.units, paragraphs=at.paragraphs, language=at.language)
        return [unit for text in texts for unit in split_units(text, **cut)]


def time_both(args: argparse.Namespace, folder: Path, size: int) -> dict:
    """Times the two by turns. Speeds are in MB of UTF-8 text a second."""
    texts, turns = units_of(args, folder), []
    for _ in range(args.rounds):
        seconds = bare(args, texts)
        # Else a process with one thread of its own would use the cores of the other side.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with tempfile.TemporaryDirectory() as store:
            start = time.perf_counter()
            corpus = index(args, str(folder), store)
            ours = time.perf_counter() - start
            tokens = corpus.num_tokens
        turns.append([size / seconds / 1e6, size / ours / 1e6])
    plain, indexed = (statistics.median(side) for side in zip(*turns, strict=True))
    return {
        "MB": size / 1e6, "units": len(texts), "tokens": tokens, "tokenizer MB/s": plain,
        "indexed MB/s": indexed, "ratio": statistics.median(b / a for a, b in turns),
        "turns": turns,
    }  # fmt: skip


# -- memory ---------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    below, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            below.setdefault(int(fields[1]), []).append(int(entry.name))
            sizes[int(entry.name)] = int(fields[21]) * PAGE
    todo, total = [pid], 0
    while todo:
        one = todo.pop()
        total += sizes.get(one, 0)
        todo += below.get(one, [])
    return total


def weigh(args: argparse.Namespace, folder: str) -> dict:
    """Indexes in a fresh process and watches it."""
    with tempfile.TemporaryDirectory() as store:
        options = {
            name: getattr(args, name) for name in ("tokenizer", "units", "language", "processes")
        }
        command = pinned(side("corpus", "index", source=folder, store=store, **options), "")
        start, peak = time.perf_counter(), 0
        with subprocess.Popen(command) as process:
            while process.poll() is None:
                peak = max(peak, resident(process.pid))
                time.sleep(0.05)
        if process.returncode:
            sys.exit(process.returncode)
    return {"peak MB of all processes": peak / 1e6, "whole process s": time.perf_counter() - start}


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--source", required=True, help="the text, as corpus.path takes it")
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer.json")
    parser.add_argument("--megabytes", type=float, default=32)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--units", default="paragraph")
    parser.add_argument("--language", default="en")
    parser.add_argument("--store", help="of a side: where it indexes to")


def measure(args: argparse.Namespace) -> list[dict]:
    """Weighs one indexing, then times both sides."""
    os.environ["RAYON_NUM_THREADS"] = str(args.processes)  # threads of the bare tokenizer
    with tempfile.TemporaryDirectory() as name:
        size = repeat(args, Path(name))
        return [
            {"processes": args.processes} | weigh(args, name) | time_both(args, Path(name), size)
        ]


def index_source(args: argparse.Namespace) -> None:
    """Indexes, and says nothing."""
    index(args, args.source, args.store)


SIDES = {"index": index_source}
