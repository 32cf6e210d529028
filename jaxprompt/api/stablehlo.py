"""Exports a prompt with its backbone as a StableHLO program that runs without jaxprompt."""

import contextlib
import dataclasses
import io
import json
import string
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from safetensors.numpy import save

from jaxprompt import tree
from jaxprompt.api.models import PromptedModel, scores
from jaxprompt.convert import artifact
from jaxprompt.data.tasks.task import KINDS
from jaxprompt.data.text.specials import FED
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import special_ids
from jaxprompt.errors import InputError, check_extra, with_article
from jaxprompt.files import check_foreign_files, make_folder, write_atomic
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Target, make_placement, with_placement
from jaxprompt.types import Batch, Tokens

FORMAT = 1
_FIXED_LENGTH_FAMILIES = ("deberta", "deberta_v2")
PROGRAM, WEIGHTS, CARD = "scorer.stablehlo", "scorer.safetensors", "scorer.json"
EXAMPLE, SCRIPT = "example.npz", "run.py"
TOKENIZER, GUIDE = "tokenizer.json", "README.md"
FILES = (PROGRAM, WEIGHTS, EXAMPLE, SCRIPT, TOKENIZER, GUIDE, CARD)
PLATFORMS = ("cpu", "cuda", "tpu")
TEXTS = ("a short text", "a second text, which has more words than the first one")
_DECODER = "decoder_"  # prefix of the names of the decoder's inputs
_BY_TOKEN = ("ids", "slot", "types", "roles", "positions", "segments")  # inputs, beside the mask
_GUIDE = """# A prompt and its backbone as a StableHLO program

`scorer.stablehlo` scores texts on CPU, CUDA and TPU; `scorer.safetensors` contains its weights.
Neither needs jaxprompt:

    pip install jax safetensors flatbuffers tokenizers
    python run.py                       # scores the two texts of example.npz, and compares
    python run.py "a text" "another"    # prints the class of each text

From Python, in this folder:

    from pathlib import Path
    from run import load_scorer, make_inputs

    folder = Path(".")
    scorer = load_scorer(folder)
    scores = scorer(make_inputs(folder, ["a text", "another"]))  # [texts, classes]

`tokenizer.json` is the tokenizer of the backbone, which the package tokenizers loads. `scorer.json`
describes the inputs and lists the classes. Its `encoding` contains the tokens of the template
{template}, with one token in place of the text; `make_inputs` in `run.py` replaces it.
"""
_TEXTS = ("field", "choice", "choices", "option")  # parts of a template that differ by example
_NO_ENCODING = """
This template has no `encoding`, because its inputs do not differ in one text alone: build them as
`scorer.json` describes.
"""


class _Program(NamedTuple):
    exported: export.Exported
    weights: dict[str, Any]  # by flat name
    inputs: dict[str, jax.ShapeDtypeStruct]  # by name


def write_stablehlo(model: PromptedModel, folder: str | Path) -> tuple[Path, ...]:
    """Writes a program that scores texts, for any number b of them and any length t.

    scorer.stablehlo maps (weights, inputs), two dicts by name, to scores, float32 [b, C], before
    the softmax, or before the sigmoid for a discriminator head. scorer.safetensors contains the
    weights, scorer.json describes the inputs, example.npz contains the inputs and scores of two
    texts, and run.py scores these, or other texts with tokenizer.json. README.md explains this.
    Inputs and weights without effect on the scores are left out.

    Args:
      model: result of `attach` with one prompt.
      folder: the output folder.

    Returns:
      The paths of the files.

    Raises:
      InputError: for a head that does not score classes, a template with a row per choice, a
        folder that contains other files or cannot be written, and if flatbuffers is missing.
    """
    check_folder(folder)
    _check_supported(model.scorer, model.prompt.metadata.backbone.family)
    folder = make_folder(folder)
    batch = _encode(model.scorer)
    program = _export(model, batch)
    classes = model.scorer.classes
    # By the model itself, not by the program that run.py compares with it.
    expected = jax.jit(scores, static_argnums=1)(model.params, model, batch)[:, :classes]
    flat = _flatten(batch)
    example = {name: flat[name] for name in program.inputs} | {"scores": np.asarray(expected)}
    encoding = _encoding(model.scorer, flat, program)
    card = _make_card(model, program) | ({"encoding": encoding} if encoding else {})
    guide = _GUIDE.format(template=f"`{model.scorer.template}`")
    files: dict[str, bytes | str] = {
        # First, because it marks the other files as an export.
        CARD: json.dumps(card, indent=2, ensure_ascii=False) + "\n",
        PROGRAM: bytes(program.exported.serialize()),
        WEIGHTS: save({name: np.ascontiguousarray(x) for name, x in program.weights.items()}),
        EXAMPLE: _npz(example),
        SCRIPT: resources.files("jaxprompt.api").joinpath("run_scorer.py").read_text("utf-8"),
        TOKENIZER: model.scorer.tokenizer.backend_tokenizer.to_str(),
        GUIDE: guide if encoding else guide + _NO_ENCODING,
    }
    for name, data in files.items():
        write_atomic(folder / name, data)
    return tuple(folder / name for name in FILES)


def check_folder(folder: str | Path) -> None:
    """Raises InputError if flatbuffers is missing, or if a folder contains files of others."""
    check_extra("stablehlo", "flatbuffers", "--stablehlo")  # jax.export imports it
    known_files = [artifact.TENSORS, artifact.METADATA]  # of an export to the same folder
    # With a card the other files are an export, too.
    known_files += FILES if (Path(folder) / CARD).is_file() else ()
    check_foreign_files(folder, known_files, "--stablehlo export")


def _check_supported(scorer: Scorer, family: str) -> None:
    if family in _FIXED_LENGTH_FAMILIES:
        raise InputError(
            f"--stablehlo: {with_article(family)} computes distances for a fixed text length, and "
            "the program supports any length; use format='jaxprompt'"
        )
    head = scorer.head
    if head.OF != "classes":
        raise InputError(
            f"--stablehlo: head.name={head.name} is for a {KINDS[head.OF].name} task, and the "
            "program only scores classes; use head.name=linear or head.name=verbalizer"
        )
    if scorer.layout.num_rows > 1:
        raise InputError(
            f"--stablehlo: the template {scorer.template!r} makes {scorer.layout.num_rows} rows of "
            "an example, one per choice, and the program supports 1; list the choices with "
            "{choices}, and use head.name=verbalizer"
        )
    if scorer.demos is not None:
        raise InputError(
            "--stablehlo: the prompt uses demonstrations, which the program cannot select; use "
            "format='jaxprompt'"
        )


def _encode(scorer: Scorer) -> Batch:
    """Encodes TEXTS, each in all fields of the task, as a batch of two rows."""
    task = scorer.task
    choices = task.options or (task.choices and ("a choice",) * scorer.classes)
    examples = [task.example(text, tuple(choices)) for text in TEXTS]
    rows = scorer.encode(examples).rows
    if len(rows) > len(examples):
        raise InputError(
            f"--stablehlo: the program supports 1 input per example, and "
            f"head.name={scorer.head.name} makes {len(rows) // len(examples)}; list all classes in "
            "one input"
        )
    return scorer.one_batch(rows)


# -- the program ----------------------------------------------------------------------------------


def _export(model: PromptedModel, batch: Batch) -> _Program:
    """Lowers the scores of a batch, with b and t as symbolic dimensions."""
    params, arrays = tree.flatten(tree.stack_layers(model.params)), _flatten(batch)
    # Programs for a CPU run everywhere; other targets have their own kernels.
    placement = dataclasses.replace(make_placement(1, 1), compiled_for=Target("cpu"))
    score = jax.jit(with_placement(placement, _make_score(model, params, batch)))
    # Lowered once to see which arguments the scores depend on; the others are dropped.
    full = export.export(score, platforms=PLATFORMS[:1])(_specs(params), _specs(arrays))
    # JAX flattens dicts by sorted name, and arguments in their order.
    names = [*sorted(params), *sorted(arrays)]
    used_names = {names[i] for i in full.module_kept_var_idx}
    weights = {name: params[name] for name in sorted(used_names & params.keys())}
    b, t = export.symbolic_shape("b, t")
    inputs = {
        name: jax.ShapeDtypeStruct(_shape(name, arrays[name], b, t), arrays[name].dtype)
        for name in sorted(used_names & arrays.keys())
    }
    with _no_locations():
        exported = export.export(score, platforms=PLATFORMS)(_specs(weights), inputs)
    return _Program(exported, weights, inputs)


@contextlib.contextmanager
def _no_locations() -> Iterator[None]:
    """Lowers without source locations, which are paths of this machine."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _make_score(model: PromptedModel, params: tree.Flat, batch: Batch) -> Callable[..., jax.Array]:
    """Makes (weights, inputs) -> scores [b, C]; missing arrays are zero, and have no effect."""
    arrays, classes, backbone = _flatten(batch), model.scorer.classes, model.scorer.model.backbone
    # Kernels of a device depend on the length, which is symbolic here.
    cfg = dataclasses.replace(backbone.cfg, attention="einsum", remat="none")
    # `last_layer` would depend on the length, too.
    backbone = backbone.clone(cfg=cfg)
    program_model = dataclasses.replace(model.scorer.model, backbone=backbone, last_layer="all")

    def score(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> jax.Array:
        b, t = inputs["ids"].shape
        zero_arrays = {
            name: jnp.zeros(_shape(name, x, b, t), x.dtype) for name, x in arrays.items()
        }
        zero_params = {name: jnp.zeros(x.shape, x.dtype) for name, x in params.items()}
        full_params = tree.unflatten(zero_params | dict(weights))
        full_batch = _unflatten(zero_arrays | dict(inputs), batch)
        return program_model.forward(full_params, full_batch)[:, :classes]

    return score


def _specs(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def _shape(name: str, array: Any, b: Any, t: Any) -> tuple[Any, ...]:
    """Returns the shape of an input for b texts of t tokens; decoder lengths are fixed."""
    is_text = name in Tokens._fields and array.ndim == 2
    return (b, t) if is_text else (b, *array.shape[1:])


def _flatten(batch: Batch) -> dict[str, Any]:
    """Returns the arrays of a batch by name, those of the decoder with a prefix."""
    flat = batch._asdict()
    encoder, decoder = flat.pop("encoder")._asdict(), flat.pop("decoder")
    decoder_arrays = {} if decoder is None else decoder._asdict()
    flat |= encoder | {_DECODER + name: array for name, array in decoder_arrays.items()}
    # Which arrays a batch has depends on the backbone and the template, not on the texts.
    return {name: array for name, array in flat.items() if array is not None}


def _unflatten(flat: Mapping[str, Any], like: Batch) -> Batch:
    """Inverts `_flatten`."""
    decoder = None
    if like.decoder is not None:
        decoder = Tokens(*(flat.get(_DECODER + name) for name in Tokens._fields))
    encoder = Tokens(*(flat.get(name) for name in Tokens._fields))
    fields: dict[str, Any] = {name: flat.get(name) for name in Batch._fields}
    return Batch(**fields | {"encoder": encoder, "decoder": decoder})


# -- other files ----------------------------------------------------------------------------------


def _make_card(model: PromptedModel, program: _Program) -> dict[str, Any]:
    scorer, metadata = model.scorer, model.prompt.metadata
    classes, meanings = scorer.classes, _meanings(scorer)
    names = scorer.task.labels or tuple(string.ascii_uppercase[:classes])
    activation = "sigmoid of each" if scorer.head.LISTS_CLASSES else "softmax"

    def to_json(size):
        return size if isinstance(size, int) else str(size)

    inputs = [
        {
            "name": name,
            "dtype": spec.dtype.name,
            "shape": [to_json(size) for size in spec.shape],
            "meaning": meanings[name],
        }
        for name, spec in program.inputs.items()
    ]
    return {
        "format": FORMAT,
        "platforms": list(program.exported.platforms),
        "dtype": jnp.dtype(scorer.model.backbone.cfg.dtype).name,
        "symbols": {
            "b": "number of texts",
            "t": f"tokens of a text, padded on the {scorer.layout.side}",
        },
        "arguments": [
            f"weights: a dict of the arrays in {WEIGHTS}, by sorted name",
            "inputs: a dict of the arrays below, by sorted name",
        ],
        "inputs": inputs,
        "output": {
            "dtype": "float32",
            "shape": ["b", classes],
            "meaning": f"scores of the classes before the {activation}",
        },
        "classes": list(names),
        "template": scorer.template,
        "label_words": metadata.label_words,
        "tokenizer": {"id": metadata.backbone.id, "revision": metadata.backbone.revision},
        "max_len": scorer.layout.max_len,
        "example": list(TEXTS),
        "versions": artifact.package_versions(),
    }


def _meanings(scorer: Scorer) -> dict[str, str]:
    """Returns a one-line description of each array of a batch."""
    layout, style = scorer.layout, scorer.model.backbone.STYLE
    segment = "segment of each token, 0 or 1"
    branch = "0 before the label words, then the number of the label word of the token"
    position = "position of each token, from {}; 0 at padding".format
    tokens = {
        "ids": f"token ids; {layout.pad_id} at soft tokens and at padding",
        "mask": "true at tokens, soft ones included; false at padding",
        "slot": "index of the soft token, from 0; -1 at other tokens",
        "positions": position(layout.shift),
        "types": branch if style == "causal" else segment,
        "roles": "3 at soft tokens, 4 at the text, 0 at padding; others at template words",
    }
    decoder = tokens | {"positions": position(layout.decoder_shift), "types": branch}
    stream = "decoder" if style in FED else "input"
    return tokens | {
        **{_DECODER + name: f"decoder, same for every text: {x}" for name, x in decoder.items()},
        "label_pos": f"positions of the {stream} whose states the head reads, from 0",
        "counts": "number of choices of each example",
    }


def _encoding(
    scorer: Scorer, example: Mapping[str, np.ndarray], program: _Program
) -> dict[str, Any] | None:
    """Describes how a text becomes inputs, for `make_inputs` of run_scorer.py.

    None if an input does not consist of the text of one field as it is.
    """
    parts = [part for part in parse(scorer.template).parts if part.kind in _TEXTS]
    if len(parts) != 1 or parts[0].kind != "field" or parts[0].modifiers:
        return None
    (gap,) = scorer.encoder.gaps([scorer.task.example("a")], parts[0].text)
    row, at = scorer.encoder.fill_gap(gap, [0])
    row = row._replace(positions=row.positions + scorer.layout.shift)
    has_decoder = row.decoder is not None
    by_token = {name: getattr(row, name).tolist() for name in _BY_TOKEN if name in program.inputs}
    constants = {
        name: example[name][0].tolist()
        for name in program.inputs
        if name not in by_token and name != "mask" and (has_decoder or name != "label_pos")
    }
    return {
        "leading_space": gap.field.text.startswith(" "),
        "max_tokens": gap.room,
        # The tokenizers of T5 give the name of a special token in a text the id of the token.
        "special_ids": sorted(special_ids(scorer.tokenizer)),
        "unk_id": scorer.tokenizer.unk_token_id,
        "text_at": at,
        "row": by_token,
        "label_pos": None if has_decoder else row.label_pos.tolist(),
        "constants": constants,
        "padding": {"ids": scorer.layout.pad_id, "slot": -1},
        "padding_side": scorer.layout.side,
    }


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()
