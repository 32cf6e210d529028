"""Puts backbone, method, head and template together, from plain values: a config's or a card's."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.backbones import families, make_backbone
from jaxprompt.convert import folder, load
from jaxprompt.data.batching import EvalBatches, Layout
from jaxprompt.data.encode import Encoded, Encoder
from jaxprompt.data.tasks import Example, Task
from jaxprompt.data.template import Template, check, parse
from jaxprompt.data.tokenizer import load_tokenizer
from jaxprompt.data.verbalizer import Verbalizer, make_verbalizer
from jaxprompt.errors import InputError
from jaxprompt.fields import HEADS, SCORES, check_fields, choose
from jaxprompt.heads import linear, lm
from jaxprompt.metrics import check_metric
from jaxprompt.model import Model
from jaxprompt.prompts import Method, make_prompt
from jaxprompt.types import Batch


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
    counts: np.ndarray  # int32 [examples], classes that the example has: its choices, or all


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

    def one_batch(self, rows: Sequence[Sequence[Encoded]]) -> Batch:
        """Lays a few encoded examples into one batch, without labels."""
        size = dataclasses.replace(self.layout, batch=len(rows))
        return next(iter(EvalBatches(rows, [-1] * len(rows), size)))

    def with_backbone(self, backbone: "Backbone") -> "Scorer":
        """Takes the module of a backbone whose weights were read."""
        return self._replace(model=dataclasses.replace(self.model, backbone=backbone.module))

    def encode(self, examples: Sequence[Example]) -> Split:
        """Encodes a split."""
        labels = np.array([example.label for example in examples], np.int32)
        own = [len(e.choices) if self.task.choices else self.classes for e in examples]
        return Split(self.encoder.encode_all(examples), labels, np.array(own, np.int32))


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
    check_fields(block, "backbone")
    where = folder.resolve(block["path"], block["revision"] or None)
    hf = folder.read_config(where)
    family = {"xlm-roberta": "roberta"}.get(hf.get("model_type"), hf.get("model_type", ""))
    family = block["family"] or family
    if family not in families():
        known = ", ".join(families())
        raise InputError(f"{where} holds a model of type {family!r}; backbone.family knows {known}")
    heads = load.present_heads(where, family)
    try:
        module = make_backbone(
            family, hf, heads, dtype=block["dtype"], stack=block["stack"], remat=block["remat"],
            attention=block["attention"], dropout=block["dropout"],
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{where / 'config.json'}: {error}") from error
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


def check_template(task: Task, text: str, head: str, slots: int) -> Template:
    """Reads a template and checks it against the task, the head and the prompt's slots."""
    parsed, by_lm = parse(text), head == "verbalizer"
    check(
        parsed, fields=task.fields, num_slots=slots, needs_mask=by_lm,
        has_choices=bool(task.choices),
    )  # fmt: skip
    if by_lm and parsed.uses_choice:
        raise InputError("a verbalizer reads one row; write {choices} for {choice}")
    return parsed


def check_fit(
    backbone: Backbone, *, prompt: Mapping[str, Any], head: Mapping[str, Any], max_len: int
) -> Method:
    """Makes the method and checks that it, the head and the length fit the backbone."""
    present, dims = backbone.module.cfg.model_heads, backbone.module.dims
    method = make_prompt(**prompt, dims=dims)
    shift = method.position_shift()
    if max_len + shift > dims.max_len:
        raise InputError(
            f"data.max_len={max_len} + {shift} positions of the prompt exceed the model's "
            f"{dims.max_len}; lower data.max_len to "
            f"{max(dims.max_len - shift, 0)} or the prompt's length"
        )
    if head["name"] == "verbalizer" and "mlm" not in present:
        raise InputError(
            f"{backbone.folder} has no MLM head for head.name=verbalizer; take a checkpoint "
            "saved with one, or head.name=linear"
        )
    if head["name"] == "linear" and head["pooler"] == "checkpoint" and "pooler" not in present:
        raise InputError(
            f"{backbone.folder} has no pooler for head.pooler=checkpoint; take trained, cls or mean"
        )
    return method


def build_scorer(
    backbone: Backbone, task: Task, *, prompt: Mapping[str, Any], head: Mapping[str, Any],
    template: str, max_len: int, multiple: int, side: str, batch: int, choices: int = 1,
) -> Scorer:  # fmt: skip
    """Puts backbone, method, head and template together and checks that they fit."""
    choose("head.name", head["name"], HEADS)
    choose("head.scores", head["scores"], SCORES)
    method = check_fit(backbone, prompt=prompt, head=head, max_len=max_len)
    by_lm, slots = head["name"] == "verbalizer", method.num_slots()
    parsed = check_template(task, template, head["name"], slots)
    check_metric(task.metric, len(task.labels) or choices)
    verbalizer = None
    if by_lm:
        tokenizer = load_tokenizer(backbone.folder)
        verbalizer = make_verbalizer(tokenizer, task.words or task.labels)
        module = lm.Head(verbalizer.rows, verbalizer.where, head["scores"])
    else:
        pooler = head["pooler"]
        if pooler == "auto":
            pooler = "checkpoint" if "pooler" in backbone.module.cfg.model_heads else "cls"
        choose("head.pooler", pooler, linear.POOLERS)
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
        batch=batch, max_len=max_len, pad_id=tokenizer.pad_token_id, side=side, multiple=multiple,
        shift=method.position_shift(), num_rows=choices if parsed.uses_choice else 1,
    )  # fmt: skip
    model = Model(backbone.module, method, {"main": module})
    return Scorer(task, template, verbalizer, encoder, layout, model, tokenizer)
