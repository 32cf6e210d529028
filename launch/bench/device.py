"""Speed of real steps at published sizes on the attached devices, and of PEFT's.

Weights are random, and made on the device from shapes alone: nothing is downloaded. CASES lists the
cases by importance: train steps, grids and runs one after another, scores, and texts. The cases of
a library share a process. A case that fails, runs out of memory, exceeds its time or ends the
process loses only itself: its line has the error, and the exit code is 1. Every line of --output is
the JSON object of a case, written when the case ends; the same name with .md has a table. FLOPs are
those that the work needs: causal attention counts half, what is computed twice counts once. Their
shares are those of the peak in the data sheet and of a large bfloat16 product, measured first.
--tiny runs everything on the CPU at tiny shapes, and says nothing about speed.
"""

import argparse
import functools
import gc
import json
import math
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.errors import InputError, check_known
from launch.bench.models import import_peft
from launch.bench.process import Result, environment, pinned, side


class Case(NamedTuple):
    """A step to be timed."""

    kind: str  # product, train, gridN, turnsN, scores, writeBxN (B beams, N tokens), peft
    config: str = ""
    fields: dict[str, Any] = {}  # noqa: RUF012 (nobody changes them)
    library: str = "jax"


# -- the cases ------------------------------------------------------------------------------------

BASE, XL, XXL = "configs/base.py", "configs/ppt/t5_xl.py:boolq,pt", "configs/ppt/t5_xxl.py:boolq,pt"
SCAN, UNROLL = {"backbone.stack": "scan"}, {"backbone.stack": "unroll"}
HALF = {"backbone.dtype": "bfloat16", "backbone.dropout": 0}
BERT = HALF | {
    "backbone.path": "google-bert/bert-large-uncased", "prompt.length": 20, "prompt.dropout": 0,
    "data.batch": 32, "data.max_len": 128,
}  # fmt: skip
LLAMA = HALF | {"backbone.path": "meta-llama/Llama-2-7b-hf", "prompt.length": 20}
LONG_LLAMA = LLAMA | {"prompt.dropout": 0, "data.batch": 8, "data.max_len": 2048}
TEXTS = LLAMA | {  # 8 texts of 512 tokens are continued; the target of training has 64 more
    "prompt.name": "soft", "data.eval_batch": 8, "data.max_len": 592, "head.name": "text",
    "task.name": "custom", "task.fields": "text", "task.target": "target",
    "task.template": "{text}",
} | UNROLL  # fmt: skip
LLAMA31 = LONG_LLAMA | {
    "backbone.path": "meta-llama/Llama-3.1-8B", "backbone.remat": "full",
    "data.batch": 1, "data.max_len": 16384,
}  # fmt: skip
MESHES = {f"{data}x{model}": {"mesh.data": data, "mesh.model": model} for data, model in
          ((2, 1), (1, 2))}  # fmt: skip
CASES = {
    "product": Case("product"),
    "bert-large": Case("train", BASE, BERT | SCAN),
    "bert-large-unroll": Case("train", BASE, BERT | UNROLL),
    "t5-xl": Case("train", XL, HALF | SCAN),
    "t5-xl-unroll": Case("train", XL, HALF | UNROLL),
    "llama-2-7b": Case("train", BASE, LONG_LLAMA | SCAN),
    "llama-2-7b-unroll": Case("train", BASE, LONG_LLAMA | UNROLL),
    "bert-large-grid8": Case("grid8", BASE, BERT | SCAN),
    "bert-large-turns8": Case("turns8", BASE, BERT | SCAN),
    "llama-2-7b-greedy": Case("write1x64", BASE, TEXTS),
    "llama-2-7b-beams": Case("write4x64", BASE, TEXTS),
    "llama-2-7b-int8": Case("write1x64", BASE, TEXTS | {"backbone.quantize": "int8"}),
    "t5-xxl": Case("train", XXL, HALF | SCAN),
    "llama-3.1-8b-16k": Case("train", BASE, LLAMA31 | SCAN),
    "peft-bert-large": Case("peft", BASE, BERT, "torch"),
    "peft-bert-large-compiled": Case("peft-compiled", BASE, BERT, "torch"),
    "peft-t5-xl-compiled": Case("peft-compiled", XL, HALF, "torch"),
    "t5-xxl-unroll": Case("train", XXL, HALF | UNROLL),
    "t5-xl-scores": Case("scores", XL, HALF | SCAN),
    **{f"bert-large-{x}": Case("train", BASE, BERT | SCAN | mesh) for x, mesh in MESHES.items()},
    **{f"t5-xl-{x}": Case("train", XL, HALF | SCAN | mesh) for x, mesh in MESHES.items()},
}

# Nothing is measured on these.
TINY_FIELDS = {"data.batch": 2, "data.eval_batch": 2, "data.max_len": 64, "data.max_target": 8,
               "prompt.length": 4}  # fmt: skip
TINY_SHAPES = {
    "bert": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    ),
    "t5": dict(d_model=64, num_layers=2, num_heads=4, d_kv=16, d_ff=128, vocab_size=1024),
    "llama": dict(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=1024,
    ),
}  # fmt: skip
COLUMNS = {  # of the table: how its values are printed
    "case": "", "mesh": "", "shape": "", "ms": ".2f", "tokens/s": ",.0f", "needed TFLOP": ".2f",
    "share of peak": ".1%", "share of product": ".1%", "GiB": ".1f", "compile s": ".1f",
}  # fmt: skip
_LEAST_SECONDS = 10  # of a session, to start another case


class SkippedCase(Exception):
    """A case that this machine cannot run."""


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {', '.join(CASES)}")
    parser.add_argument("--limit", type=float, default=600, help="seconds of all cases (600)")
    parser.add_argument("--case-limit", type=float, default=120, help="seconds of a case (120)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of every case"
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--product", type=float, help="TFLOP/s of a product, to a side")


# -- processes ------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> Result:
    """Measures cases, and writes a line and the table after each."""
    for name in args.cases:
        check_known("the case", name, CASES)
    check_fields(args.set)
    names = ["product", *(name for name in args.cases or CASES if name != "product")]
    session = Session(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the process of a case ends too
    while names:
        library = CASES[names[0]].library
        count = next((i for i, x in enumerate(names) if CASES[x].library != library), len(names))
        session.run(library, names[:count])
        names = names[count:]
    print(session.table())
    return Result([], failed=any("error" in row for row in session.rows))


def check_fields(words: Iterable[str]) -> dict[str, str]:
    """Returns the fields of FIELD=VALUE. Raises InputError for another word."""
    pairs = [word.partition("=") for word in words]
    if wrong := next((name for name, equals, _ in pairs if not equals), None):
        raise InputError(f"--set={wrong} must be FIELD=VALUE, as in data.batch=8")
    return {name: value for name, _, value in pairs}


class Session:
    """Runs cases in processes of their library and records the results."""

    def __init__(self, args: argparse.Namespace):
        """Starts the time limit."""
        self.args, self.rows, self.product = args, [], args.product
        self.path, self.end = Path(args.output), time.monotonic() + args.limit
        for path in (self.path, self.path.with_suffix(".log")):
            path.write_text("")

    def run(self, library: str, names: list[str]) -> None:
        """Runs cases of one library; after a case that ends the process, the rest in another."""
        names = list(names)
        while names:
            if self.end - time.monotonic() < _LEAST_SECONDS:
                message = f"the session's {self.args.limit:g} s are over"
                for name in names:
                    self.record({"case": name, "skipped": message})
                return
            with CaseProcess(self, library, names) as process:
                while names:
                    row = process.next_row(names[0])
                    self.record(row)
                    names.pop(0)
                    if row.get("ended"):
                        break

    def record(self, row: dict[str, Any]) -> None:
        """Appends a result to the files."""
        if row["case"] == "product" and "skipped" in row:
            raise InputError(row["skipped"])
        self.rows.append(row)
        if row["case"] == "product" and "TFLOP/s" in row:
            self.product = row["TFLOP/s"]
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.path.with_suffix(".md").write_text(self.table() + "\n")
        short = {name: row[name] for name in ("ms", "error", "skipped") if name in row}
        print(f"{row['case']}: {json.dumps(short)}", file=sys.stderr, flush=True)

    def table(self) -> str:
        """Returns a Markdown table of the results so far."""
        facts = next((row for row in self.rows if "device" in row), {})
        lines = [
            f"{facts.get('devices', 0)} x {facts.get('device', 'no device')}, "
            f"JAX {facts.get('jax', '')}",
            "",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
        ]
        for row in self.rows:
            cells = [format_cell(row.get(name), how) for name, how in COLUMNS.items()]
            if message := row.get("error") or row.get("skipped"):
                kind = "failed" if "error" in row else "skipped"
                cells[3] = f"{kind}: {message.partition(chr(10))[0][:80]}".replace("|", "/")
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def format_cell(value: Any, how: str) -> str:
    """Formats a value of the table; None is an empty cell."""
    return "" if value is None else format(value, how)


class CaseProcess:
    """A process that measures cases one after another and prints a line for each."""

    def __init__(self, session: Session, library: str, names: list[str]):
        """Starts it."""
        args = session.args
        self._session, self._lines = session, queue.Queue()
        flags = {"tiny": args.tiny, "product": session.product}
        command = [*side("device", library, **flags), *(f"--set={word}" for word in args.set)]
        self._log = session.path.with_suffix(".log").open("a")
        self._process = subprocess.Popen(
            pinned([*command, *names], args.cores),
            env=environment(args.cores) | case_environment(library, tiny=args.tiny),
            stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True,  # torch.compile starts processes, which end with it
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith('{"case"'):  # libraries print too
                    self._lines.put(json.loads(line))
        self._lines.put(None)

    def next_row(self, name: str) -> dict[str, Any]:
        """Waits for the result of a case; "ended" says that the process measures no more."""
        session = self._session
        seconds = min(session.args.case_limit, session.end - time.monotonic())
        try:
            row = self._lines.get(timeout=max(0, seconds))
        except queue.Empty:
            return {"case": name, "error": f"no result within {seconds:.0f} s", "ended": True}
        if row is None:
            lines = session.path.with_suffix(".log").read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")[:200]
            message = f"the process ended with {self._process.wait()}: {last}"
            return {"case": name, "error": message, "ended": True}
        return row

    def __enter__(self) -> "CaseProcess":
        """Returns the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it and all that it started."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._log.close()


def case_environment(library: str, *, tiny: bool) -> dict[str, str]:
    """Makes the variables of a process."""
    # One block of memory, which many programs of different sizes do not fragment. Weights in a
    # cache of the hub would replace the published shapes.
    variables = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "HF_HUB_CACHE": os.devnull,
    }  # fmt: skip
    if tiny:
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        variables |= {"CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    if library == "torch":  # which has the GPU to itself
        variables |= {"JAX_PLATFORMS": "cpu"}
    return variables


def answer(measure_case: Callable[[Case, argparse.Namespace], dict], args: argparse.Namespace):
    """Measures cases and prints a line for each."""
    if args.tiny:
        shrink_checkpoints()
    for name in args.cases:
        print(json.dumps(guarded(name, measure_case, args)), flush=True)
        gc.collect()


def guarded(
    name: str, measure_case: Callable[[Case, argparse.Namespace], dict], args: argparse.Namespace
) -> dict[str, Any]:
    """Measures a case. Returns its row, which has "error" if it raised an exception."""
    started, case = time.perf_counter(), CASES[name]
    fields = case.fields | check_fields(args.set) | (TINY_FIELDS if args.tiny else {})
    fields = {"mesh.data": 1, "mesh.model": 1} | fields if case.config else {}
    case = case._replace(fields=fields)
    row = {"case": name, "kind": case.kind, "config": case.config, "fields": fields}
    try:
        row |= measure_case(case, args)
    except SkippedCase as reason:
        row["skipped"] = str(reason)
    except Exception as error:  # whatever it is, the other cases are measured
        row["error"] = f"{type(error).__name__}: {error}"[:1000]
    return row | {"all s": round(time.perf_counter() - started, 1)}


def shrink_checkpoints() -> None:
    """Replaces the published shapes by tiny ones, in this process."""
    from jaxprompt.planning.published import published_checkpoints

    checkpoints = published_checkpoints()  # the cached dict that a run is opened with
    for name, checkpoint in checkpoints.items():
        tiny = TINY_SHAPES.get(checkpoint.hf["model_type"], {})
        checkpoints[name] = checkpoint._replace(hf=checkpoint.hf | tiny)


# -- both libraries -------------------------------------------------------------------------------


def load_case(case: Case):
    """Loads the config of a case."""
    from jaxprompt.config.load import load_config

    return load_config(case.config, [(name, str(value)) for name, value in case.fields.items()])


def time_calls(
    call: Callable[[], Any], wait: Callable[[Any], Any], *, seconds: float, rounds: int = 3
) -> list[float]:
    """Returns the seconds of a call in each round; a round takes about `seconds`, or one call."""
    wait(call())  # the first one loads the program
    started = time.perf_counter()
    wait(call())
    once = time.perf_counter() - started
    count, times = max(1, min(100, round(seconds / once))), []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(count):
            result = call()
        wait(result)
        times.append((time.perf_counter() - started) / count)
    return times


def make_row(
    times: list[float], flops: float, tokens: int, *, device: str, dtype: str, product, count=1
) -> dict[str, Any]:
    """Returns what the times of a case say.

    Args:
      times: seconds of a call, of each round.
      flops: FLOPs that a call needs.
      tokens: tokens that a call processes or generates.
      device: what its library calls the device.
      dtype: dtype of the products.
      product: TFLOP/s of a large product, None if it was not measured.
      count: number of devices.
    """
    from jaxprompt.parallel.devices import find_device

    seconds, sheet = statistics.median(times), find_device(device)
    share = lambda peak: flops / seconds / (count * peak) if peak else None
    return {
        "ms": 1e3 * seconds, "every ms": [1e3 * x for x in times],
        "tokens/s": tokens / seconds if tokens else None,
        "needed TFLOP": 1e-12 * flops, "share of peak": share(sheet and sheet.peak(dtype)),
        "share of product": share(product and 1e12 * product),
    }  # fmt: skip


def needed_flops(case: Case, numbers: list[int]) -> float:
    """Counts the FLOPs that the work of a case needs."""
    changed = {"stack": "scan", "attention": "einsum", "remat": "none", "quantize": "none"}
    fields = case.fields | {f"backbone.{name}": value for name, value in changed.items()}
    fields |= {"mesh.data": 1, "mesh.model": 1}
    kind = re.match("[a-z]+", case.kind)[0]
    if kind in ("scores", "write"):
        return _evaluation_flops(case.config, tuple(fields.items()), *numbers)
    return (numbers[0] if numbers else 1) * _train_flops(case.config, tuple(fields.items()))


@functools.cache
def _train_flops(config: str, fields: tuple) -> float:
    from jaxprompt.parallel.flops import count_flops
    from jaxprompt.planning.cost import step_shapes

    run, placement = open_case(Case("train", config, dict(fields)))
    shapes = step_shapes(run, placement, as_it_runs=True)
    return count_flops(shapes.step, *shapes[1:]) - 3 * unneeded_flops(run, run.batch)


@functools.cache
def _evaluation_flops(config: str, fields: tuple, beams: int = 0, tokens: int = 0) -> float:
    from jaxprompt.parallel.flops import count_flops
    from jaxprompt.planning.cost import eval_shapes

    run, placement = open_case(Case("scores", config, dict(fields)))
    shapes = eval_shapes(run, placement, as_it_runs=True)
    step = evaluation_step(shapes.model, placement, beams, tokens)
    flops = count_flops(step, *shapes[1:], while_steps=max(0, tokens - 1))
    return flops - unneeded_flops(run, run.eval_batch)


def unneeded_flops(run, batch) -> float:
    """Counts the FLOPs of causal attention above the diagonal, in a forward pass.

    The last layer has few queries, those that the head reads.
    """
    module, (rows, length) = run.backbone.module, batch.encoder.ids.shape
    # Half of two products. The heads of `dims` are those of keys.
    square = 2 * rows * length**2 * module.cfg.heads * module.dims.head_dim
    return square * (module.dims.layers - 1) if module.STYLE == "causal" else 0


# -- ours -----------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A compiled step with its arguments."""

    compiled: Any
    seconds: float  # to trace and compile
    call: Callable[[], Any]  # runs it, and returns arrays to wait for
    loss: Callable[[], float | None] = lambda: None


def measure_ours(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Measures a case of ours."""
    import jax

    device = jax.devices()[0]
    jax.clear_caches()
    if device.platform == "cpu" and not args.tiny:
        raise SkippedCase("JAX sees no GPU and no TPU; --tiny tries the cases on the CPU")
    if case.kind == "product":
        size = 256 if args.tiny else 8192
        args.product = time_product(size)
        flops, peak = 2 * size**3, 1e12 * args.product
        row = make_row(
            [flops / peak], flops, 0,
            device=device.device_kind, dtype="bfloat16", product=args.product,
        )  # fmt: skip
        facts = {"device": device.device_kind, "devices": jax.device_count()}
        facts |= {"jax": jax.__version__, "TFLOP/s": args.product}
        return facts | row | {"shape": f"{size} x {size}"}
    run, placement = open_case(case)
    name, *numbers = re.fullmatch(r"([a-z]+)(\d*)x?(\d*)", case.kind).groups()
    numbers = [int(number) for number in numbers if number]
    batch = run.eval_batch if name in ("scores", "write") else run.batch
    program = {
        "train": compile_train, "turns": compile_train, "grid": compile_grid,
        "scores": compile_evaluation, "write": compile_evaluation,
    }[name](run, placement, *numbers)  # fmt: skip
    times = time_calls(program.call, jax.block_until_ready, seconds=0.05 if args.tiny else 0.5)
    rows, length = batch.encoder.ids.shape
    runs = numbers[0] if name in ("turns", "grid") else 1
    tokens = rows * numbers[1] if name == "write" else runs * rows * length
    mesh, loss = placement.mesh.devices, program.loss()
    row = make_row(
        times, needed_flops(case, numbers), tokens, device=device.device_kind,
        dtype=run.config.backbone.dtype, product=args.product, count=mesh.size,
    )  # fmt: skip
    shape = f"{rows} x {length}" + (f" + {numbers[1]}" if name == "write" else "")
    shape = f"{runs} x {shape}" if runs > 1 else shape
    memory, text = program.compiled.memory_analysis(), program.compiled.as_text()
    row |= {"GiB": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30}
    row |= {"ms/token": row["ms"] / numbers[1]} if name == "write" else {}
    row |= {"loss": loss if math.isfinite(loss) else str(loss)} if loss is not None else {}
    return row | {
        "mesh": " x ".join(map(str, mesh.shape)), "shape": shape, "compile s": program.seconds,
        "cudnn attention": "cudnn$fmha" in text,
    }  # fmt: skip


def time_product(size: int, count: int = 20) -> float:
    """Returns the TFLOP/s of products of random bfloat16 matrices, the best of three rounds.

    On ones a GPU draws less power and runs faster than on what a model multiplies.
    """
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (size, size)) * size**-0.5  # neither grows nor fades
    run = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: x @ y, x))
    x = x.astype(jnp.bfloat16)
    times = time_calls(lambda: run(x), jax.block_until_ready, seconds=0)
    return 2e-12 * size**3 * count / min(times)


def open_case(case: Case):
    """Opens the run of a case on its mesh. Raises SkippedCase where devices are missing."""
    import jax

    from jaxprompt.parallel.sharding import make_placement
    from jaxprompt.planning.abstract_run import open_run

    config = load_case(case)
    data, model = config.mesh.data, config.mesh.model
    if (needed := data * model) > jax.device_count():
        raise SkippedCase(f"a mesh of {data} x {model} needs {needed} devices")
    return open_run(config), make_placement(data, model, devices=jax.devices()[:needed])


def random_arrays(shapes: Any) -> Any:
    """Makes arrays for a tree of shapes with shardings, each leaf where it lies."""
    import jax
    import numpy as np

    def make(path, leaf):
        name = jax.tree_util.keystr(path)
        init = _initializer(leaf.shape, leaf.dtype, leaf.sharding, fill_value(name))
        return init(np.uint32(zlib.crc32(name.encode())))

    return jax.block_until_ready(jax.tree_util.tree_map_with_path(make, shapes))


def fill_value(path: str) -> float | None:
    """Returns the constant of a leaf, e.g. "['norm/scale'][3]"; None if its values are random."""
    from jaxprompt.tree import PLANE

    name = "/".join(word for word in re.findall(r"[\w/]+", path) if not word.isdigit())
    if PLANE.search(name):  # small weights, of 8-bit codes
        return {"scale": 2e-4, "minimum": -2.5e-2}.get(name.rpartition("/")[2])
    return 1.0 if name.endswith("/scale") else None


@functools.cache
def _initializer(shape: tuple, dtype: Any, sharding: Any, value: float | None):
    import jax
    import jax.numpy as jnp

    def init(seed):
        key = jax.random.key(seed, impl="rbg")  # of little memory
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.bits(key, shape, f"uint{8 * dtype.itemsize}").astype(dtype)
        if value is not None:
            return jnp.full(shape, value, dtype)
        width = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
        return (0.02 * jax.random.normal(key, shape, width)).astype(dtype)

    return jax.jit(init, out_shardings=sharding)


def make_states(run, placement, shapes, count: int) -> tuple[Any, list]:
    """Returns the optimizer and initial states of runs."""
    from jaxprompt import rng
    from jaxprompt.build.optimizer import build_optimizer, config_milestones
    from jaxprompt.training.state import place_state

    config, states = run.config, []
    for number in range(count):
        trainable = random_arrays(shapes.state.trainable)
        tx = build_optimizer(config, trainable, config_milestones(config, 1000), 1000)
        key = rng.key_for(number, "dropout", config.rng)
        states.append(place_state(placement, trainable, tx, key, donate=True))
    return tx, states


def compile_train(run, placement, count: int = 1) -> Program:
    """Compiles a train step of `count` runs, one after another."""
    import jax

    from jaxprompt.parallel.compilation import jit
    from jaxprompt.planning.cost import step_shapes

    shapes = step_shapes(run, placement, as_it_runs=True)
    shardings = jax.tree.map(lambda x: x.sharding, shapes.state), placement.replicated
    started = time.perf_counter()
    step = jit(shapes.step, donate_argnums=0, out_shardings=shardings)
    compiled = step.lower(*shapes[1:]).compile()
    seconds, metrics = time.perf_counter() - started, {}
    frozen = random_arrays(shapes.frozen)
    batch = jax.device_put(run.batch, placement.batch)
    _, states = make_states(run, placement, shapes, count)

    def call():
        nonlocal metrics
        for index, state in enumerate(states):
            states[index], metrics = compiled(state, frozen, batch)
        return states

    return Program(compiled, seconds, call, lambda: float(metrics["loss"]))


def compile_grid(run, placement, count: int) -> Program:
    """Compiles a step of several runs as one program."""
    import jax
    import numpy as np

    from jaxprompt.planning.cost import step_shapes
    from jaxprompt.runs.grid.batched_steps import PerRun, Programs

    shapes = step_shapes(run, placement, as_it_runs=True)
    frozen = random_arrays(shapes.frozen)
    tx, states = make_states(run, placement, shapes, count)
    programs = Programs(placement, run.model, tx, run.objectives, frozen, states[0])
    stacked = jax.tree.map(lambda x: np.broadcast_to(x, (count, *np.shape(x))), run.batch)
    batch = programs.put_batch(stacked, count)
    per_run = programs.put_per_run([PerRun({}, {})] * count)
    state, metrics, started = programs.stack(states), {}, time.perf_counter()
    compiled = programs.compile(state, batch, per_run)
    seconds = time.perf_counter() - started

    def call():
        nonlocal state, metrics
        state, metrics = compiled(state, frozen, batch, per_run)
        return state

    return Program(compiled, seconds, call, lambda: float(metrics["loss"].mean()))


def evaluation_step(model, placement, beams: int = 0, tokens: int = 0) -> Callable:
    """Returns the step that scores a batch, or that continues it by so many tokens."""
    from jaxprompt.parallel.sharding import with_placement
    from jaxprompt.training.steps import make_eval_step, make_generate_step

    if not tokens:
        return with_placement(placement, make_eval_step(model))
    never = model.backbone.dims.vocab  # no token ends a text: all rows get all tokens
    settings = dict(max_new_tokens=tokens, num_beams=beams, eos=never, pad=0)
    return with_placement(placement, make_generate_step(model, **settings))


def compile_evaluation(run, placement, beams: int = 0, tokens: int = 0) -> Program:
    """Compiles the evaluation of a batch."""
    import jax

    from jaxprompt.planning.cost import eval_shapes

    shapes = eval_shapes(run, placement, as_it_runs=True)
    started = time.perf_counter()
    step = jax.jit(evaluation_step(shapes.model, placement, beams, tokens))
    compiled = step.lower(*shapes[1:]).compile()
    seconds = time.perf_counter() - started
    arguments = random_arrays(shapes.trainable), random_arrays(shapes.frozen)
    batch = jax.device_put(run.eval_batch, placement.batch)
    return Program(compiled, seconds, lambda: compiled(*arguments, batch))


# -- PEFT's ---------------------------------------------------------------------------------------


def measure_peft(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Measures PEFT's train step with SDPA, as it is or under torch.compile."""
    try:
        import peft  # noqa: F401
        import torch
    except ImportError as error:
        raise SkippedCase(f"{error.name} is not installed") from error
    on_gpu = not args.tiny
    if on_gpu and not torch.cuda.is_available():
        raise SkippedCase("torch sees no GPU")
    config, device = load_case(case), "cuda" if on_gpu else "cpu"
    model = make_torch_model(config, device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0, fused=on_gpu or None)
    if case.kind == "peft-compiled":  # inductor on a CPU compiles C++, for most of a minute
        forward = torch.compile(model, backend="inductor" if on_gpu else "aot_eager")
    else:
        forward = model
    batch, loss = torch_batch(config, device), None

    def call():
        nonlocal loss
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    wait = (lambda _: torch.cuda.synchronize()) if on_gpu else (lambda _: None)
    started = time.perf_counter()
    wait(call())
    compile_seconds = time.perf_counter() - started
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = time_calls(call, wait, seconds=0.5 if on_gpu else 0.05)
    rows, length = config.data.batch, config.data.max_len
    kind = torch.cuda.get_device_name() if on_gpu else "cpu"
    row = make_row(
        times, needed_flops(case, []), rows * length,
        device=kind, dtype=config.backbone.dtype, product=args.product,
    )  # fmt: skip
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    row |= {"shape": f"{rows} x {length}", "GiB": gib, "compile s": compile_seconds}
    return row | {"mesh": "1 x 1", "loss": loss.item(), "torch": torch.__version__}


def make_torch_model(config, device: str):
    """Makes the model of a config with its prompt in PEFT, of random weights."""
    import torch
    import transformers

    from jaxprompt.planning.published import published_checkpoints

    peft = import_peft()
    hf = dict(published_checkpoints()[config.backbone.path].hf)
    is_t5, rate = hf["model_type"] == "t5", config.backbone.dropout or 0.0
    names = ("dropout_rate",) if is_t5 else ("hidden_dropout_prob", "attention_probs_dropout_prob")
    hf |= dict.fromkeys(names, rate)
    # Left to itself a classifier finds the problem's type in the first step, and compiles again.
    more = {} if is_t5 else {"num_labels": 2, "problem_type": "single_label_classification"}
    hf_config = transformers.AutoConfig.for_model(**hf, **more)
    auto = "Seq2SeqLM" if is_t5 else "SequenceClassification"
    torch.manual_seed(0)
    with torch.device(device):
        make = getattr(transformers, f"AutoModelFor{auto}").from_config
        model = make(hf_config, dtype=getattr(torch, config.backbone.dtype))
    settings = {"soft": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    task = "SEQ_2_SEQ_LM" if is_t5 else "SEQ_CLS"
    setting = settings[config.prompt.name](
        task_type=task, num_virtual_tokens=config.prompt.get("length")
    )
    return peft.get_peft_model(model, setting).to(device).train()


def torch_batch(config, device: str) -> dict[str, Any]:
    """Makes a batch of full rows; soft tokens are part of their length, as in ours."""
    import torch

    from jaxprompt.planning.published import published_checkpoints

    hf = published_checkpoints()[config.backbone.path].hf
    length = config.data.max_len - config.prompt.get("length") * (config.prompt.name == "soft")
    ids = torch.randint(5, hf["vocab_size"], (config.data.batch, length), device=device)
    shape = (config.data.batch, 2) if hf["model_type"] == "t5" else (config.data.batch,)
    labels = torch.randint(0, 2, shape, device=device)
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


def answer_ours(args: argparse.Namespace) -> None:
    """Measures cases of ours."""
    from jaxprompt.parallel.libtpu import set_flags

    set_flags()  # as every command does
    answer(measure_ours, args)


def answer_peft(args: argparse.Namespace) -> None:
    """Measures cases of PEFT's."""
    answer(measure_peft, args)


SIDES = {"jax": answer_ours, "torch": answer_peft}
