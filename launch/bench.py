"""Measures what README reports of speed and size, beside PEFT where it does the same work.

usage: python launch/bench.py step    --output F [--peft-script FILE] [--stack scan|unroll] [--rounds N]
       python launch/bench.py epoch   --output F [--data DIR] [--group N]
       python launch/bench.py compile --output F
       python launch/bench.py start   --output F
       python launch/bench.py bytes   --output F
       python launch/bench.py gpu     --output F
Each prints a Markdown table and writes all figures as JSON to F. `step` and `epoch` keep both sides
on the cores of --cores and let them take turns: run them on an idle machine. The others need none.
PEFT runs in processes without jax, this library in processes without torch.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHARED = ROOT.parent / "shared"

LENGTH = 20  # of every prompt that is timed
SHAPES = {
    "base": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    "large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
}


def hf_config(shape: str) -> dict:
    """Returns the transformers config of a BERT shape."""
    width = SHAPES[shape]["hidden_size"]
    own = dict(vocab_size=30522, intermediate_size=4 * width, max_position_embeddings=512)
    return SHAPES[shape] | own


def report(args: argparse.Namespace, rows: list[dict]) -> None:
    """Prints rows of one kind as a Markdown table and writes them as JSON."""
    show = lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)
    names = [name for name in rows[0] if not isinstance(rows[0][name], list)]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(show(row[name]) for name in names) + " |")
    load = {"load_average": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    Path(args.output).write_text(json.dumps({"rows": rows, **load}, indent=2) + "\n")


def peak_gib() -> float:
    """Tells the largest resident memory of this process up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# -- processes -----------------------------------------------------------------------------------


def environment(cores: str) -> dict[str, str]:
    """Makes the environment of a process that runs on `cores` ("0,1") and downloads nothing."""
    own = {"OMP_NUM_THREADS": str(len(cores.split(","))), "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def call(command: list[str], cores: str) -> dict:
    """Runs a command on `cores`. Returns the JSON object in the last line of its output."""
    done = subprocess.run(
        ["taskset", "-c", cores, sys.executable, *command],
        env=environment(cores), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def worker(command: list[str], cores: str):
    """Starts a process that measures on demand. Yields ask(count) -> its next JSON object."""
    process = subprocess.Popen(
        ["taskset", "-c", cores, sys.executable, __file__, *command],
        env=environment(cores), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ask(count: int) -> dict:
        print(count, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    with process:
        yield ask
        process.stdin.close()


def serve(run) -> None:
    """Answers each count on stdin with the seconds that run(count) takes, after run(0) once."""
    run(0)
    for line in sys.stdin:
        started = time.perf_counter()
        run(int(line))
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "rss_peak_gib": peak_gib()}), flush=True)


# -- our step ------------------------------------------------------------------------------------


def make_work(shape: str, kind: str, stack: str, dtype: str = "float32", concrete: bool = True):
    """Makes (step, (state, frozen, batch)) of 16 rows x 128 tokens beside the prompt.

    The arguments are arrays, or their shapes alone where not `concrete`.
    """
    import jax
    import optax

    from jaxprompt import losses, optim, rng, state, steps, tree
    from jaxprompt.backbones import make_backbone
    from jaxprompt.heads.linear import Head
    from jaxprompt.model import Model
    from jaxprompt.prompts import make_prompt
    from jaxprompt.types import Batch, Tokens

    backbone = make_backbone("bert", hf_config(shape), {"pooler"}, stack=stack, dtype=dtype)
    prompt = make_prompt(kind, backbone.dims, length=LENGTH)
    model = Model(backbone, prompt, {"main": Head(2, "checkpoint")})
    rows, slots = 16, prompt.num_slots()
    draws = np.random.RandomState(0)
    ids = draws.randint(5, 30522, (rows, slots + 128)).astype(np.int32)
    zeros = np.zeros_like(ids)
    columns = zeros + np.arange(ids.shape[1], dtype=np.int32)
    slot = np.where(columns < slots, columns, -1)
    positions = columns + prompt.position_shift()
    tokens = Tokens(ids, zeros == 0, slot, positions, zeros, zeros.astype(np.int8))
    labels = draws.randint(0, 2, rows).astype(np.int32)
    first = np.full((rows, 1), slots, np.int32)
    batch = Batch(tokens, first, labels, np.ones(rows, np.float32), np.arange(rows))
    tx = optim.make_optimizer("adamw", optax.constant_schedule(1.0), {"prompt": 1e-3, "head": 1e-3})

    def draw(key):
        loaded = backbone.init(key, batch, method="init_all")["params"]
        params = model.init(key, tree.cast(loaded, dtype))
        mask = tree.trainable_mask(params, prompt.TRAINABLE)
        trainable, frozen = tree.split(params, mask)
        return state.make_state(trainable, tx, rng.key_for(0, "dropout")), frozen

    make = jax.jit(draw) if concrete else lambda key: jax.eval_shape(draw, key)
    step = steps.make_train_step(model, tx, [steps.Objective("main", losses.cross_entropy)])
    start, frozen = make(jax.random.key(0))
    return jax.jit(step, donate_argnums=0), (start, frozen, jax.device_put(batch))


def time_ours(args: argparse.Namespace) -> None:
    """Times our step; prints one JSON object."""
    import jax

    step, (state, frozen, batch) = make_work(args.shape, args.kind, args.stack, args.dtype)
    seconds = []
    for _ in range(2 + args.reps):
        started = time.perf_counter()
        for _ in range(args.burst):
            state, measured = step(state, frozen, batch)
        jax.block_until_ready(measured)
        seconds.append((time.perf_counter() - started) / args.burst)
    print(json.dumps({"wall_s": seconds[2:], "rss_peak_gib": peak_gib()}))


def step(args: argparse.Namespace) -> None:
    """Times a step of BERT-base, 16 x 128 tokens, float32, in processes that take turns."""
    rows, reps = [], str(args.reps)
    for kind, name in (("soft", "PT"), ("prefix", "PX")):
        ours = [__file__, "ours", "--kind", kind, "--stack", args.stack, "--reps", reps]
        theirs = [args.peft_script, "--kind", name, "--virtual", str(LENGTH), "--reps", reps]
        theirs += ["--threads", str(len(args.cores.split(",")))]
        rounds = [(call(ours, args.cores), call(theirs, args.cores)) for _ in range(args.rounds)]
        rows.append({"method": kind, "stack": args.stack} | compare(rounds))
    report(args, rows)


def compare(rounds: list[tuple[dict, dict]]) -> dict:
    """Summarises pairs (ours, PEFT): medians of times and peaks, and of the ratios of each pair."""
    times = [[statistics.median(side["wall_s"]) for side in pair] for pair in rounds]
    peaks = [[side["rss_peak_gib"] for side in pair] for pair in rounds]
    row = {}
    for name, pairs in (("s", times), ("peak GiB", peaks)):
        row[f"ours {name}"], row[f"PEFT {name}"] = map(statistics.median, zip(*pairs, strict=True))
        row[f"ratio {name}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return row | {"times": times, "peaks": peaks}


# -- an epoch of SST-2 ---------------------------------------------------------------------------


def read_sst2(args: argparse.Namespace):
    """Encodes the SST-2 training rows for prefix tuning of MiniLM. -> config, scorer, split"""
    from configs import base
    from configs.parts import backbones, methods, tasks
    from jaxprompt import build
    from jaxprompt.scorer import open_backbone

    c = base.get_config()
    backbones.minilm(c)
    tasks.sst2(c)
    methods.prefix(c, length=LENGTH, dropout=0.0)
    c.data.source, c.data.group, c.optim.clip = str(Path(args.data) / "sst2"), args.group, 0.0
    examples = build.read_examples(c)
    backbone = open_backbone(c.backbone.to_dict())
    scorer = build.scorer_from_config(c, backbone, examples)
    return c, backbone, scorer, scorer.encode(examples.splits["train"])


def epoch_ours(args: argparse.Namespace) -> None:
    """Serves parts of an epoch of our loop; all its shapes are compiled first."""
    import jax

    from jaxprompt import build, rng, steps
    from jaxprompt.scorer import load_weights
    from jaxprompt.state import make_state

    c, backbone, scorer, rows = read_sst2(args)
    backbone, loaded = load_weights(backbone)
    scorer = scorer.with_backbone(backbone)
    trainable, frozen, _ = build.start(c, scorer, loaded, rows)
    batches = build.train_batches(c, scorer, rows)
    per_epoch = batches.steps_per_epoch
    plan = build.make_plan(c.train, per_epoch, c.data.batch)
    tx = build.build_optimizer(c, trainable, plan, per_epoch)
    make = steps.make_train_step(scorer.model, tx, build.build_objectives(c))
    train_step = jax.jit(make, donate_argnums=0)
    state = make_state(trainable, tx, rng.key_for(c.seed, "dropout"))
    seen = {batch.encoder.ids.shape: batch for _, batch in zip(range(per_epoch), batches)}  # noqa: B905
    for batch in seen.values():
        state, _ = train_step(state, frozen, batch)
    batches = build.train_batches(c, scorer, rows)

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, _ = train_step(state, frozen, next(batches))
        jax.block_until_ready(state)

    serve(run)


def epoch_peft(args: argparse.Namespace) -> None:
    """Serves the same rows in the same order through PEFT, padded to the longest of each batch."""
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification

    from jaxprompt.data.batching import TrainBatches

    c, backbone, scorer, rows = read_sst2(args)
    layout = dataclasses.replace(scorer.layout, batch=c.data.batch)
    plan = TrainBatches(rows.rows, rows.labels, layout, seed=c.seed, group=c.data.group)
    order = (batch.index[batch.index >= 0] for batch in plan)
    model = AutoModelForSequenceClassification.from_pretrained(backbone.folder, num_labels=2)
    setting = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=LENGTH)
    model = peft.get_peft_model(model, setting).train()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=c.optim.lr, weight_decay=0.0)
    texts = [torch.tensor(row.ids) for (row,) in rows.rows]
    pad = torch.nn.utils.rnn.pad_sequence

    def run(count: int) -> None:
        for _ in range(count):
            chosen = next(order)
            ids = pad([texts[i] for i in chosen], True, scorer.layout.pad_id)
            mask = pad([torch.ones_like(texts[i]) for i in chosen], True)
            labels = torch.tensor(rows.labels[chosen], dtype=torch.long)
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    serve(run)


def epoch(args: argparse.Namespace) -> None:
    """Times one epoch of SST-2 (batch 32) in parts that take turns, and the last part's rest."""
    rows = []
    for group in dict.fromkeys((1, args.group)):
        flags = ["--data", args.data, "--group", str(group)]
        with (
            worker(["epoch-ours", *flags], args.cores) as ours,
            worker(["epoch-peft", "--data", args.data, "--group", "1"], args.cores) as theirs,
        ):
            sides = (ours, theirs)
            warm = [ask(args.steps // 5) for ask in sides]
            pairs = [tuple(ask(args.steps) for ask in sides) for _ in range(args.parts)]
        assert warm
        times = [[side["seconds"] for side in pair] for pair in pairs]
        total = [sum(side) for side in zip(*times, strict=True)]
        own = {"steps": args.parts * args.steps, "ours s": total[0], "PEFT s": total[1]}
        median = statistics.median(a / b for a, b in times)
        rows.append({"data.group": group, **own, "ratio": median, "times": times})
    report(args, rows)


# -- compilation, start, bytes -------------------------------------------------------------------


def compile_time(args: argparse.Namespace) -> None:
    """Compiles a step at BERT-large shape from abstract arrays."""
    rows = []
    for kind in ("soft", "prefix"):
        for stack in ("scan", "unroll"):
            step, arguments = make_work("large", kind, stack, concrete=False)
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
    """Exports prompts of several shapes as `export` does and measures the tensor files."""
    import jax

    from jaxprompt.backbones import make_backbone
    from jaxprompt.convert.artifact import write_artifact
    from jaxprompt.convert.folder import read_config, resolve
    from jaxprompt.exported import pack_prompt
    from jaxprompt.heads.linear import Head
    from jaxprompt.model import Model
    from jaxprompt.prompts import make_prompt

    raise SystemExit(jax, make_backbone, write_artifact, read_config, resolve, pack_prompt, Head, Model, make_prompt)
