"""A cell of a few-shot table, seeds x learning rates, trained in four ways, each once.

One program for all runs (together), our runs one after another in one process (turns) or a process
a run (alone), PEFT's in one process (peft); and, at several sizes, runs at once (curve). Of what
trains one run after another `--take` runs are done and the others reckoned from them.
"""

import argparse
import contextlib
import copy
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.bench.models import peak_gib
from launch.bench.process import call, side

SEEDS = (13, 21, 42, 87, 100)  # of the data: rows of train and dev
RATES = (5e-3, 1e-2, 2e-2, 5e-2)
SIZES = {1: (1, 1), 2: (1, 2), 5: (5, 1), 10: (5, 2), 20: (5, 4)}  # runs -> seeds, rates
LENGTHS = {"soft": 20, "prefix": 16}


# -- the comparison -------------------------------------------------------------------------------


def make_cell(kind: str, runs: int, steps: int, data: str, size: int = 0):
    """Makes the config of a cell: TREC, 16 rows per class for train and for dev, MiniLM.

    `size` runs train at once; 0 leaves it to the program.
    """
    from configs import base
    from configs.parts import backbones, methods, tasks

    c = base.get_config()
    backbones.minilm(c)
    tasks.trec(c)
    getattr(methods, kind)(c, length=LENGTHS[kind])
    if kind == "prefix":
        c.prompt.dropout = 0.0  # PEFT has none
    source = Path(data) / "trec"
    c.data.source, c.data.batch = str(source), 16
    c.data.protocol = {"name": "listed", "rows": str(source / "kshot_16.jsonl.gz")}
    c.data.eval_batch = 32  # divides the 96 rows of dev: no filling
    c.train.total_epochs, c.train.total_steps, c.train.eval_steps = 0.0, steps, 6
    c.train.save_steps, c.train.tracker, c.train.test = steps, "none", False
    c.train.plot = False
    seeds, rates = SIZES[runs]
    c.runs.data_seeds, c.runs.lr, c.runs.size = SEEDS[:seeds], RATES[:rates], size
    return c


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", help="folder with trec/, JSON lines and kshot_16.jsonl.gz")
    parser.add_argument("--kind", choices=LENGTHS, help="one method alone")
    parser.add_argument("--runs", type=int, choices=SIZES, default=20, help="of a cell")
    parser.add_argument("--take", type=int, default=20, help="runs of a cell that are timed")
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--sides", default="together,peft,turns,alone,curve", help="the ways")
    parser.add_argument("--config", help="of a side")
    parser.add_argument("--workdir", help="of a side")
    parser.add_argument("--numbers", type=lambda text: list(map(int, text.split(","))), default=[])
    parser.add_argument("--rows", help="of a side: what PEFT's read")


def measure(args: argparse.Namespace) -> list[dict]:
    """Trains the cell of each method in every way."""
    if not args.data:
        raise SystemExit("give --data, the folder with trec/")
    rows, curve = [], "curve" in args.sides.split(",")
    if curve and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the curve is drawn with matplotlib: pip install matplotlib")
    for kind in [args.kind] if args.kind else LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            rows += _train_cell(kind, args, Path(folder))
    if curve:
        draw(rows, Path(args.output).with_suffix(".png"))
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Draws runs a minute and the peak of memory against the number of runs at once."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("runs a minute", "peak GiB"), strict=True):
        for kind in LENGTHS:
            measured = [r for r in rows if r["method"] == kind and r["side"] == "all at once"]
            points = sorted((row["runs"], row[name]) for row in measured)
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=kind)
        axes.set(xlabel="runs at once", ylabel=name, ylim=(0, None))
        axes.legend()
    figure.savefig(path, dpi=150)


class _Cell:
    """Trains the runs of a cell in several ways; `rows` has a row for each."""

    def __init__(self, kind: str, args: argparse.Namespace, folder: Path):
        self.kind, self.args, self.folder = kind, args, folder
        self.total, self.rows = args.runs, []
        self.sample = list(range(0, self.total, max(1, self.total // args.take)))[: args.take]
        self.numbers = ",".join(map(str, self.sample))
        self._count = itertools.count()

    def train(self, way: str) -> None:
        """Trains the cell in a way of --sides, the sampled runs of it where all take too long."""
        ways = {
            "together": self._together, "peft": self._peft, "turns": self._turns,
            "alone": self._alone, "curve": self._curve,
        }  # fmt: skip
        ways[way]()

    def _together(self) -> None:
        self._at_once(self.total, "one program")

    def _curve(self) -> None:
        for runs in SIZES:
            if runs <= self.total:
                self._at_once(runs, "all at once", size=runs)

    def _at_once(self, runs: int, label: str, size: int = 0) -> None:
        result = self._timed(self._command("together", f"{runs}-{size}", runs, size))
        self._add(label, runs, runs, result["wall"], result)

    def _turns(self) -> None:
        self._one_after_another("turns", "one process")

    def _peft(self) -> None:
        path = str(self.folder / "rows.json")
        command = self._command("rows", "rows", self.total, numbers=self.numbers, rows=path)
        call(command, self.args.cores)
        self._one_after_another("peft", "PEFT", rows=path)

    def _one_after_another(self, way: str, label: str, **flags: str) -> None:
        result = self._timed(self._command(way, way, self.total, numbers=self.numbers, **flags))
        rest = result["seconds"][1:]  # the first run compiles
        missing = (self.total - len(self.sample)) * (sum(rest) / len(rest) if rest else 0.0)
        self._add(label, self.total, len(self.sample), result["wall"] + missing, result)

    def _alone(self) -> None:
        results = [
            self._timed(self._command("turns", f"alone{n}", self.total, numbers=str(n)))
            for n in self.sample
        ]
        dev = [score for result in results for score in result["dev"]]
        wall = self.total * sum(result["wall"] for result in results) / len(results)
        result = results[0] | {"dev": dev}
        self._add("a process a run", self.total, len(self.sample), wall, result)

    def _command(self, way: str, name: str, runs: int, size: int = 0, **flags: str) -> list[str]:
        """Writes the config of some runs. Returns the command that trains them."""
        name = f"{name}.{next(self._count)}"  # a new folder, so that nothing is there yet
        path, args = self.folder / f"{name}.json", self.args
        config = make_cell(self.kind, runs, args.steps, args.data, size)
        path.write_text(json.dumps(config.to_dict()))
        return side("runs", way, config=path, workdir=self.folder / name, **flags)

    def _timed(self, command: list[str]) -> dict:
        """Returns what a command prints, with its seconds as "wall"."""
        started = time.perf_counter()
        result = call(command, self.args.cores)
        return result | {"wall": time.perf_counter() - started}

    def _add(self, label: str, runs: int, measured: int, wall: float, result: dict) -> None:
        """Adds a row, and prints it."""
        row = {"method": self.kind, "side": label, "runs": runs, "measured": measured, "s": wall}
        row |= {"runs a minute": 60 * runs / wall, "programs": result.get("programs", "-")}
        row |= {"all compilations": result.get("count", "-")}
        row |= {"compile s": result.get("compile s", "-"), "peak GiB": result["peak GiB"]}
        dev = result["dev"]
        self.rows.append(row | {"dev": sum(dev) / len(dev), "devs": dev})
        print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)


def _train_cell(kind: str, args: argparse.Namespace, folder: Path) -> list[dict]:
    cell = _Cell(kind, args, folder)
    for way in args.sides.split(","):
        cell.train(way)
    first = next((row["s"] for row in cell.rows if row["side"] == "one program"), None)
    for row in cell.rows:
        same = first is not None and row["runs"] == cell.total
        row["times one program"] = row["s"] / first if same else "-"
    return cell.rows


# -- ours -----------------------------------------------------------------------------------------


def count_compilations() -> dict[str, Any]:
    """Counts the compilations of this process from now on, and their seconds, as they are done."""
    import jax

    compilations = {"count": 0, "compile s": 0.0}

    def add(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compilations["count"] += 1
            compilations["compile s"] += seconds

    jax.monitoring.register_event_duration_secs_listener(add)
    return compilations


def answer(scores: Sequence[Mapping[str, float]], **facts: Any) -> None:
    """Prints what a side has measured, and the best score of each run on dev."""
    dev = [next(iter(metrics.values())) for metrics in scores]
    print(json.dumps({"dev": dev, "peak GiB": peak_gib(), **facts}))


def train_together(args: argparse.Namespace) -> None:
    """Trains all runs as one program, as `train` does."""
    from jaxprompt.cli.results import train_grid
    from jaxprompt.config.load import load_config
    from jaxprompt.parallel.compilation import enable_compilation_cache
    from jaxprompt.runs.grid.expand import list_runs
    from jaxprompt.training.run_folder import read_result

    compilations, c = count_compilations(), load_config(args.config)
    enable_compilation_cache(str(Path(args.workdir) / "compiled"))
    with contextlib.redirect_stdout(sys.stderr):
        train_grid(c, args.workdir)
    results = [read_result(run.folder) for run in list_runs(c, args.workdir)]
    answer([r.dev for r in results], programs=results[0].time["step_programs"], **compilations)


def train_in_turn(args: argparse.Namespace) -> None:
    """Trains runs one after another; each reads its programs from what the first has kept."""
    from jaxprompt.config.load import load_config
    from jaxprompt.parallel.compilation import enable_compilation_cache
    from jaxprompt.runs import train as tune
    from jaxprompt.runs.grid.expand import list_runs

    compilations, c = count_compilations(), load_config(args.config)
    enable_compilation_cache(str(Path(args.workdir) / "compiled"))
    grid, results, seconds = list_runs(c, args.workdir), [], []
    for number in args.numbers:
        started = time.perf_counter()
        results.append(tune.train_prompt(grid[number].config, str(grid[number].folder)))
        seconds.append(time.perf_counter() - started)
    programs = sum(result.time["step_programs"] for result in results)
    answer([r.dev for r in results], seconds=seconds, programs=programs, **compilations)


# -- PEFT's ---------------------------------------------------------------------------------------


def write_rows(args: argparse.Namespace) -> None:
    """Writes what the PEFT side reads: token ids, labels, and the examples of every batch."""
    from jaxprompt.build.examples import read_examples
    from jaxprompt.build.placement import build_placement
    from jaxprompt.build.task import (
        encode_splits,
        open_checked_backbone,
        scorer_from_config,
        train_batches,
    )
    from jaxprompt.config.load import load_config
    from jaxprompt.runs.grid.expand import list_runs

    c, runs = load_config(args.config), []
    length = c.prompt.get("length")
    grid = list_runs(c, args.workdir)
    placement = build_placement(c)
    backbone = open_checked_backbone(c, placement)
    for number in args.numbers:
        config = grid[number].config
        scorer = scorer_from_config(config, backbone, read_examples(config), placement)
        splits = encode_splits(scorer, read_examples(config))
        stream = train_batches(config, scorer, splits["train"])
        order = [next(stream).index.tolist() for _ in range(config.train.total_steps)]
        stream.close()
        parts = {}
        for name in ("train", "dev"):
            # Without the places of soft tokens, which PEFT adds itself.
            ids = [
                [i for i, slot in zip(row.ids, row.slot, strict=True) if slot < 0]
                for (row,) in splits[name].rows
            ]
            parts[name] = {"ids": [list(map(int, x)) for x in ids],
                           "labels": list(map(int, splits[name].labels))}  # fmt: skip
        runs.append({"lr": config.optim.lr, "order": order, **parts})
    document = {
        "folder": str(backbone.folder), "pad": scorer.layout.pad_id, "kind": c.prompt.name,
        "length": length, "classes": len(scorer.task.labels), "steps": c.train.total_steps,
        "evaluate": c.train.eval_steps, "eval_batch": c.data.eval_batch, "runs": runs,
    }  # fmt: skip
    Path(args.rows).write_text(json.dumps(document))
    print("{}")


def train_peft(args: argparse.Namespace) -> None:
    """Trains the same runs through PEFT, one after another, on one copy of the backbone's file."""
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cell = json.loads(Path(args.rows).read_text())
    make = {"soft": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[cell["kind"]]
    base = AutoModelForSequenceClassification.from_pretrained(
        cell["folder"], num_labels=cell["classes"]
    )
    pad = torch.nn.utils.rnn.pad_sequence

    def batch(part: dict, chosen: list[int]) -> dict[str, Any]:
        texts = [torch.tensor(part["ids"][i]) for i in chosen]
        return {
            "input_ids": pad(texts, True, cell["pad"]),
            "attention_mask": pad([torch.ones_like(text) for text in texts], True),
            "labels": torch.tensor([part["labels"][i] for i in chosen]),
        }

    results, seconds = [], []
    for run in cell["runs"]:
        started = time.perf_counter()
        torch.manual_seed(0)
        setting = make(task_type="SEQ_CLS", num_virtual_tokens=cell["length"])
        model = peft.get_peft_model(copy.deepcopy(base), setting)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=run["lr"], weight_decay=0.0)
        decay = lambda step: 1.0 - step / cell["steps"]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        dev, size = run["dev"], cell["eval_batch"]
        by_length = sorted(range(len(dev["ids"])), key=lambda i, dev=dev: -len(dev["ids"][i]))
        best = -1.0
        for step, chosen in enumerate(run["order"], 1):
            model.train()
            model(**batch(run["train"], [i for i in chosen if i >= 0])).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if step % cell["evaluate"] and step != cell["steps"]:
                continue
            model.eval()
            right = 0
            with torch.inference_mode():
                for first in range(0, len(by_length), size):
                    inputs = batch(dev, by_length[first : first + size])
                    scores = model(**inputs).logits
                    right += int((scores.argmax(-1) == inputs["labels"]).sum())
            if right / len(by_length) > best:
                best = right / len(by_length)
                best_params = [p.detach().clone() for p in trained]
        assert len(best_params) == len(trained)
        results.append({"accuracy": best})
        seconds.append(time.perf_counter() - started)
    answer(results, seconds=seconds)


SIDES = {
    "together": train_together, "turns": train_in_turn, "rows": write_rows, "peft": train_peft,
}  # fmt: skip
