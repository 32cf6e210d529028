"""The process in which launch/bench.py compares a plan's memory with that of real train steps.

usage: python launch/bench_plan.py CASE; the answer is JSON on stdout.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Shapes of published models; batches so large that activations take most of the memory.
CASES = {
    "electra-small soft": ("google/electra-small-discriminator", "soft", 64, 128),
    "electra-small prefix": ("google/electra-small-discriminator", "prefix", 64, 128),
    "bert-base soft": ("google-bert/bert-base-uncased", "soft", 16, 128),
    "t5-small soft": ("google/t5-v1_1-small", "soft", 16, 256),
    "gpt2 prefix": ("openai-community/gpt2", "prefix", 8, 256),
}


def make_config(case: str, **changes):
    """Makes the config of a case."""
    from configs.base import get_config
    from configs.parts import methods

    name, method, batch, length = CASES[case]
    c = get_config()
    getattr(methods, method)(c)
    c.backbone.path, c.backbone.dropout = name, 0.0
    c.data.batch, c.data.max_len = batch, length
    for field, value in changes.items():
        block, name = field.split("__")
        c[block][name] = value
    return c


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
    from jaxprompt.planning.abstract import open_run
    from jaxprompt.planning.cost import make_shapes, measure

    run = open_run(make_config(case))
    placement = make_placement(devices=jax.devices()[:1])
    shapes = make_shapes(run, placement)
    cost = measure(shapes, placement)
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


def main() -> None:
    """Reads the flags and answers."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("case", choices=CASES)
    args = parser.parse_args()
    print(json.dumps(compare(args.case)))


if __name__ == "__main__":
    main()
