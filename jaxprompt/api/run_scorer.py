"""Scores the texts of example.npz with scorer.stablehlo and compares with the scores in it.

It needs jax, numpy, safetensors and flatbuffers, but not jaxprompt. `load_scorer` also works for
other texts: scorer.json describes the inputs.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file

EXACT, ROUNDED = 1e-4, 5e-2  # tolerance; GPUs and TPUs round the inputs of matrix products


def load_scorer(folder: Path) -> Callable[[Mapping[str, np.ndarray]], jax.Array]:
    """Loads the program and its weights. Returns a function from inputs by name to scores [b, C]"""
    program = export.deserialize(bytearray((folder / "scorer.stablehlo").read_bytes()))
    weights = jax.device_put(load_file(folder / "scorer.safetensors"))
    return functools.partial(jax.jit(program.call), weights)


def main(folder: Path) -> int:
    """Prints each text with its best class, and the largest difference between scores."""
    card = json.loads((folder / "scorer.json").read_text("utf-8"))
    with np.load(folder / "example.npz") as file:
        example = dict(file)
    expected = example.pop("scores")  # [b, C]
    scores = np.asarray(load_scorer(folder)(example))
    for text, best in zip(card["example"], scores.argmax(-1), strict=True):
        print(f"{text} -> {card['classes'][best]}")
    difference = np.abs(scores - expected).max()
    print(f"largest difference: {difference:.1e}")
    is_exact = jax.default_backend() == "cpu" and card["dtype"] == "float32"
    return int(not difference <= (EXACT if is_exact else ROUNDED))  # NaN is a difference too


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
