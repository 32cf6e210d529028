"""Measures what README reports of speed and size, beside PEFT where it does the same work.

usage: python launch/bench.py step    --output F [--peft-script FILE] [--stack scan|unroll]
       python launch/bench.py epoch   --output F [--data DIR] [--group N]
       python launch/bench.py compile --output F
       python launch/bench.py start   --output F
       python launch/bench.py bytes   --output F
       python launch/bench.py gpu     --output F [--dry-run]
       python launch/bench.py lm      --output F [--model t5-small|t5-base|gpt2]
       python launch/bench.py write   --output F [--model t5-small|gpt2]
       python launch/bench.py scores  --output F [--model t5-small|t5-base|gpt2]
       python launch/bench.py load    --output F [--folder DIR]
       python launch/bench.py plan    --output F
       python launch/bench.py cache   --output F [--data DIR]
       python launch/bench.py runs    --output F [--kind soft|prefix] [--runs N] [--take N]
       python launch/bench.py ops     --output F [--kind soft|prefix]
       python launch/bench.py adapt   --output F [--device cpu|gpu]
       python launch/bench.py corpus  SOURCE --tokenizer DIR --output F
       python launch/bench.py corpus  SOURCE --tokenizer DIR --output F --examples
Each prints a Markdown table and writes all figures as JSON to F. Where two sides are compared, each
has processes of its own on the cores of --cores, and they take turns: run that on an idle machine.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_adapt
import bench_corpus
import bench_gpu
import numpy as np
from bench_cache import CASES as CACHE_CASES
from bench_lm import make_head_work
from bench_load import weigh
from bench_ops import KINDS as WORK_KINDS
from bench_plan import CASES as PLAN_CASES
from bench_process import call, report, summarise, worker
from bench_runs import LENGTHS, SIZES, train_cells
from bench_sides import LENGTH, ROOT, make_batch, make_model, make_work

SHARED = ROOT.parent / "shared"
SIDES, LM_SIDES, LOADING = (
    str(ROOT / "launch" / f"bench_{name}.py") for name in ("sides", "lm", "load")
)
PLAN_SIDE, CACHE_SIDE, OPS_SIDE = (
    str(ROOT / "launch" / f"bench_{name}.py") for name in ("plan", "cache", "ops")
)


# -- a step beside PEFT's ------------------------------------------------------------------------


def compare(args: argparse.Namespace, ours: list[str], theirs: list[str]) -> dict:
    """Lets two commands take turns. Returns medians of times and peaks, and of each pair's ratios.

    Without a command for PEFT only ours is timed.
    """
    commands = [command for command in (ours, theirs) if command]
    rounds = [[call(command, args.cores) for command in commands] for _ in range(args.rounds)]
    row = summarise(rounds, {"s": "wall_s", "peak GiB": "rss_peak_gib"})
    times = [[statistics.median(side["wall_s"]) for side in sides] for sides in rounds]
    peaks = [[side["rss_peak_gib"] for side in sides] for sides in rounds]
    return row | {"times": times, "peaks": peaks}


def step(args: argparse.Namespace) -> None:
    """Times a step of BERT-base, 16 x 128 tokens, float32, against the script of PEFT's."""
    rows, reps = [], ["--reps", str(args.reps)]
    threads = str(len(args.cores.split(",")))
    for kind, name in (("soft", "PT"), ("prefix", "PX")):
        ours = [SIDES, "ours", "--kind", kind, "--stack", args.stack, *reps]
        theirs = [args.peft_script, "--kind", name, "--virtual", str(LENGTH), *reps]
        there = Path(args.peft_script).exists()
        pair = compare(args, ours, [*theirs, "--threads", threads] if there else [])
        rows.append({"method": kind, "stack": args.stack} | pair)
    report(args, rows)


# -- an epoch of SST-2 ---------------------------------------------------------------------------


def epoch(args: argparse.Namespace) -> None:
    """Times an epoch of SST-2 (batch 32) in parts that take turns, PEFT always in random order."""
    rows = []
    for group in dict.fromkeys((1, args.group)):
        flags = ["--data", args.data, "--group", str(group)]
        with (
            worker([SIDES, "epoch-ours", *flags], args.cores) as ours,
            worker(
                [SIDES, "epoch-peft", "--data", args.data, "--group", "1"], args.cores
            ) as theirs,
        ):
            sides = (ours, theirs)
            for ask in sides:
                ask(5)
            pairs = [tuple(ask(args.steps) for ask in sides) for _ in range(args.parts)]
        times = [[side["seconds"] for side in pair] for pair in pairs]
        total = [sum(side) for side in zip(*times, strict=True)]
        own = {"steps": args.parts * args.steps, "ours s": total[0], "PEFT s": total[1]}
        median = statistics.median(a / b for a, b in times)
        rows.append({"data.group": group, **own, "ratio": median, "times": times})
    report(args, rows)


# -- T5 and GPT-2 ---------------------------------------------------------------------------------


def take_turns(args, left: list[str], right: list[str], count: int) -> dict:
    """Lets two sides of bench_lm.py answer `count` in turns. Returns medians and ratios."""
    with (
        worker([LM_SIDES, *left], args.cores) as one,
        worker([LM_SIDES, *right], args.cores) as two,
    ):
        for ask in (one, two):
            ask(count), ask(count)
        pairs = [(one(count), two(count)) for _ in range(args.rounds)]
    row = {}
    for field, name in (("seconds", "s"), ("rss_peak_gib", "peak GiB")):
        values = [[side[field] for side in pair] for pair in pairs]
        for side, own in zip(("first", "second"), zip(*values, strict=True), strict=True):
            row[f"{side} {name}"] = statistics.median(own)
        row[f"ratio {name}"] = statistics.median(a / b for a, b in values)
    return row | {"seconds": [[side["seconds"] for side in pair] for pair in pairs]}


def lm(args: argparse.Namespace) -> None:
    """Times a step on T5 and GPT-2 (first) against PEFT's (second)."""
    pairs = {"t5": (("soft", "soft"), ("deep", "soft"), ("decoder", "prefix"))}
    pairs["gpt2"] = (("soft", "soft"), ("prefix", "prefix"))
    rows = []
    for model in [args.model] if args.model else ["t5-small", "t5-base", "gpt2"]:
        for own, theirs in pairs[model.partition("-")[0]]:
            shape = ["--model", model, "--rows", str(args.rows)]
            ours = ["step", *shape, "--kind", own, "--stack", args.stack]
            pair = take_turns(args, ours, ["peft-step", *shape, "--kind", theirs], args.reps)
            rows.append({"model": model, "ours": own, "PEFT": theirs, **pair})
    report(args, rows)


def write(args: argparse.Namespace) -> None:
    """Times greedy writing of 32 tokens (first) against transformers' generate (second)."""
    rows = []
    for model in [args.model] if args.model else ["t5-small", "gpt2"]:
        for size in ("1", "16"):
            shape = ["--model", model, "--rows", size]
            ours = ["write", *shape, "--kind", "none", "--stack", args.stack]
            pair = take_turns(args, ours, ["torch-write", *shape], 32)
            rate = {f"{x} tokens/s": 32 * int(size) / pair[f"{x} s"] for x in ("first", "second")}
            rows.append({"model": model, "batch": int(size), **rate, **pair})
    report(args, rows)


def scores(args: argparse.Namespace) -> None:
    """Times scoring four label words by their rows (first) or all rows (second): head and step."""
    rows = []
    for model in [args.model] if args.model else ["t5-small", "t5-base", "gpt2"]:
        row = {"model": model}
        for part, count in (("head", 100), ("step", args.reps)):
            sides = [[part, "--model", model, "--scores", s] for s in ("restricted", "full")]
            pair = take_turns(args, *sides, count)
            row |= {f"{part} {name}": pair[name] for name in ("first s", "second s", "ratio s")}
        for kind in ("restricted", "full"):
            score, arguments = make_head_work(
                argparse.Namespace(
                    model=model, kind="soft", rows=16, stack=args.stack, dtype="float32",
                    scores=kind,
                )
            )  # fmt: skip
            memory = score.lower(*arguments).compile().memory_analysis()
            row[f"head {kind} temporary bytes"] = memory.temp_size_in_bytes
        rows.append(row)
    report(args, rows)


# -- compilation, start, bytes -------------------------------------------------------------------


def compile_time(args: argparse.Namespace) -> None:
    """Compiles a step at BERT-large shape from abstract arrays."""
    rows = []
    for kind in ("soft", "prefix"):
        for stack in ("scan", "unroll"):
            step, arguments = make_work(make_model("large", kind, stack=stack), 16, abstract=True)
            started = time.perf_counter()
            lowered = step.lower(*arguments)
            traced = time.perf_counter()
            lowered.compile()
            done = time.perf_counter()
            times = {"trace s": traced - started, "compile s": done - traced}
            rows.append({"method": kind, "stack": stack, **times, "total s": done - started})
    report(args, rows)


def start(args: argparse.Namespace) -> None:
    """Times the quickstart's training from the command to the record of its first step."""
    rows = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as workdir:
            command = ["-m", "jaxprompt", "train", f"--config={ROOT}/configs/quickstart.py"]
            command += [f"--workdir={workdir}", "--config.train.log_steps=1"]
            log = Path(workdir) / "metrics.jsonl"
            started = time.perf_counter()
            process = subprocess.Popen(
                ["taskset", "-c", args.cores, sys.executable, *command],
                cwd=ROOT, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            while process.poll() is None and not (log.exists() and log.stat().st_size):
                time.sleep(0.01)
            seconds = time.perf_counter() - started
            if process.poll() is not None:
                sys.exit(f"the quickstart ended with code {process.returncode} before a step")
            process.kill()
            process.wait()
        rows.append({"start to first step s": seconds})
    report(args, rows)


def count_bytes(args: argparse.Namespace) -> None:
    """Writes prompts with a head of two classes as `export` does, and weighs the files."""
    import jax

    from jaxprompt import tree
    from jaxprompt.convert.artifact import CARD_FIELDS, write_artifact
    from jaxprompt.models.folding import fold

    rows = []
    for shape in ("minilm", "base", "large"):
        for kind, length in (("soft", 20), ("prefix", 16), ("prefix", 20)):
            model = make_model(shape, kind, length)
            batch = make_batch(model.prompt, 1)
            init = lambda key, m=model, b=batch: m.backbone.init(key, b, method="init_all")
            shapes = jax.eval_shape(init, jax.random.key(0))["params"]
            blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
            params = model.init(jax.random.key(0), blank)
            arrays = fold(model, params, batch)[1]
            tensors = {f"prompt/{name}": leaf for name, leaf in arrays.items()}
            tensors |= tree.flatten({"head": jax.device_get(params["head"])})
            with tempfile.TemporaryDirectory() as folder:
                path, _ = write_artifact(folder, tensors, dict.fromkeys(CARD_FIELDS))
                size = path.stat().st_size
            rows.append({"shape": shape, "method": kind, "P": length,
                         "numbers": tree.count(tensors), "bytes": size})  # fmt: skip
    report(args, rows)


# -- plan -----------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> None:
    """Compares the memory that plan gives with the peak of real steps, float32 on the CPU."""
    rows = []
    for case, (model, method, batch, length) in PLAN_CASES.items():
        found = call([PLAN_SIDE, case], args.cores)
        sizes = {f"{name} MiB": round(found[name] / 2**20) for name in found}
        row = {"model": model, "method": method, "batch": f"{batch} x {length}", **sizes}
        rows.append(row | {"planned / measured": found["planned"] / found["measured"]})
    report(args, rows)


# -- loading --------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> None:
    """Weighs and times loading a T5-large of 3 GB onto meshes, against reading its files."""
    with contextlib.ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
        run = lambda words: call([LOADING, *words], args.cores)
        report(args, weigh(run, folder, args.rounds))


# -- states that are kept --------------------------------------------------------------------------


def cache(args: argparse.Namespace) -> None:
    """Times steps of MiniLM on SST-2 with and without the states of frozen layers, in turns."""
    rows = []
    for case in CACHE_CASES:
        sides = [[CACHE_SIDE, case, "--data", args.data, "--cache", x] for x in ("off", "host")]
        with worker(sides[0], args.cores) as off, worker(sides[1], args.cores) as on:
            off(2), on(2)
            pairs = [(off(args.steps), on(args.steps)) for _ in range(args.parts)]
        (first, second), times = pairs[-1], [[side["seconds"] for side in pair] for pair in pairs]
        each = [statistics.median(own) / args.steps for own in zip(*times, strict=True)]
        rows.append({
            "case": case, "without ms": 1e3 * each[0], "kept ms": 1e3 * each[1],
            "times faster": statistics.median(a / b for a, b in times),
            "products left": second["GFLOP"] / first["GFLOP"],
            "time left": statistics.median(b / a for a, b in times),
            "filling s": second["fill s"], "times": times,
        })  # fmt: skip
    report(args, rows)


# -- several runs, and where the time of a step goes -----------------------------------------------


def runs(args: argparse.Namespace) -> None:
    """Trains a cell of seeds x rates as one program, and in three other ways, each once.

    Of what trains one run after another `--take` runs are done and the others reckoned from them.
    """
    report(args, train_cells(lambda words: call(words, args.cores), args))


def ops(args: argparse.Namespace) -> None:
    """Tells what the time of a step of BERT-base, 16 x 128 tokens, float32, is spent on."""
    rows = []
    for kind in [args.kind] if args.kind else LENGTHS:
        flags = ["--kind", kind, "--reps", str(args.reps), "--stack", args.stack]
        ours, theirs = (call([OPS_SIDE, side, *flags], args.cores) for side in ("ours", "peft"))
        for name in ("all", *WORK_KINDS):
            row = {"method": kind, "work": name}
            for side, found in (("ours", ours), ("PEFT", theirs)):
                row[f"{side} ms"] = 1e3 * found[name]
                row[f"{side} share"] = found[name] / found["all"]
            rows.append(row)
    report(args, rows)


VERBS = {
    "step": step, "epoch": epoch, "compile": compile_time, "start": start, "bytes": count_bytes,
    "lm": lm, "write": write, "scores": scores, "load": load, "plan": plan,
    "cache": cache, "runs": runs, "ops": ops,
}  # fmt: skip
# Verbs with flags of their own.
APART = {"adapt": bench_adapt.main, "corpus": bench_corpus.main, "gpu": bench_gpu.main}


def main() -> None:
    """Reads the flags and makes one table."""
    if sys.argv[1:] and sys.argv[1] in APART:
        APART[sys.argv[1]](sys.argv[2:])
        return
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--output", required=True)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--rows", type=int, default=16, help="of a batch (lm)")
    parser.add_argument("--model", default="", help="one of the models alone (lm, write, scores)")
    parser.add_argument("--peft-script", default=str(SHARED / "bench" / "peft_bench.py"))
    parser.add_argument("--data", default=str(SHARED / "data"))
    parser.add_argument("--folder", help="of the written weights, kept (load)")
    parser.add_argument("--parts", type=int, default=4, help="turns of an epoch")
    parser.add_argument("--steps", type=int, default=50, help="of a turn, or of a run (runs)")
    parser.add_argument("--group", type=int, default=8, help="data.group of the second epoch")
    parser.add_argument("--kind", choices=LENGTHS, default="", help="one method alone (runs, ops)")
    parser.add_argument("--runs", type=int, choices=SIZES, default=20, help="of a cell (runs)")
    parser.add_argument("--take", type=int, default=20, help="runs of a cell that are timed (runs)")
    parser.add_argument("--sides", default="together,peft,turns,alone,curve", help="of runs")
    args = parser.parse_args()
    VERBS[args.verb](args)


if __name__ == "__main__":
    main()
