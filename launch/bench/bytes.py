"""Bytes of an exported prompt with a head of two classes, as `export` writes it."""

import argparse

import numpy as np

from launch.bench.models import make_batch, make_model


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--shapes", default="minilm,base,large")


def measure(args: argparse.Namespace) -> list[dict]:
    """Writes them, and weighs the files."""
    import jax

    from jaxprompt import tree
    from jaxprompt.convert.artifact import encode_tensors
    from jaxprompt.models.folding import fold

    rows = []
    for shape in args.shapes.split(","):
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
            size = len(encode_tensors(tensors))
            rows.append({"shape": shape, "method": kind, "P": length,
                         "numbers": tree.count(tensors), "bytes": size})  # fmt: skip
    return rows
