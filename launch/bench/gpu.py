"""A train step on a GPU beside PEFT's: BERT-large, 128 tokens a row and a prompt of 20, bfloat16.

Ours, PEFT's with SDPA and PEFT's under torch.compile take turns, each in a process of its own that
has the GPU to itself; a side that fails is left out, and the exit code is 1. Both drop the same
share of hidden states, probabilities and pooled states. Share of peak is that of a large product,
measured first. GPU GiB is the most that arrays took: of PEFT's from the first step on, of ours from
the start of the process on. Without a GPU for both the exit code is 2. --dry-run runs all of it on
the CPU at a tiny shape, and tells nothing about speed. --backend is torch.compile's: on the CPU
inductor wants a C++ compiler, aot_eager does not.
"""

import argparse
import json
import math
import subprocess
import sys
import time

from launch.bench import process
from launch.bench.lm import draw_params
from launch.bench.models import (
    LENGTH,
    SHAPES,
    hf_config,
    make_batch,
    make_model,
    make_peft,
    make_work,
    time_steps,
)
from launch.bench.models import peak_gib as host_gib
from launch.bench.process import Result, side, summarise

TOKENS = 128  # of a row, beside the prompt
FULL = dict(shape="large", rows=16, rounds=3, reps=5, burst=20, device="cuda")
DRY = dict(shape="tiny", rows=2, rounds=1, reps=1, burst=2, device="cpu")
NO_GPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
FIELDS = {"ms": "ms", "GPU GiB": "gpu_peak_gib", "host GiB": "rss_peak_gib"}
VARIANTS = {"SDPA": {}, "compiled": {"compiled": True}}  # of PEFT's
NOTE = "dry run on the CPU at a tiny shape: these figures mean nothing"


# -- the GPU --------------------------------------------------------------------------------------


def find_jax(args: argparse.Namespace) -> None:
    """Prints whether JAX sees the device, its name, and the TFLOP/s of a product."""
    import jax

    facts = {"jax": True}
    try:
        facts["device"] = jax.devices(args.device)[0].device_kind
    except (RuntimeError, AssertionError):  # JAX's of a platform that it cannot start
        facts["jax"] = False
    if facts["jax"]:
        facts["product TFLOP/s"] = time_product(8192 if args.device == "cuda" else 256)
    print(json.dumps(facts))


def find_torch(args: argparse.Namespace) -> None:
    """Prints whether torch sees the device: apart from JAX, whose cuDNN may be another."""
    try:
        import torch
    except ImportError:
        print(json.dumps({"torch": False}))
        return
    print(json.dumps({"torch": args.device == "cpu" or torch.cuda.is_available()}))


def time_product(size: int, count: int = 20) -> float:
    """Returns the TFLOP/s of products of random bfloat16 matrices, the best of three runs.

    On ones a GPU draws less power and runs faster than on what a model multiplies.
    """
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (size, size)) * size**-0.5  # neither grows nor fades
    run = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: x @ y, x))
    x, seconds = x.astype(jnp.bfloat16), []
    run(x).block_until_ready()
    for _ in range(3):
        started = time.perf_counter()
        run(x).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2e-12 * size**3 * count / min(seconds)


def step_tflop(shape: str, kind: str, rows: int) -> float:
    """Counts a step's matrix products: a frozen weight has no gradient, attention has both."""
    c, keys = hf_config(shape), TOKENS + LENGTH
    width, tokens = c["hidden_size"], rows * (keys if kind == "soft" else TOKENS)
    layer = 2 * 24 * width**2 + 3 * 4 * keys * width
    return 1e-12 * tokens * c["num_hidden_layers"] * layer


# -- the sides ------------------------------------------------------------------------------------


def print_answer(seconds: list[float], loss: float, trained: int, peak: int | None) -> None:
    """Prints what a side found."""
    assert math.isfinite(loss), f"the loss is {loss}"
    gib = None if peak is None else peak / 2**30
    facts = {"ms": [1e3 * s for s in seconds], "loss": loss, "trained": trained}
    print(json.dumps(facts | {"rss_peak_gib": host_gib(), "gpu_peak_gib": gib}))


def time_ours(args: argparse.Namespace) -> None:
    """Times our step. The host draws the weights, so that the device's peak is that of steps."""
    import jax

    device = jax.devices(args.device)[0]  # or no GPU is there any more, and this says so
    model = make_model(
        args.shape, args.kind, stack=args.stack, dtype="bfloat16", dropout=args.dropout
    )
    params = draw_params(model, make_batch(model.prompt, args.rows))
    step, (state, frozen, batch) = make_work(model, args.rows, params=params)
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.trainable))
    now = (state, None)
    del params, state

    def run() -> None:
        nonlocal now
        now = step(now[0], frozen, batch)

    seconds = time_steps(run, lambda: jax.block_until_ready(now), args.reps, args.burst)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    print_answer(seconds, float(now[1]["loss"]), trained, peak)


def time_peft(args: argparse.Namespace) -> None:
    """Times PEFT's step, compiled or not."""
    import torch

    on_gpu, loss = args.device == "cuda", None
    model = make_peft(
        args.shape, args.kind, dropout=args.dropout, dtype="bfloat16", device=args.device
    )
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0, fused=on_gpu or None)
    forward = torch.compile(model, backend=args.backend) if args.compiled else model
    ids = torch.randint(5, 30522, (args.rows, TOKENS), device=args.device)
    labels = torch.randint(0, 2, (args.rows,), device=args.device)
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)

    def run() -> None:
        nonlocal loss
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # making the model took float32
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    seconds = time_steps(run, wait, args.reps, args.burst)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    print_answer(seconds, loss.item(), sum(p.numel() for p in weights), peak)


SIDES = {"find-jax": find_jax, "find-torch": find_torch, "ours": time_ours, "peft": time_peft}


# -- the table ------------------------------------------------------------------------------------


def take_turns(args: argparse.Namespace, kind: str, env: dict[str, str]) -> dict[str, list[dict]]:
    """Lets ours and both of PEFT's answer in turns; who fails once is left out."""
    names = ("device", "shape", "rows", "reps", "burst", "dropout", "backend")
    flags = {"kind": kind} | {name: getattr(args, name) for name in names}
    sides = {"ours": side("gpu", "ours", **flags, stack=args.stack)}
    sides |= {name: side("gpu", "peft", **flags, **VARIANTS[name]) for name in args.variants}
    answers = {name: [] for name in sides}
    for number in range(args.rounds):
        for name in list(answers):
            try:
                answer = process.call(sides[name], args.cores, **env)
            except subprocess.CalledProcessError as error:
                print(f"{kind} {name}: exit code {error.returncode}, left out", file=sys.stderr)
                del answers[name]
                continue
            answers[name].append(answer)
            times = " ".join(f"{ms:.3f}" for ms in answer["ms"])
            print(f"{kind} {name}, round {number + 1}: {times} ms", file=sys.stderr, flush=True)
    return answers


def make_rows(args: argparse.Namespace, kind: str, answers: dict, peak: float) -> list[dict]:
    """Makes a row of each of PEFT's variants that answered."""
    rows, method = [], {"method": kind}
    shape = {"rows": args.rows, "stack": args.stack, "dropout": args.dropout}
    for name in args.variants:
        if "ours" not in answers or name not in answers:
            continue
        rounds = [list(pair) for pair in zip(answers["ours"], answers[name], strict=True)]
        medians = summarise(rounds, FIELDS)
        rates = {}
        for who in ("ours", "PEFT"):
            rate = 1e3 * step_tflop(args.shape, kind, args.rows) / medians[f"{who} ms"]
            rates |= {f"{who} TFLOP/s": rate, f"{who} share of peak": rate / peak}
        each = lambda field, rounds=rounds: [[one[field] for one in pair] for pair in rounds]
        every = {f"every {field}": each(field) for field in rounds[0][0]}
        rows.append(method | {"PEFT": name} | shape | medians | rates | every)
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case; those of a dry run have small defaults."""
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=("soft", "prefix"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--reps", type=int, help="timed bursts of a round")
    parser.add_argument("--burst", type=int, help="steps that are asked for at once")
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="of a side")
    parser.add_argument("--shape", choices=SHAPES, help="of a side")
    parser.add_argument("--kind", help="of a side")
    parser.add_argument("--compiled", action="store_true", help="of a side")
    parser.set_defaults(rounds=None)


def measure(args: argparse.Namespace) -> Result:
    """Lets the sides take turns. Exits with 2 where there is no GPU for both."""
    for name, value in (DRY if args.dry_run else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    env = NO_GPU if args.dry_run else {}
    facts = {}
    for name in ("find-torch", "find-jax"):
        facts |= process.call(side("gpu", name, device=args.device), args.cores, **env)
    if not (facts["jax"] and facts["torch"]):
        print(f"no GPU for both: jax {facts['jax']}, torch {facts['torch']}", file=sys.stderr)
        sys.exit(2)
    if args.dry_run:
        print(NOTE)
    rows, failed = [], False
    for kind in args.kinds or ("soft", "prefix"):
        answers = take_turns(args, kind, env)
        failed |= len(answers) <= len(args.variants)
        rows += make_rows(args, kind, answers, facts["product TFLOP/s"])
    return Result(rows, {"dry_run": args.dry_run, **facts}, failed)
