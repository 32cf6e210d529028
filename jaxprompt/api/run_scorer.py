"""Scores texts with scorer.stablehlo: python run.py "a text" "another".

Without texts it scores those of example.npz, and compares with the scores in it. It needs jax,
numpy, safetensors, flatbuffers and, for texts, tokenizers, but not jaxprompt. `load_scorer` and
`make_inputs` can be imported; scorer.json describes the inputs.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def read_card(folder: Path) -> dict[str, Any]:
    """Reads scorer.json."""
    return json.loads((folder / "scorer.json").read_text("utf-8"))


def make_inputs(folder: Path, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Encodes texts, each in the template, as inputs of the program by name."""
    from tokenizers import Tokenizer

    card = read_card(folder)
    encoding = card["encoding"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # their names in a text are plain text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if encoding["leading_space"]:
        texts = [f" {text.lstrip()}" if text.strip() else "" for text in texts]
    limit, at = encoding["max_tokens"], encoding["text_at"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids[:limit] for text in texts]
    if (unk_id := encoding["unk_id"]) is not None:
        specials = set(encoding["special_ids"])
        ids = [[unk_id if i in specials else i for i in text_ids] for text_ids in ids]
    template_length = len(next(iter(encoding["row"].values()))) - 1
    lengths = np.array([template_length + len(text_ids) for text_ids in ids])
    # Padding is on the right, or on the left.
    starts = (lengths.max() - lengths) * (encoding["padding_side"] == "left")
    types = {spec["name"]: spec["dtype"] for spec in card["inputs"]}
    inputs = {
        name: np.repeat(np.array([value], types[name]), len(texts), axis=0)
        for name, value in encoding["constants"].items()
    }
    for name in (*encoding["row"], "mask"):
        if name not in types:
            continue
        padding = encoding["padding"].get(name, 0)
        inputs[name] = np.full((len(texts), lengths.max()), padding, types[name])
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            row = [True] * length if name == "mask" else _fill(encoding, name, ids[number])
            inputs[name][number, start : start + length] = row
    if encoding["label_pos"] is not None:  # else the head reads the decoder
        read = np.array(encoding["label_pos"])  # [M]
        shift = np.array([len(text_ids) - 1 for text_ids in ids])[:, None]  # [b, 1]
        positions = read + shift * (read > at) + starts[:, None]
        inputs["label_pos"] = positions.astype(types["label_pos"])
    return inputs


def _fill(encoding: Mapping[str, Any], name: str, ids: Sequence[int]) -> list[int]:
    """Puts the tokens of a text into the row of the template, which has one token there."""
    row, at, more = encoding["row"][name], encoding["text_at"], len(ids) - 1
    if name == "positions":
        return [
            *row[:at],
            *(row[at] + i for i in range(len(ids))),
            *(x + more for x in row[at + 1 :]),
        ]
    return [*row[:at], *(ids if name == "ids" else [row[at]] * len(ids)), *row[at + 1 :]]


def main(folder: Path, texts: Sequence[str] = ()) -> int:
    """Prints each text with its best class, and compares the scores of the example."""
    card = read_card(folder)
    with np.load(folder / "example.npz") as file:
        example = dict(file)
    expected = example.pop("scores")  # [b, C]
    scores = np.asarray(load_scorer(folder)(make_inputs(folder, texts) if texts else example))
    for text, best in zip(texts or card["example"], scores.argmax(-1), strict=True):
        print(f"{text} -> {card['classes'][best]}")
    if texts:
        return 0
    difference = np.abs(scores - expected).max()
    print(f"largest difference: {difference:.1e}")
    is_exact = jax.default_backend() == "cpu" and card["dtype"] == "float32"
    return int(not difference <= (EXACT if is_exact else ROUNDED))  # NaN is a difference too


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent, sys.argv[1:]))
