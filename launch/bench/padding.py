"""Share of real tokens in the batches of an epoch, and its lengths: one program each.

For each task of --tasks with data.group 1 and 8 and the lengths of a CPU and of accelerators; of
one run, and of --runs seeds side by side. Nothing is compiled: `epoch` measures seconds.
"""

import argparse
import dataclasses
from itertools import islice
from pathlib import Path

import numpy as np

GROUPS = (1, 8)
MULTIPLES = {"multiples of 8": 8, "few lengths": 0}


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with a folder per task")
    parser.add_argument("--tasks", default="sst2,boolq,squad", help="names of configs/parts/tasks")
    parser.add_argument("--runs", type=int, default=8, help="seeds that train side by side")


def measure(args: argparse.Namespace) -> list[dict]:
    """Counts the tokens of each task."""
    return [row for task in args.tasks.split(",") for row in measure_task(args, task)]


def measure_task(args: argparse.Namespace, task: str) -> list[dict]:
    """Counts the tokens of one task."""
    from jaxprompt.data.batches.batching import TrainBatches

    layout, split = encode(Path(args.data), task)
    lengths = np.array([len(row.ids) for (row,) in split.rows])
    rows = []
    for group in GROUPS:
        streams = [
            TrainBatches(split.rows, split.labels, layout, seed=seed, group=group, prefetch=0)
            for seed in range(args.runs)
        ]
        steps = streams[0].steps_per_epoch
        # The longest text of each batch. [steps, runs]
        batches = islice(zip(*streams, strict=True), steps)
        longest = np.array([[lengths[b.index[b.index >= 0]].max() for b in s] for s in batches])
        row = {"task": task, "max_len": layout.max_len, "steps": steps, "data.group": group}
        for name, multiple in MULTIPLES.items():
            pad = dataclasses.replace(layout, multiple=multiple).length
            one = [pad(int(n)) for n in longest[:, 0]]
            several = [pad(int(n)) for n in longest.max(1)]
            row[f"{name}: real"] = lengths.sum() / (layout.batch * sum(one))
            row[f"{name}: {args.runs} runs"] = lengths.sum() / (layout.batch * sum(several))
            row[f"{name}: lengths"] = len(set(one))
        rows.append(row)
    return rows


def encode(data: Path, task: str):
    """Encodes the training examples of a task for MiniLM. -> layout, split"""
    from configs import base
    from configs.parts import backbones, methods, tasks
    from jaxprompt.build.backbone import open_backbone
    from jaxprompt.build.examples import read_examples
    from jaxprompt.build.placement import build_placement
    from jaxprompt.build.task import scorer_from_config
    from jaxprompt.config.load import to_run_config

    values = base.get_config()
    backbones.minilm(values)
    getattr(tasks, task)(values)
    methods.prefix(values)
    values.data.source = str(data / task)
    config = to_run_config(values)
    examples = read_examples(config, ("train",))
    placement = build_placement(config)
    scorer = scorer_from_config(config, open_backbone(config.backbone), examples, placement)
    layout = dataclasses.replace(scorer.layout, batch=config.data.batch)
    return layout, scorer.encode(examples.splits["train"])
