"""Puts backbone, method, head and template together, from plain values: a config's or a card's."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.assembly.beside import check_computed, how_beside
from jaxprompt.backbones import families, make_backbone
from jaxprompt.config.schema import check_fields
from jaxprompt.convert import folder, load
from jaxprompt.convert.llama_fields import MODEL_TYPES as LLAMA_TYPES
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.rows import Rows
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.chat import in_chat
from jaxprompt.data.text.demos import Demonstrations
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.identity import check_id
from jaxprompt.data.text.specials import FED, Specials, start_of
from jaxprompt.data.text.template import OPTION, Template, check, parse, read_option
from jaxprompt.data.text.tokenizer import load_tokenizer, segments
from jaxprompt.data.text.verbalizer import Verbalizer
from jaxprompt.errors import InputError, brief, with_article
from jaxprompt.heads import BackboneFacts, Kind, TaskSetup, make_head
from jaxprompt.models.model import READS, Model
from jaxprompt.models.scorer import Backbone, Scorer, module_for
from jaxprompt.parallel.sharding import Placement
from jaxprompt.prompts import Method, make_prompt, with_task
from jaxprompt.scoring.metrics import check_metric
from jaxprompt.scoring.relations import check_relations
from jaxprompt.types import Asks

# model_type -> family, where they differ
_KIN = {"xlm-roberta": "roberta", "mt5": "t5", "deberta-v2": "deberta_v2"}
_KIN |= dict.fromkeys(LLAMA_TYPES, "llama")


def choose_template(task: Task, head: Kind, style: str, form: str, template: str) -> str:
    """Picks the layout: the given one, else the task's own for this head and kind of backbone.

    A task in the form of a pre-training task has its layout already.
    """
    own = head.layout_of(task, style, form)
    text = template or own if form in ("cloze", "text") else own
    if not text:
        fields = " ".join(f"{{{field}}}" for field in task.fields)
        raise InputError(
            f"task {task.name} has no template for a {head.name} head on a {style} backbone; "
            f"give task.template, e.g. '{fields} [mask]'"
        )
    return text


def family_of(model_type: str) -> str:
    """Names the family that reads a model_type of transformers."""
    return _KIN.get(model_type, model_type)


def open_backbone(block: Mapping[str, Any]) -> Backbone:
    """Finds a backbone and reads its config and the names of its heads."""
    if not block["path"]:
        raise InputError(
            "backbone.path is empty; give a folder, a .gguf file, a hub id or pkg:PACKAGE/FOLDER"
        )
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
    family = block["family"] or (family_of(kind) if isinstance(kind, str) else None)
    if family not in families():
        known = ", ".join(families())
        if not kind:
            raise InputError(f"{where}: the config has no model_type; write one into it: {known}")
        raise InputError(
            f"{where} holds a model of type {brief(kind)}; backbone.family knows {known}"
        )
    try:
        if heads is None:
            heads = load.present_heads(where, family, hf)
        module = make_backbone(
            family, hf, heads, dtype=block["dtype"], stack=block["stack"], remat=block["remat"],
            attention=block["attention"], dropout=block["dropout"], rescale=block["rescale"],
        )  # fmt: skip
    except InputError as error:
        shown = where if os.path.isfile(where) else where / "config.json"
        raise InputError(f"{shown}: {error}") from error
    return Backbone(block, where, family, hf, module)


def load_weights(backbone: Backbone, placement: Placement) -> tuple[Backbone, load.Loaded]:
    """Reads the weights to where they live.

    The module is returned too: an untied output table is found only here, and the vocabulary's
    tables are padded to the mesh.
    """
    loaded = load.load_backbone(
        backbone.folder, backbone.family, backbone.hf, dtype=backbone.block["dtype"],
        rescale=backbone.block["rescale"], quantize=backbone.block["quantize"],
        placement=placement,
    )  # fmt: skip
    cfg = backbone.module.cfg
    cfg = dataclasses.replace(
        cfg, rows=placement.padded(cfg.vocab), tied=cfg.tied and loaded.report.tied
    )
    return backbone._replace(module=backbone.module.clone(cfg=cfg)), loaded


class LoadedBackbone(NamedTuple):
    """A backbone and its weights, where they live."""

    backbone: Backbone
    loaded: load.Loaded
    placement: Placement

    def __repr__(self) -> str:
        """Says what it is in one line."""
        block, report, mesh = self.backbone.block, self.loaded.report, self.placement.mesh.shape
        held = f"{report.bytes:,} bytes of {report.fingerprint[:12]}"
        where = f"{mesh['data']}x{mesh['model']} devices"
        return f"LoadedBackbone({self.backbone.family} {block['path']}, {held} on {where})"


class Given(NamedTuple):
    """What a run is handed in place of what its config names, by who calls it from Python."""

    rows: Mapping[str, Rows] | None = None  # by split
    backbone: LoadedBackbone | None = None

    def load(self, backbone: Backbone, placement: Placement) -> tuple[Backbone, load.Loaded]:
        """Reads the weights, unless they are handed over. -> see `load_weights`"""
        if self.backbone is None:
            return load_weights(backbone, placement)
        return self.backbone.backbone, self.backbone.loaded


NOTHING = Given()


def check_template(task: Task, text: str, head: Kind, form: str, slots: int) -> Template:
    """Reads a template and checks it against the task, the head and the prompt's slots."""
    parsed = parse(text)
    check(
        parsed, fields=task.texts, num_slots=slots, needs_mask=head.needs_mask(form),
        # The options of the unified form are classes that may not be known yet.
        has_choices=bool(task.choices or task.options) or form == "unified",
        entities=task.marked, lists_classes=head.LISTS_CLASSES,
    )  # fmt: skip
    read_option(task.option or OPTION)
    head.check_template(parsed)
    if task.predicate and task.markers and not any(part.mark for part in parsed.parts):
        field = task.fields[0]
        raise InputError(
            f"task.markers={','.join(task.markers)} stand around the predicate, and template "
            f"{text!r} does not say where; write {{{field}|marked}}, or empty task.markers"
        )
    return parsed


def facts_of(backbone: Backbone) -> BackboneFacts:
    """Tells a kind of answer what it knows of a backbone."""
    module = backbone.module
    return BackboneFacts(
        backbone.family, str(backbone.folder), module.STYLE, module.cfg.model_heads,
        module.cfg.types, getattr(module.cfg, "start", 0), backbone.block["sentinel"],
    )  # fmt: skip


def ends_of(backbone: Backbone, specials: Specials) -> tuple[int, ...]:
    """Lists what ends a text that is written: the end of a target, and a model's own, but GLM's."""
    own = [] if specials.style == "infilling" else folder.end_ids(backbone.folder, backbone.hf)
    known = range(backbone.module.dims.vocab)  # others are never written
    return tuple(dict.fromkeys([specials.stop, *filter(known.__contains__, own)]))


def asks_of(task: Task, choices: int, verbalizer: Verbalizer | None, specials: Specials) -> Asks:
    """Tells a method what it may know of a task."""
    words = tuple(
        tuple(tuple(ids[ids >= 0].tolist()) for ids in own if (ids >= 0).any())
        for own in (verbalizer.ids if verbalizer else ())
    )
    masked = specials.style == "masked" and specials.masks
    return Asks(len(task.labels) or choices, words, specials.masks[0] if masked else -1)


def check_fit(
    backbone: Backbone, *, prompt: Mapping[str, Any], head: Mapping[str, Any], max_len: int
) -> tuple[Method, Kind]:
    """Makes the method and the head, and checks that they and the length fit the backbone."""
    kind = make_head(**head)
    dims = module_for(backbone, kind).dims
    method = make_prompt(**prompt, dims=dims)
    shift = method.position_shift()
    if max_len + shift > dims.max_len:
        own = "" if shift >= dims.max_len else f"data.max_len to {dims.max_len - shift} or "
        raise InputError(
            f"data.max_len={max_len} + {shift} positions of the prompt exceed the model's "
            f"{dims.max_len}; lower {own}the prompt's length"
        )
    if hasattr(backbone.module, "check_shift"):
        backbone.module.check_shift(shift)
    kind.check_backbone(facts_of(backbone))
    kind.check_length(max_len)
    kind.check_method(prompt["name"], () if method.components() else method.reads)
    return method, kind


def build_scorer(
    backbone: Backbone, task: Task, *, prompt: Mapping[str, Any], head: Mapping[str, Any],
    template: str, form: str, answer: str, eos: bool, max_len: int, max_target: int, multiple: int,
    side: str, batch: int, choices: int = 1, share: tuple[int, int] = (0, 1),
    demos: Demonstrations | None = None, chat: bool = False,
) -> Scorer:  # fmt: skip
    """Puts backbone, method, head and template together and checks that they fit.

    `share` says which part of a batch this process holds, of how many; `chat` lays the template
    into the tokenizer's own chat form.
    """
    method, kind = check_fit(backbone, prompt=prompt, head=head, max_len=max_len)
    facts, slots = facts_of(backbone), method.num_slots()
    kind.check_task(task)
    kind.check_form(form, facts.style)
    tokenizer = backbone.tokenizer or load_tokenizer(backbone.folder)
    if chat:
        check_chat(facts, form, demos)
        template = in_chat(tokenizer, template)
    parsed = check_template(task, template, kind, form, slots)
    check_computed(method, prompt["name"], parsed, facts.style, demos)
    check_metric(task.metric, len(task.labels) or choices, task.kind)
    check_relations(task.metric, task.labels, task.negative)
    laid = kind.lay_out(facts, TaskSetup(task, parsed, form, answer, eos, max_target), tokenizer)
    if laid.verbalizer is not None:
        check_id(int(laid.verbalizer.ids.max()), backbone.module.dims.vocab, tokenizer)
    follows = laid.answer
    if facts.style in FED:
        # What is fed apart from the input begins with a token of the tokenizer or the backbone.
        stem = (start_of(laid.specials, facts.start), *follows.stem)
        follows = follows._replace(stem=stem, slots=method.num_decoder_slots())
    encoder = ExampleEncoder(
        tokenizer, parsed, laid.specials, num_slots=slots, max_len=max_len, num_masks=laid.masks,
        needs_mask=kind.needs_mask(form), num_types=segments(tokenizer, facts.types),
        answer=follows, option=task.option, entities=task.marked,
        names=task.widest if task.options else laid.names,
        markers=task.markers, lists=laid.lists,
        beside=None if demos is None else how_beside(demos, laid, tokenizer),
    )  # fmt: skip
    layout = Layout(
        batch=batch, max_len=max_len, pad_id=laid.specials.pad, side=side, multiple=multiple,
        ends=ends_of(backbone, laid.specials),
        shift=method.position_shift(), decoder_shift=method.decoder_shift(),
        # Choices that the template lists stand in one row.
        num_rows=choices if parsed.uses_choice else 1, host=share[0], hosts=share[1],
        branches=facts.style == "causal" and follows.plan is not None and len(follows.plan.fed) > 0,
    )  # fmt: skip
    method = with_task(method, asks_of(task, choices, laid.verbalizer, laid.specials))
    kind.check_rows(prompt["name"], method.num_rows())
    reads = backbone.block.get("reads", READS[0])
    heads = method.modules() | laid.modules
    model = Model(module_for(backbone, kind), method, heads, reads=reads)
    return Scorer(
        task, laid.head, template, laid.verbalizer, encoder, layout, model, tokenizer, demos
    )


def check_chat(facts: BackboneFacts, form: str, demos: Demonstrations | None) -> None:
    """Raises InputError where a template cannot be a turn of a chat."""
    if facts.style != "causal":
        raise InputError(
            f"task.chat=True is for models that write on, {facts.where} is "
            f"{with_article(facts.family)}; set it to False"
        )
    if form not in ("cloze", "text"):
        raise InputError(f"task.chat=True has no form={form}; take task.form=cloze, or text")
    if demos is not None:
        raise InputError(
            f"task.chat=True lays one turn, and {demos.settings.shown} would show several; set it "
            "to 0, or task.chat=False"
        )
