"""Puts backbone, method, head and template together, from plain values: a config's or a card's."""

import dataclasses
import string
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.assembly.schema import HEADS, SCORES, check_fields
from jaxprompt.backbones import families, make_backbone
from jaxprompt.convert import folder, load
from jaxprompt.data.batching import EvalBatches, Layout
from jaxprompt.data.encode import Answer, Encoded, Encoder
from jaxprompt.data.specials import read_specials
from jaxprompt.data.target import Frame, branch_plan, frame, masked_plan, read_answer
from jaxprompt.data.tasks import Example, Task
from jaxprompt.data.template import OPTION, Template, check, parse, read_option
from jaxprompt.data.tokenizer import load_tokenizer
from jaxprompt.data.verbalizer import Verbalizer, make_verbalizer
from jaxprompt.errors import InputError, brief, choose
from jaxprompt.heads import linear, lm
from jaxprompt.models.model import Model
from jaxprompt.parallel.sharding import Placement
from jaxprompt.prompts import Method, make_prompt
from jaxprompt.training.metrics import check_metric
from jaxprompt.types import Batch

_CLOZE = "[mask] {label}"
_KIN = {"xlm-roberta": "roberta", "mt5": "t5"}  # model_type -> family


class Backbone(NamedTuple):
    """A pre-trained model on disk, its shape read and its weights not yet."""

    block: Mapping[str, Any]  # the config block it came from
    folder: Path
    family: str
    hf: dict[str, Any]
    module: Any
    tokenizer: Any = None  # None = the one in `folder`


class Split(NamedTuple):
    """One split, encoded."""

    rows: list[list[Encoded]]
    labels: np.ndarray  # int32 [examples], -1 = unknown
    counts: np.ndarray  # int32 [examples], classes that the example has: its choices, or all
    references: list[tuple[str, ...]]  # what a free text may say

    def digest(self) -> str:
        """Sums up the encoded rows and labels: the same for the same data."""
        total = zlib.crc32(self.labels.tobytes())
        for row in (row for example in self.rows for row in example):
            parts = (row.ids, row.slot, row.label_pos) + ((row.decoder.ids,) if row.decoder else ())
            for part in parts:
                total = zlib.crc32(np.ascontiguousarray(part), total)
        return f"{len(self.rows)} examples, CRC {total:08x}"


def references(examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """Lists the texts that count as right, example by example."""
    return [example.references for example in examples]


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
    def is_text(self) -> bool:
        """Whether the model writes a free text, so that there are no class scores."""
        return self.task.is_text

    @property
    def classes(self) -> int:
        """Number of classes, or of choices where these are the classes."""
        return len(self.task.labels) or self.layout.num_rows

    def one_batch(self, rows: Sequence[Sequence[Encoded]]) -> Batch:
        """Lays a few encoded examples into one batch, without labels."""
        size = dataclasses.replace(self.layout, batch=len(rows), host=0, hosts=1)
        return next(iter(EvalBatches(rows, [-1] * len(rows), size)))

    def writing(self, tokens: int) -> "Scorer":
        """Lets the model write freely. Raises InputError for a backbone that cannot."""
        if self.model.backbone.STYLE == "masked":
            raise InputError("--generate needs a backbone that writes; take a T5 or a GPT-2")
        return self._replace(encoder=self.encoder.writing(tokens))

    def with_backbone(self, backbone: "Backbone") -> "Scorer":
        """Takes the module of a backbone whose weights were read."""
        return self._replace(model=dataclasses.replace(self.model, backbone=backbone.module))

    def names(self, examples: Sequence[Example]) -> list[Sequence[str]]:
        """Lists the names of each example's classes, which are its choices where it has some."""
        if self.task.choices:
            return [(self.task.labels or e.choices)[: len(e.choices)] for e in examples]
        return [self.task.labels] * len(examples)

    def encode(self, examples: Sequence[Example], *, targets: bool = False) -> Split:
        """Encodes a split; free-text targets too where they are to be learned."""
        labels = np.array([example.label for example in examples], np.int32)
        own = [len(e.choices) if self.task.choices else self.classes for e in examples]
        rows = self.encoder.encode_all(examples, targets=targets and self.is_text)
        return Split(rows, labels, np.array(own, np.int32), references(examples))


def choose_template(task: Task, style: str, head: str, form: str, template: str) -> str:
    """Picks the layout: the given one, else the task's own for this head and kind of backbone.

    A task in the form of a pre-training task has its layout already.
    """
    own = task.plain
    if head == "verbalizer":
        own = task.causal if style == "causal" else task.template
        own = task.text if form == "text" else own
    elif head == "text":
        own = task.text
    text = template or own if form in ("cloze", "text") else own
    if not text:
        fields = " ".join(f"{{{field}}}" for field in task.fields)
        raise InputError(
            f"task {task.name} has no template for a {head} head on a {style} backbone; "
            f"give task.template, e.g. '{fields} [mask]'"
        )
    return text


def choose_words(task: Task, style: str, form: str) -> Sequence[str | tuple[str, ...]]:
    """Picks the words of each class, where the task has some for this kind of backbone."""
    if form == "text":
        return task.targets or task.labels
    return (style == "causal" and task.causal_words) or task.words or task.labels


def open_backbone(block: Mapping[str, Any]) -> Backbone:
    """Finds a backbone and reads its config and the names of its heads."""
    if not block["path"]:
        raise InputError("backbone.path is empty; give a folder, a hub id or pkg:PACKAGE/FOLDER")
    check_fields(block, "backbone")
    where = folder.resolve(block["path"], block["revision"] or None)
    return shape_backbone(block, where, folder.read_config(where))


def shape_backbone(
    block: Mapping[str, Any], where: Path, hf: dict[str, Any], heads: Sequence[str] | None = None
) -> Backbone:
    """Makes the module of a transformers config; without `heads`, with those that `where` holds.

    `where` is the folder, or the file where the config alone is there.
    """
    kind = hf.get("model_type", "")
    family = block["family"] or (_KIN.get(kind, kind) if isinstance(kind, str) else None)
    if family not in families():
        known = ", ".join(families())
        raise InputError(
            f"{where} holds a model of type {brief(kind)}; backbone.family knows {known}"
        )
    if heads is None:
        heads = load.present_heads(where, family)
    try:
        module = make_backbone(
            family, hf, heads, dtype=block["dtype"], stack=block["stack"], remat=block["remat"],
            attention=block["attention"], dropout=block["dropout"], rescale=block["rescale"],
        )  # fmt: skip
    except InputError as error:
        shown = where if where.is_file() else where / "config.json"
        raise InputError(f"{shown}: {error}") from error
    return Backbone(block, where, family, hf, module)


def load_weights(backbone: Backbone, placement: Placement) -> tuple[Backbone, load.Loaded]:
    """Reads the weights to where they live.

    The module is returned too: an untied output table is found only here, and the vocabulary's
    tables are padded to the mesh.
    """
    loaded = load.load_backbone(
        backbone.folder, backbone.family, backbone.hf, dtype=backbone.block["dtype"],
        rescale=backbone.block["rescale"], placement=placement,
    )  # fmt: skip
    cfg = backbone.module.cfg
    cfg = dataclasses.replace(
        cfg, rows=placement.padded(cfg.vocab), tied=cfg.tied and loaded.report.tied
    )
    return backbone._replace(module=backbone.module.clone(cfg=cfg)), loaded


def check_template(task: Task, text: str, head: str, form: str, slots: int) -> Template:
    """Reads a template and checks it against the task, the head and the prompt's slots."""
    parsed, by_lm = parse(text), head == "verbalizer"
    check(
        parsed, fields=task.fields, num_slots=slots, needs_mask=by_lm and form != "text",
        # The options of the unified form are classes that may not be known yet.
        has_choices=bool(task.choices or task.options) or form == "unified",
    )  # fmt: skip
    read_option(task.option or OPTION)
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
    if head["name"] == "verbalizer" and not {"mlm", "lm"} & present:
        raise InputError(
            f"{backbone.folder} has no MLM head for head.name=verbalizer; take a checkpoint "
            "saved with one, or head.name=linear"
        )
    style = backbone.module.STYLE
    if head["name"] == "text" and style == "masked":
        raise InputError(
            f"head.name=text needs a backbone that writes, {backbone.folder} is a "
            f"{backbone.family}; take a T5 or a GPT-2"
        )
    if head["name"] == "linear" and head["pooler"] == "mean" and style == "seq2seq":
        raise InputError("head.pooler=mean has no text to average in a T5's decoder; take cls")
    if head["name"] == "linear" and head["pooler"] == "checkpoint" and "pooler" not in present:
        raise InputError(
            f"{backbone.folder} has no pooler for head.pooler=checkpoint; take trained, cls or mean"
        )
    return method


def build_scorer(
    backbone: Backbone, task: Task, *, prompt: Mapping[str, Any], head: Mapping[str, Any],
    template: str, form: str, answer: str, eos: bool, max_len: int, max_target: int, multiple: int,
    side: str, batch: int, choices: int = 1, share: tuple[int, int] = (0, 1),
) -> Scorer:  # fmt: skip
    """Puts backbone, method, head and template together and checks that they fit.

    `share` says which part of a batch this process holds, of how many.
    """
    choose("head.name", head["name"], HEADS)
    choose("head.scores", head["scores"], SCORES)
    method = check_fit(backbone, prompt=prompt, head=head, max_len=max_len)
    style, slots = backbone.module.STYLE, method.num_slots()
    by_lm = head["name"] == "verbalizer"
    if task.is_text != (head["name"] == "text"):
        raise InputError(
            f"head.name={head['name']} with a {'free-text' if task.is_text else 'classification'} "
            "task; head.name=text goes with task.target, a column of texts"
        )
    if form == "text" and style == "masked":
        raise InputError("task.form=text needs a backbone that writes; take cloze, or a T5")
    parsed = check_template(task, template, head["name"], form, slots)
    check_metric(task.metric, len(task.labels) or choices, is_text=task.is_text)
    tokenizer = backbone.tokenizer or load_tokenizer(backbone.folder)
    said, sentinels = read_answer(answer or ("{label} [sep]" if form == "text" else _CLOZE))
    specials = read_specials(
        tokenizer, style, eos=eos, sentinel=backbone.block["sentinel"],
        masks=max(int(parsed.has_mask), sentinels if by_lm else 0),
    )  # fmt: skip
    verbalizer, follows, heads, masks = None, Answer(), {}, 1
    names = [group[0] for group in task.words] or string.ascii_uppercase
    if by_lm:
        label_words = choose_words(task, style, form)
        verbalizer = make_verbalizer(tokenizer, label_words, leading_space=task.spaced)
        names = [group[0] for group in verbalizer.words]
        around = frame(said, specials) if style == "seq2seq" else Frame((), ())
        whole = head["span"] == "target"
        masks = verbalizer.num_masks
        if style == "masked":
            plan = masked_plan(verbalizer.ids)
            if task.widest:
                widest = make_verbalizer(tokenizer, task.widest, leading_space=task.spaced)
                masks = max(masks, widest.num_masks)
        else:
            plan = branch_plan(verbalizer.ids, around, whole=whole)
        follows = Answer(plan, around.stem)
        pieces = plan.words
        heads["main"] = lm.Head(
            pieces.rows, pieces.where, pieces.at, head["scores"], head["pieces"]
        )
        if whole:
            heads["target"] = lm.Head(plan.whole.rows, plan.whole.where, plan.whole.at, "full")
    elif task.is_text:
        follows = Answer(text=max_target)
        heads["main"] = lm.TextHead()
    else:
        heads["main"] = _linear(backbone, task, head, parsed)
    if style == "seq2seq":
        stem = (backbone.module.cfg.start, *follows.stem)
        follows = follows._replace(stem=stem, slots=method.num_decoder_slots())
    encoder = Encoder(
        tokenizer, parsed, specials, num_slots=slots, max_len=max_len,
        needs_mask=by_lm and form != "text",
        num_masks=masks, num_types=backbone.module.cfg.types, answer=follows,
        option=task.option, names=names,
    )  # fmt: skip
    layout = Layout(
        batch=batch, max_len=max_len, pad_id=specials.pad, side=side, multiple=multiple,
        shift=method.position_shift(), decoder_shift=method.decoder_shift(),
        num_rows=choices if parsed.uses_choice else 1, host=share[0], hosts=share[1],
        branches=style == "causal" and follows.plan is not None and len(follows.plan.fed) > 0,
    )  # fmt: skip
    model = Model(backbone.module, method, heads)
    return Scorer(task, template, verbalizer, encoder, layout, model, tokenizer)


def _linear(backbone: Backbone, task: Task, head: Mapping[str, Any], parsed: Template):
    pooler = head["pooler"]
    if pooler == "auto":
        pooler = "checkpoint" if "pooler" in backbone.module.cfg.model_heads else "cls"
    choose("head.pooler", pooler, linear.POOLERS)
    classes = 1 if parsed.uses_choice else len(task.labels)
    if not classes:
        raise InputError(f"task {task.name}: the choices are the classes; use {{choice}}")
    return linear.Head(classes, pooler, head["dropout"])
