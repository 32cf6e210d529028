"""Puts backbone, method, head and template together, from plain values: a config's or a card's."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.backbones import families, make_backbone
from jaxprompt.convert import folder, load
from jaxprompt.data.batching import Layout
from jaxprompt.data.encode import Encoded, Encoder
from jaxprompt.data.tasks import Example, Task
from jaxprompt.data.template import check, parse
from jaxprompt.data.tokenizer import load_tokenizer
from jaxprompt.data.verbalizer import Verbalizer, make_verbalizer
from jaxprompt.errors import InputError, nearest
from jaxprompt.heads import linear, lm
from jaxprompt.layers.attention import KERNELS
from jaxprompt.layers.stack import REMATS, STACKS
from jaxprompt.metrics import check_metric
from jaxprompt.model import Model
from jaxprompt.prompts import make_prompt

DTYPES = ("float32", "bfloat16")


class Backbone(NamedTuple):
    """A pre-trained model on disk, its shape read and its weights not yet."""

    block: Mapping[str, Any]  # the config block it came from
    folder: Path
    family: str
    hf: dict[str, Any]
    module: Any


class Split(NamedTuple):
    """One split, encoded."""

    rows: list[list[Encoded]]
    labels: np.ndarray  # int32 [examples], -1 = unknown


class Scorer(NamedTuple):
    """All that turns an example into class scores, save the numbers."""

    task: Task
    template: str
    verbalizer: Verbalizer | None
    encoder: Encoder
    layout: Layout  # of evaluation batches
    model: Model
    tokenizer: Any

    @property
    def classes(self) -> int:
        """Number of classes, or of choices where these are the classes."""
        return len(self.task.labels) or self.layout.num_rows

    def with_backbone(self, backbone: "Backbone") -> "Scorer":
        """Takes the module of a backbone whose weights were read."""
        return self._replace(model=dataclasses.replace(self.model, backbone=backbone.module))

    def encode(self, examples: Sequence[Example]) -> Split:
        """Encodes a split."""
        labels = np.array([example.label for example in examples], np.int32)
        return Split(self.encoder.encode_all(examples), labels)


def choose(field: str, value: str, known: Sequence[str]) -> str:
    """Returns the value of a field if it is one of `known`. Raises InputError."""
    if value not in known:
        raise InputError(f"{field}={value!r} is unknown; {nearest(value, known)}")
    return value


def choose_template(task: Task, head: str, template: str) -> str:
    """Picks the layout: the given one, else the task's own for this kind of head."""
    text = template or (task.template if head == "verbalizer" else task.plain)
    if not text:
        fields = " ".join(f"{{{field}}}" for field in task.fields)
        raise InputError(
            f"task {task.name} has no template for a {head} head; "
            f"give task.template, e.g. '{fields} [mask]'"
        )
    return text


def open_backbone(block: Mapping[str, Any]) -> Backbone:
    """Finds a backbone and reads its config and the names of its heads."""
    if not block["path"]:
        raise InputError("backbone.path is empty; give a folder, a hub id or pkg:PACKAGE/FOLDER")
    choose("backbone.dtype", block["dtype"], DTYPES)
    choose("backbone.stack", block["stack"], STACKS)
    choose("backbone.remat", block["remat"], REMATS)
    choose("backbone.attention", block["attention"], KERNELS)
    dropout = block["dropout"]
    if dropout is not None and not 0 <= dropout < 1:
        raise InputError(f"backbone.dropout={dropout} must be in [0, 1)")
    if block["family"] and block["family"] not in families():
        known = nearest(block["family"], families())
        raise InputError(f"unknown backbone.family {block['family']!r}; {known}")
    where = folder.resolve(block["path"], block["revision"] or None)
    hf = folder.read_config(where)
    family = {"xlm-roberta": "roberta"}.get(hf.get("model_type"), hf.get("model_type", ""))
    family = block["family"] or family
    if family not in families():
        known = ", ".join(families())
        raise InputError(f"{where} holds a model of type {family!r}; backbone.family knows {known}")
    module = make_backbone(
        family, hf, load.present_heads(where, family), dtype=block["dtype"], stack=block["stack"],
        remat=block["remat"], attention=block["attention"], dropout=dropout,
    )  # fmt: skip
    return Backbone(block, where, family, hf, module)


def load_weights(backbone: Backbone) -> tuple[Backbone, load.Loaded]:
    """Reads the weights. The module is returned too: an untied output table is found only here."""
    loaded = load.load_backbone(
        backbone.folder, backbone.family, backbone.hf, dtype=backbone.block["dtype"]
    )
    if not loaded.report.tied:
        cfg = dataclasses.replace(backbone.module.cfg, tied=False)
        backbone = backbone._replace(module=backbone.module.clone(cfg=cfg))
    return backbone, loaded


def build_scorer(
    backbone: Backbone, task: Task, *, prompt: Mapping[str, Any], head: Mapping[str, Any],
    template: str, max_len: int, multiple: int, side: str, batch: int, choices: int = 1,
) -> Scorer:  # fmt: skip
    """Puts backbone, method, head and template together and checks that they fit."""
    choose("head.name", head["name"], ("linear", "verbalizer"))
    choose("head.scores", head["scores"], ("restricted", "full"))
    present, dims = backbone.module.cfg.model_heads, backbone.module.dims
    method = make_prompt(**prompt, dims=dims)
    shift = method.position_shift()
    if max_len + shift > dims.max_len:
        raise InputError(
            f"data.max_len={max_len} + {shift} positions of the prompt exceed the model's "
            f"{dims.max_len}; lower data.max_len to "
            f"{max(dims.max_len - shift, 0)} or the prompt's length"
        )
    parsed = parse(template)
    by_lm, slots = head["name"] == "verbalizer", method.num_slots()
    has_choices = bool(task.choices)
    check(parsed, fields=task.fields, num_slots=slots, needs_mask=by_lm, has_choices=has_choices)
    check_metric(task.metric, len(task.labels) or choices)
    verbalizer = None
    if by_lm:
        if "mlm" not in present:
            raise InputError(
                f"{backbone.folder} has no MLM head for head.name=verbalizer; take a checkpoint "
                "saved with one, or head.name=linear"
            )
        if parsed.uses_choice:
            raise InputError("a verbalizer reads one row; write {choices} for {choice}")
        tokenizer = load_tokenizer(backbone.folder)
        verbalizer = make_verbalizer(tokenizer, task.words or task.labels)
        module = lm.Head(verbalizer.rows, verbalizer.where, head["scores"])
    else:
        pooler = head["pooler"]
        if pooler == "auto":
            pooler = "checkpoint" if "pooler" in present else "cls"
        choose("head.pooler", pooler, linear.POOLERS)
        if pooler == "checkpoint" and "pooler" not in present:
            raise InputError(
                f"{backbone.folder} has no pooler for head.pooler=checkpoint; "
                "take trained, cls or mean"
            )
        classes = 1 if parsed.uses_choice else len(task.labels)
        if not classes:
            raise InputError(f"task {task.name}: the choices are the classes; use {{choice}}")
        tokenizer = load_tokenizer(backbone.folder)
        module = linear.Head(classes, pooler, head["dropout"])
    encoder = Encoder(
        tokenizer, parsed, num_slots=slots, max_len=max_len, needs_mask=by_lm,
        num_masks=verbalizer.num_masks if verbalizer else 1, num_types=backbone.module.cfg.types,
    )  # fmt: skip
    layout = Layout(
        batch=batch, max_len=max_len, pad_id=tokenizer.pad_token_id, side=side, shift=shift,
        num_rows=choices if parsed.uses_choice else 1, multiple=multiple,
    )  # fmt: skip
    model = Model(backbone.module, method, {"main": module})
    return Scorer(task, template, verbalizer, encoder, layout, model, tokenizer)
