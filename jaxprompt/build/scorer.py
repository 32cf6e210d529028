"""Combines backbone, method, head and template: those of a config, or of an export."""

from jaxprompt.build.backbone import ends_of, facts_of
from jaxprompt.build.method import make_kind, make_method
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.prompt_metadata import ExampleLayout
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.chat import in_chat
from jaxprompt.data.text.demos import Beside, Demonstrations
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.identity import check_id
from jaxprompt.data.text.specials import FED, Specials, start_of
from jaxprompt.data.text.template import OPTION, Template, check, parse, read_option
from jaxprompt.data.text.token_runs import TokenRun
from jaxprompt.data.text.tokenizer import Tokenizer, encode_exact, load_tokenizer, segments
from jaxprompt.data.text.verbalizer import Verbalizer
from jaxprompt.errors import InputError, with_article
from jaxprompt.heads import BackboneFacts, HeadLayout, Kind, TaskSetup
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer, module_for
from jaxprompt.prompts import Method, with_task
from jaxprompt.scoring.metrics import check_metric
from jaxprompt.scoring.relations import check_relations
from jaxprompt.types import Asks, Role


def choose_template(task: Task, head: Kind, style: str, form: str, template: str) -> str:
    """Returns the template: the given one, or the task's for this head and kind of backbone.

    A task in the form of a pre-training task already has its template.
    """
    own = head.template_for(task, style, form)
    text = template or own if form in ("cloze", "text") else own
    if not text:
        fields = " ".join(f"{{{field}}}" for field in task.fields)
        raise InputError(
            f"task {task.name} has no template for a {head.name} head on a {style} backbone; "
            f"set task.template, e.g. '{fields} [mask]'"
        )
    return text


def check_template(task: Task, text: str, head: Kind, form: str, slots: int) -> Template:
    """Parses a template and checks it against the task, the head and the number of slots."""
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
            f"task.markers={','.join(task.markers)} mark the predicate, but template {text!r} "
            f"does not say where; write {{{field}|marked}}, or leave task.markers empty"
        )
    return parsed


def asks_of(task: Task, choices: int, verbalizer: Verbalizer | None, specials: Specials) -> Asks:
    """Returns what a method needs to know of a task."""
    words = tuple(
        tuple(tuple(ids[ids >= 0].tolist()) for ids in own if (ids >= 0).any())
        for own in (verbalizer.ids if verbalizer else ())
    )
    masked = specials.style == "masked" and specials.masks
    return Asks(len(task.labels) or choices, words, specials.masks[0] if masked else -1)


def check_fit(
    backbone: Backbone, *, prompt: OpenBlock, head: OpenBlock, max_len: int
) -> tuple[Method, Kind]:
    """Builds the method and the head, and checks that they and the length fit the backbone."""
    kind = make_kind(head)
    dims = module_for(backbone, kind).dims
    method = make_method(prompt, dims)
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
    kind.check_method(prompt.name, () if method.components() else method.reads)
    return method, kind


def layout_of(config: RunConfig, choices: int = 1) -> ExampleLayout:
    """Returns how a config formats examples, where an example has at most `choices` choices."""
    data, task = config.data, config.task
    return ExampleLayout(
        max_len=data.max_len,
        max_target=data.max_target,
        multiple=data.multiple,
        padding_side=data.padding_side,
        choices=choices,
        form=task.form,
        answer=task.answer,
        eos=task.eos,
    )


def build_scorer(
    backbone: Backbone, task: Task, layout: ExampleLayout, *, prompt: OpenBlock, head: OpenBlock,
    template: str, batch: int, share: tuple[int, int] = (0, 1),
    demos: Demonstrations | None = None, chat: bool = False,
) -> Scorer:  # fmt: skip
    """Combines backbone, method, head and template and checks that they fit.

    Args:
      backbone: the backbone.
      task: the task.
      layout: how examples are formatted.
      prompt: the block of the method.
      head: the block of the head.
      template: the template, "" = the task's.
      batch: the batch size.
      share: which part of a batch this process has, and of how many parts.
      demos: demonstrations, if any.
      chat: applies the tokenizer's chat template.
    """
    method, kind = check_fit(backbone, prompt=prompt, head=head, max_len=layout.max_len)
    form, choices = layout.form, layout.choices
    facts, slots = facts_of(backbone), method.num_slots()
    kind.check_task(task)
    kind.check_form(form, facts.style)
    tokenizer = backbone.tokenizer or load_tokenizer(backbone.folder)
    if chat:
        check_chat(facts, form, demos)
        template = in_chat(tokenizer, template)
    parsed = check_template(task, template, kind, form, slots)
    check_computed(method, prompt.name, parsed, facts.style, demos)
    check_metric(task.metric, len(task.labels) or choices, task.kind)
    check_relations(task.metric, task.labels, task.negative)
    setup = TaskSetup(task, parsed, form, layout.answer, layout.eos, layout.max_target)
    laid = kind.lay_out(facts, setup, tokenizer)
    if laid.verbalizer is not None:
        check_id(int(laid.verbalizer.ids.max()), backbone.module.dims.vocab, tokenizer)
    follows = laid.answer
    if facts.style in FED:
        # What is fed apart from the input begins with a token of the tokenizer or the backbone.
        stem = (start_of(laid.specials, facts.start), *follows.stem)
        follows = follows._replace(stem=stem, slots=method.num_decoder_slots())
    encoder = ExampleEncoder(
        tokenizer, parsed, laid.specials, num_slots=slots, max_len=layout.max_len,
        num_masks=laid.masks, needs_mask=kind.needs_mask(form),
        num_types=segments(tokenizer, facts.types), answer=follows, option=task.option,
        entities=task.marked, markers=task.markers, lists=laid.lists,
        names=task.widest if task.options else laid.names,
        beside=None if demos is None else how_beside(demos, laid, tokenizer),
    )  # fmt: skip
    batches = Layout(
        batch=batch, max_len=layout.max_len, pad_id=laid.specials.pad, side=layout.padding_side,
        multiple=layout.multiple, ends=ends_of(backbone, laid.specials),
        shift=method.position_shift(), decoder_shift=method.decoder_shift(),
        # Choices that the template lists stand in one row.
        num_rows=choices if parsed.uses_choice else 1, host=share[0], hosts=share[1],
        branches=facts.style == "causal" and follows.plan is not None and len(follows.plan.fed) > 0,
    )  # fmt: skip
    method = with_task(method, asks_of(task, choices, laid.verbalizer, laid.specials))
    kind.check_rows(prompt.name, method.num_rows())
    last_layer = backbone.config.last_layer
    heads = method.modules() | laid.modules
    model = Model(module_for(backbone, kind), method, heads, last_layer=last_layer)
    return Scorer(
        task, laid.head, template, laid.verbalizer, encoder, batches, model, tokenizer, demos
    )


def check_chat(facts: BackboneFacts, form: str, demos: Demonstrations | None) -> None:
    """Raises InputError if a template cannot be a turn of a chat."""
    if facts.style != "causal":
        raise InputError(
            f"task.chat=True needs a generative model, but {facts.where} is "
            f"{with_article(facts.family)}; set it to False"
        )
    if form not in ("cloze", "text"):
        raise InputError(f"task.chat=True does not support task.form={form}; use cloze or text")
    if demos is not None:
        raise InputError(
            f"task.chat=True formats one turn, but {demos.settings.shown} would add several; set "
            "it to 0, or set task.chat=False"
        )


def check_computed(
    method: Method, name: str, template: Template, style: str, demos: Demonstrations | None
) -> None:
    """Raises InputError if a prompt that is computed from the input does not fit the template.

    `name` is the method's in the config, `style` the backbone's.
    """
    if "encoder" not in method.reads:
        return
    if demos is not None:
        raise InputError(
            f"{demos.settings.shown} adds other texts to the input, but prompt.name={name} "
            "computes its prompt from the input; set it to 0, or use another method"
        )
    before = [part.kind for part in template.parts if part.kind != "mask"]
    if style == "causal" and method.num_slots() and before[-1:] == ["soft"]:
        raise InputError(
            f"task.template={template.source!r} ends in [soft], where this backbone predicts; with "
            f"prompt.name={name} a short text has fewer soft tokens: put [soft] before the text, "
            "or add words after it"
        )


def how_beside(demos: Demonstrations, laid: HeadLayout, tokenizer: Tokenizer) -> Beside:
    """Returns how demonstrations are formatted, each with the first word of its class.

    For a left-to-right model they precede the example, and each ends with a line break. For a
    masked model each ends with the token that ends an input; T5's follow a space.
    """
    specials, settings = laid.specials, demos.settings
    if laid.verbalizer is None:
        raise InputError(
            f"{settings.shown} shows label words, which head.name={laid.head.name} does not use; "
            "use head.name=verbalizer, or set it to 0"
        )
    words = [ids[0][ids[0] >= 0].tolist() for ids in laid.verbalizer.ids]
    between = [*specials.end] if specials.style == "masked" else []
    if specials.style == "causal":
        between = encode_exact(tokenizer, "\n")
    role = Role.SPECIAL if specials.style == "masked" else Role.HARD
    return Beside(
        words, (TokenRun(between, role, 0),) if between else (),
        first=settings.per_class == 0 or specials.style == "causal", drops=settings.total > 0,
        whole=settings.exact > 0, max_demo_tokens=settings.max_demo_tokens,
        max_example_tokens=settings.max_example_tokens,
    )  # fmt: skip
