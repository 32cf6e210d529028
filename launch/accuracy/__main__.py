"""Runs and tabulates configs/accuracy.py, and sets its counterparts in torch beside them.

usage: python launch/accuracy run   --workdir DIR --data DIR [--mlm DIR] [--only X] [--jobs N]
       python launch/accuracy peft  --workdir DIR --data DIR --task TASK --seed N [--only METHOD]
                                       [--set FIELD=VALUE ...]
       python launch/accuracy peft_text --workdir DIR --only METHOD-START --seed N
                                       [--set FIELD=VALUE ...]
       python launch/accuracy torch --workdir DIR --data DIR --mlm DIR --seed N [--only METHOD]
       python launch/accuracy zero_shot --workdir DIR --data DIR --task TASK
       python launch/accuracy examples --workdir DIR --task nsp|nss|cls|unified
                                          --set corpus.path=TEXT backbone.path=BACKBONE [...]
       python launch/accuracy sums --workdir DIR
       python launch/accuracy table --workdir DIR
--data holds one folder a task (train, dev, test and kshot_16 as JSON lines), --mlm a BERT with its
masked-language-model head. `run` skips what has a result. `peft` trains prefix (the default) or
soft by torch and peft on the same rows, with fields of the config changed by --set; of tags and
spans it takes our rows, loss and decisions. `peft_text` trains soft or prefix by a config of
configs/sums.py, from the initial values and in the order of examples of ours. `torch` trains dart
(which is the default), lm_bff or dpt on SST-2 by torch alone: of the first two N is the split, of
dpt the seed, and --mlm its discriminator. `zero_shot` scores label words of SmolLM2 on a split, by
ours and by torch, and counts the examples that both answer alike. `examples` writes a task of
pre-training as a folder of texts with labels, for a probe; `sums` those of configs/sums.py.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs.accuracy import SEEDS
from jaxprompt.cli.results import collect
from jaxprompt.cli.sweep import list_runs
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError, at_least, check_known, nearest
from jaxprompt.inspection.tables import TableRun, format_table
from jaxprompt.training.run_folder import read_result, write_result
from jaxprompt.training.run_result import RunResult

ROOT = Path(__file__).parents[2]

CONFIG = str(ROOT / "configs" / "accuracy.py")


def run_all(args: argparse.Namespace) -> None:
    """Trains every run, `jobs` at a time, each on its share of the cores."""
    at_least("--jobs", args.jobs, 1)
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // args.jobs, 1)

    def train(number: int, run) -> int:
        if (run.workdir / "result.json").exists():
            return 0
        name = run.config.rpartition(":")[2]
        task = name.partition("-")[0]
        folder = Path(args.data) / task.removesuffix("_mlm")
        flags = {"data.source": folder, "train.tracker": "none", **run.changes}
        if name.endswith("-16"):
            flags["data.protocol.rows"] = folder / "kshot_16.jsonl.gz"
        if task.endswith("_mlm"):
            flags["backbone.path"] = args.mlm
        cores_of_run = cores[number % args.jobs * share % len(cores) :][:share]
        command = [sys.executable, "-m", "jaxprompt", "train", f"--config={run.config}"]
        command += [f"--workdir={run.workdir}", *(f"--config.{f}={v}" for f, v in flags.items())]
        pin = lambda: os.sched_setaffinity(0, cores_of_run)
        return subprocess.run(command, cwd=ROOT, preexec_fn=pin).returncode

    every = list_runs(CONFIG, args.workdir)
    runs = [run for run in every if f":{args.only}" in run.config]
    if not runs:
        names = dict.fromkeys(run.config.rpartition(":")[2] for run in every)
        raise InputError(f"--only={args.only} begins no run; {nearest(args.only, names)}")
    if not args.mlm and any(":sst2_mlm" in run.config for run in runs):
        sys.exit("the runs of sst2_mlm need --mlm, a BERT with its head; --only leaves them out")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(args.workdir).resolve() / "compiled")
    with ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(train, range(len(runs)), runs))
    if failed := sum(map(bool, codes)):
        raise InputError(f"{failed} of {len(runs)} runs failed; the lines above say why")


def show(args: argparse.Namespace) -> None:
    """Prints the table of the results that are there."""
    rows = collect(list_runs(CONFIG, args.workdir))
    for path in sorted(Path(args.workdir).glob("*-seed=*/result.json")):
        row = path.parent.name.partition("-seed=")[0]
        if not row.rpartition("-")[2].startswith(("peft", "torch_")):
            continue
        rows.setdefault(row, []).append(TableRun(read_result(path.parent)))
    print(format_table(rows))


def peft_run(args: argparse.Namespace) -> None:
    """Trains PEFT's prefix or prompt tuning in the setting of ours, on its rows; best on dev."""
    from launch.accuracy.peft_runs import METHODS, train_classes, train_tokens

    method = args.only or "prefix"
    if method not in METHODS:
        sys.exit(f"--only {method!r}: give prefix or soft")
    source = ("data.source", str(Path(args.data) / args.task))
    c = load_config(f"{CONFIG}:{args.task}-{method}", [source, *args.set])
    if c.train.total_epochs < 1 or c.train.total_epochs % 1:
        raise InputError(f"train.total_epochs={c.train.total_epochs:g}: peft takes whole epochs")
    if c.head.name == "linear":
        result = train_classes(c, args.seed, method)
    elif method == "prefix":
        result = train_tokens(c, args.seed)
    else:
        sys.exit(f"--only {method!r}: of {args.task} PEFT's side trains prefix alone")
    write(args, result, "peft" if method == "prefix" else f"peft_{method}")


def peft_text_run(args: argparse.Namespace) -> None:
    """Trains PEFT's prefix or prompt tuning on sums, by the config that --only names."""
    from launch.accuracy.peft_runs import METHODS
    from launch.accuracy.peft_texts import train_text

    method = check_known("--only", args.only.partition("-")[0], METHODS)
    config = ROOT / "configs" / "sums.py"
    c = load_config(f"{config}:{args.only}", [("seed", str(args.seed)), *args.set])
    args.task = "sums"
    write(args, train_text(c, method), f"peft_{args.only}")


def torch_run(args: argparse.Namespace) -> None:
    """Trains on SST-2 in torch alone, with the flags of docs/results/papers.md."""
    from launch.accuracy.torch_runs import train_listed, train_words

    if not args.mlm:
        raise InputError("torch needs --mlm, a folder with a BERT and its head")
    few = {"data.batch": 8, "data.seed": args.seed, "train.total_steps": 80, "optim.lr": 3e-4}
    sides = {
        "dart": ("dart/few_shot:sst2", few, lambda c, s: train_words(c, s, dart=True)),
        "lm_bff": ("dart/lm_bff:sst2", few, lambda c, s: train_words(c, s, dart=False)),
        "dpt": (
            "dpt/tasks:sst2,low,dpt", {"train.total_epochs": 4, "optim.lr": 2e-4}, train_listed
        ),
    }  # fmt: skip
    name, flags, train = sides[check_known("--only", args.only or "dart", sides)]
    flags |= {"backbone.path": args.mlm, "data.source": Path(args.data) / "sst2"}
    c = load_config(name, list((flags | {"data.max_len": 64}).items()))
    args.task = "sst2"
    write(args, train(c, args.seed), f"torch_{args.only or 'dart'}")


def zero_shot(args: argparse.Namespace) -> None:
    """Prints what ours and torch have of a task's examples, nothing of which is trained."""
    from launch.accuracy.zero_shot import compare

    print(json.dumps(compare(args.task, args.data, args.workdir, args.split)))


def examples(args: argparse.Namespace) -> None:
    """Writes examples of a pre-training task; prints how many."""
    from launch.accuracy.examples import write_examples

    print(json.dumps(write_examples(args.task, args.set, args.workdir)))


def sums(args: argparse.Namespace) -> None:
    """Writes docs/examples/sums; prints how many examples."""
    from launch.accuracy.sums import write_sums

    print(json.dumps(write_sums(args.workdir)))


def write(args: argparse.Namespace, result: RunResult, method: str = "peft") -> None:
    """Writes the result of a run in torch."""
    folder = Path(args.workdir) / f"{args.task}-{method}-seed={args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    write_result(folder, result)


def read_setting(text: str) -> tuple[str, str]:
    """Divides a setting. -> field, value"""
    field, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} has no value; give FIELD=VALUE")
    return field, value


def main() -> None:
    """Reads the flags and does what is asked."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument(
        "command",
        choices=("run", "peft", "peft_text", "torch", "zero_shot", "examples", "sums", "table"),
    )
    parser.add_argument("--data", default="")
    parser.add_argument("--mlm", default="")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--task", default="trec")
    parser.add_argument("--seed", type=int, default=SEEDS[0])
    parser.add_argument("--split", default="dev")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", type=read_setting)
    args = parser.parse_args()
    without_data = ("table", "examples", "peft_text", "sums")
    if args.command not in without_data and not args.data:
        parser.error("give --data, the folder of the tasks")
    commands = {
        "run": run_all, "peft": peft_run, "peft_text": peft_text_run, "torch": torch_run,
        "zero_shot": zero_shot, "examples": examples, "sums": sums, "table": show,
    }  # fmt: skip
    commands[args.command](args)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        sys.exit(2)
