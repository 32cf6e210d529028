"""Writes the data of tasks from the Hugging Face hub to a folder, as the papers' commands read it.

usage: python launch/fetch_data.py --output DATA [--tasks sst2,trec]

Fetches the data set that `python -m jaxprompt tasks TASK` names, for each of --tasks, or for every
known task that has one. In DATA/TASK it writes the splits with public labels, train.jsonl.gz,
dev.jsonl.gz and test.jsonl.gz, in the columns of the hub, with tags by name; and, for a task of
classes, kshot_16.jsonl.gz: of each of the seeds 13, 21, 42, 87 and 100 the numbers of 16 training
rows per class for train, and of as many for dev. A task whose train file exists is skipped. With
HF_HUB_OFFLINE=1 only the hub's local cache is read.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from configs.dart.few_shot import SEEDS
from jaxprompt.data.rows import Rows
from jaxprompt.data.sampling.fewshot import kshot
from jaxprompt.data.sources.splits import read_hub, with_class_names
from jaxprompt.data.tasks.registry import get_task, task_names
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError
from jaxprompt.files import make_folder, write_atomic

K = 16


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as compressed JSON lines."""
    text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    write_atomic(path, gzip.compress(text.encode(), mtime=0))


def with_tag_names(rows: Rows) -> Iterable[dict[str, Any]]:
    """Yields rows with the names of tags, which the hub has as indices."""
    types = {name: getattr(kind, "feature", None) for name, kind in (rows.features or {}).items()}
    names = {column: kind.names for column, kind in types.items() if hasattr(kind, "names")}
    for row in rows:
        named = {
            column: [tags[tag] if isinstance(tag, int) else tag for tag in row[column]]
            for column, tags in names.items()
        }
        yield {**row, **named}


def sample_rows(task: Task, rows: Rows) -> list[dict[str, Any]]:
    """Samples K training rows per class and K for dev, for each seed."""
    labelled = [i for i, row in enumerate(rows) if row[task.label] != -1]
    spellings = [str(rows[i][task.label]) for i in labelled]
    classes = {name: index for index, name in enumerate(sorted(set(spellings)))}
    samples = []
    for seed in SEEDS:
        train, dev = kshot([classes[name] for name in spellings], K, seed)
        numbers = {"train": [labelled[i] for i in train], "dev": [labelled[i] for i in dev]}
        samples.append({"k": K, "seed": seed, **numbers})
    return samples


def fetch(task: Task, folder: Path) -> str:
    """Writes the files of a task. Returns how many rows each has."""
    counts = []
    for split in sorted(task.splits):  # train last: its file says that the task is complete
        rows = with_class_names(task, read_hub(task, split, "", None))
        if split == "train" and task.kind == "classes" and task.labels and not task.choices:
            try:
                write_rows(folder / f"kshot_{K}.jsonl.gz", sample_rows(task, rows))
            except InputError as error:
                counts.append(f"no kshot_{K}: {error}")
        write_rows(folder / f"{split}.jsonl.gz", with_tag_names(rows))
        counts.append(f"{split} {len(rows):,}")
    return ", ".join(counts)


def main() -> int:
    """Fetches the tasks. Exit code 2 if one of them could not be read."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--output", required=True)
    parser.add_argument("--tasks", default="")
    args = parser.parse_args()
    failed = False
    names = args.tasks.split(",") if args.tasks else task_names()
    for task in map(get_task, names):
        folder = Path(args.output) / task.name
        if not task.hub and not args.tasks or (folder / "train.jsonl.gz").exists():
            continue
        try:
            if not task.hub:
                raise InputError("has no data set on the hub; see docs/data.md")
            make_folder(folder)
            print(f"{task.name}: {fetch(task, folder)}", flush=True)
        except InputError as error:
            failed = True
            print(f"fetch_data: {task.name}: {error}", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"fetch_data: {error}", file=sys.stderr)
        sys.exit(2)
