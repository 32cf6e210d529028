"""Memory that `plan` gives beside the peak of real steps, float32 on the CPU."""

import argparse
import json
import re
from pathlib import Path

from launch.bench.process import call, side

# Shapes of published models; batches so large that activations take most of the memory.
CASES = {
    "electra-small soft": ("google/electra-small-discriminator", "soft", 64, 128),
    "electra-small prefix": ("google/electra-small-discriminator", "prefix", 64, 128),
    "bert-base soft": ("google-bert/bert-base-uncased", "soft", 16, 128),
    "t5-small soft": ("google/t5-v1_1-small", "soft", 16, 256),
    "gpt2 prefix": ("openai-community/gpt2", "prefix", 8, 256),
}


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--case", choices=CASES, help="one alone")


def measure(args: argparse.Namespace) -> list[dict]:
    """Compares each in a process of its own."""
    rows = []
    for case in [args.case] if args.case else CASES:
        model, method, batch, length = CASES[case]
        answer = call(side("plan", "compare", case=case), args.cores)
        sizes = {f"{name} MiB": round(answer[name] / 2**20) for name in answer}
        row = {"model": model, "method": method, "batch": f"{batch} x {length}", **sizes}
        rows.append(row | {"planned / measured": answer["planned"] / answer["measured"]})
    return rows


def make_config(case: str, **changes):
    """Makes the config of a case."""
    from configs.base import get_config
    from configs.parts import methods
    from jaxprompt.config.load import to_run_config

    name, method, batch, length = CASES[case]
    c = get_config()
    getattr(methods, method)(c)
    c.backbone.path, c.backbone.dropout = name, 0.0
    c.data.batch, c.data.max_len = batch, length
    for field, value in changes.items():
        block, name = field.split("__")
        c[block][name] = value
    return to_run_config(c)


def resident(field: str) -> int:
    """Reads VmRSS (now) or VmHWM (the peak) of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


def compare(case: str, steps: int = 2) -> dict[str, float]:
    """Plans a case on one CPU device, then runs its steps. -> bytes of both"""
    import jax
    import jax.numpy as jnp

    from jaxprompt.parallel.compilation import jit
    from jaxprompt.parallel.sharding import make_placement
    from jaxprompt.planning.abstract_run import open_run
    from jaxprompt.planning.cost import measure_step as measure_cost
    from jaxprompt.planning.cost import step_shapes

    run = open_run(make_config(case))
    placement = make_placement(devices=jax.devices()[:1])
    shapes = step_shapes(run, placement)
    cost = measure_cost(run, shapes, placement)
    # Compiled before anything is measured: the compiler takes memory of its own.
    step = jit(shapes.step, donate_argnums=0).lower(*shapes[1:]).compile()
    full = lambda x: jnp.full(x.shape, 1e-2, x.dtype)
    fill = jax.jit(lambda: jax.tree.map(full, shapes[1:3])).lower().compile()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    state, frozen = fill()
    batch = jax.device_put(run.batch)
    for _ in range(steps):
        state, measured = step(state, frozen, batch)
    jax.block_until_ready((state, measured))
    return {"planned": cost.bytes, "measured": resident("VmHWM") - before,
            "activations": cost.activations}  # fmt: skip


def answer(args: argparse.Namespace) -> None:
    """Compares one."""
    print(json.dumps(compare(args.case)))


SIDES = {"compare": answer}
