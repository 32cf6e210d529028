"""What the time of a step of BERT-base, 16 x 128 tokens, float32, is spent on: ours and PEFT's."""

import argparse
import gzip
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from launch.bench.models import LENGTH, hf_config, import_peft, make_model, make_work
from launch.bench.process import call, side

KINDS = (
    "projections, mlp", "attention products", "softmax, mask", "gelu", "norms", "dropout",
    "embedding", "scan", "rest",
)  # fmt: skip
_CONTAINERS = ("while", "call", "conditional")  # their bodies are on the trace too


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--kind", choices=("soft", "prefix"), help="one alone")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--names", action="store_true", help="a side lists the operations first")


def measure(args: argparse.Namespace) -> list[dict]:
    """Asks each side once."""
    rows = []
    for kind in [args.kind] if args.kind else ("soft", "prefix"):
        flags = {"kind": kind, "length": args.length, "reps": args.reps, "stack": args.stack}
        ours, theirs = (call(side("ops", name, **flags), args.cores) for name in SIDES)
        for name in ("all", *KINDS):
            row = {"method": kind, "work": name}
            for who, times in (("ours", ours), ("PEFT", theirs)):
                row[f"{who} ms"] = 1e3 * times[name]
                row[f"{who} share"] = times[name] / times["all"]
            rows.append(row)
    return rows


class Span(NamedTuple):
    """An operation on the trace of one thread, in microseconds."""

    start: float
    end: float
    name: str


# -- ours -----------------------------------------------------------------------------------------


def read_spans(folder: str) -> dict[int, list[Span]]:
    """Reads the operations of a trace that jax.profiler has written, by thread."""
    (path,) = Path(folder).rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    spans: dict[int, list[Span]] = {}
    for event in events:
        name = event.get("args", {}).get("hlo_op")
        if event.get("ph") == "X" and name and name.partition(".")[0] not in _CONTAINERS:
            span = Span(event["ts"], event["ts"] + event["dur"], name)
            spans.setdefault(event["tid"], []).append(span)
    return spans


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cuts the spans of a thread so that of nested ones the inner alone stands at each moment."""
    pieces: list[Span] = []
    stack: list[Span] = []
    now = 0.0

    def close(until: float) -> None:
        nonlocal now
        while stack and stack[-1].end <= until:
            top = stack.pop()
            pieces.append(Span(now, top.end, top.name))
            now = top.end

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        close(span.start)
        if stack:
            pieces.append(Span(now, span.start, stack[-1].name))
        stack.append(span)
        now = span.start
    close(float("inf"))
    return [piece for piece in pieces if piece.end > piece.start]


def share_time(threads: Iterable[Iterable[Span]]) -> Counter:
    """Divides every moment evenly among the operations that are under way. -> name -> us"""
    edges = []
    for spans in threads:
        for piece in innermost(spans):
            edges += [(piece.start, 1, piece.name), (piece.end, -1, piece.name)]
    active, spent, last = Counter(), Counter(), 0.0
    for moment, change, name in sorted(edges):
        running = sum(active.values())
        for other, count in active.items():
            if count:
                spent[other] += (moment - last) * count / running
        active[name] += change
        last = moment
    return spent


def read_sources(text: str) -> Callable[[str], tuple[str, str]]:
    """Reads where the operations of an HLO text come from. -> name -> (op_name, its frames)

    A text names the files and functions of a stack in tables ahead of the program.
    """
    table = lambda title: re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)[1].splitlines()
    names = lambda title: {n: v.strip('"') for n, _, v in (x.partition(" ") for x in table(title))}
    files, functions = names("FileNames"), names("FunctionNames")
    numbers = lambda line: dict(re.findall(r"(\w+)=(\d+)", line))
    places = {n: numbers(line) for n, line in names("FileLocations").items()}
    frames = {n: numbers(line) for n, line in names("StackFrames").items()}

    def unroll(number: str) -> str:
        calls = []
        while number in frames and len(calls) < 100:
            place = places[frames[number]["file_location_id"]]
            file = Path(files[place["file_name_id"]]).name
            calls.append(f"{file}:{functions[place['function_name_id']]}")
            number = str(int(frames[number]["parent_frame_id"]) - 1)  # 1 is that of no parent
        return " ".join(calls)

    pattern = r'^\s+(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"(?: stack_frame_id=(\d+))?'
    sources = {name: (op, frame) for name, op, frame in re.findall(pattern, text, re.M)}
    return lambda name: (
        (sources[name][0], unroll(sources[name][1])) if name in sources else ("", "")
    )


def our_kind(op: str, frames: str) -> str:
    """Returns what kind of work an operation of ours is, from its name and where it was written."""
    if op.endswith("dot_general"):
        return "attention products" if re.search(r"b[nt][tn][sd],bsnd", op) else "projections, mlp"
    if not op:
        return "scan"  # copies and zeroed buffers of the loop
    for file, kind in (("dropout.py", "dropout"), ("norm.py", "norms"), ("mlp.py", "gelu")):
        if f"{file}:" in frames:
            return kind
    if re.search(r"attention.py:(attend|_prob|softmax|_softmax)", frames):
        return "softmax, mask"
    if "embed.py:" in frames:
        return "embedding"
    layer_files = ("attention.py:", "linear.py:", "EncoderLayer")
    if "stack.py:" in frames and not any(part in frames for part in layer_files):
        return "scan"
    return "rest"


def measure_ours(args: argparse.Namespace) -> dict[str, float]:
    """Traces steps of ours. -> kind -> seconds of a step"""
    import jax

    model = make_model("base", args.kind, args.length, stack=args.stack)
    step, (state, frozen, batch) = make_work(model, 16)
    program = step.lower(state, frozen, batch).compile()

    def run(count: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(count):
            state, measured = program(state, frozen, batch)
            jax.block_until_ready(measured)
        return (time.perf_counter() - started) / count

    run(2)
    wall = run(args.reps)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            traced = run(args.reps)
        spans = read_spans(folder)
    sources, times = read_sources(program.as_text()), Counter()
    for name, spent in share_time(spans.values()).items():
        kind = our_kind(*sources(name))
        if args.names:
            print(f"{spent / args.reps / 1e3:9.2f} ms {kind:20} {name:35} {sources(name)}")
        times[kind] += spent
    covered = 1e-6 * sum(times.values()) / args.reps
    scale = wall / max(covered, 1e-9)
    return finish(times, 1e-6 * scale / args.reps, wall, covered / traced)


# -- PEFT's ---------------------------------------------------------------------------------------


def their_kind(names: list[str]) -> str:
    """Returns what kind of work an operation of torch is, from its name and those around it."""
    name, chain = names[0], " ".join(names).lower()
    if re.fullmatch(r"aten::(addmm|mm|linear)|mkl.*|mkldnn.*", name):
        return "projections, mlp"
    if re.fullmatch(r"aten::(bmm|baddbmm)", name):
        return "attention products"
    rules = (
        ("dropout|bernoulli|mulbackward", "dropout"), ("softmax", "softmax, mask"),
        ("gelu", "gelu"), ("layer_?norm", "norms"), ("embedding", "embedding"),
        ("scaled_dot_product", "softmax, mask"),
    )  # fmt: skip
    return next((kind for pattern, kind in rules if re.search(pattern, chain)), "rest")


def measure_peft(args: argparse.Namespace) -> dict[str, float]:
    """Profiles steps of PEFT's. -> kind -> seconds of a step"""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import BertConfig, BertForSequenceClassification

    peft = import_peft()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_labels=2, **hf_config("base")))
    make = {"soft": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[args.kind]
    setting = make(task_type="SEQ_CLS", num_virtual_tokens=args.length)
    model = peft.get_peft_model(model, setting).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    ids, labels = torch.randint(5, 30522, (16, 128)), torch.randint(0, 2, (16,))

    def run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - started) / count

    run(2)
    wall = run(args.reps)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        traced = run(args.reps)
    times, lines = Counter(), Counter()
    for event in trace.events():
        names, parent = [event.name], event.cpu_parent
        while parent is not None:
            names.append(parent.name)
            parent = parent.cpu_parent
        kind = their_kind(names)
        times[kind] += event.self_cpu_time_total
        lines[f"{kind:20} {' < '.join(names[:4])}"] += event.self_cpu_time_total
    for line, spent in lines.most_common(40 if args.names else 0):
        print(f"{spent / args.reps / 1e3:9.2f} ms {line}")
    covered = 1e-6 * sum(times.values()) / args.reps
    return finish(times, 1e-6 * wall / covered / args.reps, wall, covered / traced)


def finish(times: Counter, scale: float, wall: float, covered: float) -> dict[str, float]:
    """Scales the times of kinds to those of a step that nothing watches."""
    return {"all": wall, "covered": covered} | {kind: scale * times[kind] for kind in KINDS}


def answer_ours(args: argparse.Namespace) -> None:
    """Prints the seconds of ours."""
    print(json.dumps(measure_ours(args)))


def answer_peft(args: argparse.Namespace) -> None:
    """Prints the seconds of PEFT's."""
    print(json.dumps(measure_peft(args)))


SIDES = {"ours": answer_ours, "peft": answer_peft}
