"""Combines backbone, method, head and template: those of a config, or of an export."""

import dataclasses

from jaxprompt.build.backbone import backbone_facts, end_token_ids
from jaxprompt.build.method import cached_head, cached_method
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.prompt_metadata import ExampleLayout
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.chat.conversation import ConversationEncoder
from jaxprompt.data.text.chat.render import in_chat
from jaxprompt.data.text.demos import DemoLayout, Demonstrations
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.identity import check_id
from jaxprompt.data.text.specials import FED, Specials, answer_start
from jaxprompt.data.text.template import OPTION, Template, parse, read_option, validate_template
from jaxprompt.data.text.token_runs import TokenRun
from jaxprompt.data.text.tokenizer import Tokenizer, encode_exact, load_tokenizer, num_segments
from jaxprompt.data.text.verbalizer import Verbalizer
from jaxprompt.errors import InputError, with_article
from jaxprompt.heads import BackboneInfo, HeadLayout, Kind, TaskSetup
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer, module_for
from jaxprompt.parallel.sharding import Placement
from jaxprompt.prompts import Method, with_task
from jaxprompt.scoring.metrics import check_metric
from jaxprompt.scoring.relations import check_relations
from jaxprompt.types import Role, TaskInfo

_CPU_MULTIPLE = 8  # of the lengths of batches, where the config has 0


def choose_template(task: Task, head: Kind, style: str, form: str, template: str) -> str:
    """Returns the template: the given one, or the task's for this head and kind of backbone.

    A task in the form of a pre-training task already has its template.
    """
    default = head.template_for(task, style, form)
    chosen = template or default if form in ("cloze", "text") else default
    if not chosen:
        fields = " ".join(f"{{{field}}}" for field in task.fields)
        raise InputError(
            f"task {task.name} has no template for a {head.name} head on a {style} backbone; "
            f"set task.template, e.g. '{fields} [mask]'"
        )
    return chosen


def check_template(task: Task, text: str, head: Kind, form: str, slots: int) -> Template:
    """Parses a template and checks it against the task, the head and the number of slots."""
    template = parse(text)
    validate_template(
        template,
        fields=task.texts,
        num_slots=slots,
        needs_mask=head.needs_mask(form),
        # The options of the unified form are classes that may not be known yet.
        has_choices=bool(task.choices or task.options) or form == "unified",
        entities=task.marked,
        lists_classes=head.LISTS_CLASSES,
    )
    read_option(task.option or OPTION)
    head.check_template(template)
    if task.predicate and task.markers and not any(part.mark for part in template.parts):
        raise InputError(
            f"task.markers={','.join(task.markers)} mark the predicate, but template {text!r} "
            f"does not say where; write {{{task.fields[0]}|marked}}, or leave task.markers empty"
        )
    return template


def task_info(
    task: Task, choices: int, verbalizer: Verbalizer | None, specials: Specials
) -> TaskInfo:
    """Returns what a method needs to know of a task."""
    words = tuple(
        tuple(tuple(ids[ids >= 0].tolist()) for ids in class_words if (ids >= 0).any())
        for class_words in (verbalizer.ids if verbalizer else ())
    )
    masked = specials.style == "masked" and specials.masks
    return TaskInfo(len(task.labels) or choices, words, specials.masks[0] if masked else -1)


def check_fit(
    backbone: Backbone, *, prompt: OpenBlock, head: OpenBlock, max_len: int
) -> tuple[Method, Kind]:
    """Builds the method and the head, and checks that they and the length fit the backbone."""
    head_kind = cached_head(head)
    dims = module_for(backbone, head_kind).dims
    method = cached_method(prompt, dims)
    shift = method.position_shift()
    if max_len + shift > dims.max_len:
        option = "" if shift >= dims.max_len else f"data.max_len to {dims.max_len - shift} or "
        raise InputError(
            f"data.max_len={max_len} + {shift} positions of the prompt exceed the model's "
            f"{dims.max_len}; lower {option}the prompt's length"
        )
    if hasattr(backbone.module, "check_shift"):
        backbone.module.check_shift(shift)
    head_kind.check_backbone(backbone_facts(backbone))
    head_kind.check_length(max_len)
    head_kind.check_method(prompt.name, () if method.components() else method.reads)
    return method, head_kind


def _start_answer(
    backbone: Backbone, facts: BackboneInfo, head_layout: HeadLayout, method: Method
) -> HeadLayout:
    """Adds what decoder inputs begin with: the start token of the tokenizer or the backbone.

    Raises InputError if a free text would exceed the positions of an encoder-decoder.
    """
    start = (answer_start(head_layout.specials, facts.start), *facts.first)
    answer = head_layout.answer._replace(
        stem=(*start, *head_layout.answer.stem),
        num_start=len(start),
        slots=method.num_decoder_slots(),
    )
    dims = backbone.module.dims
    fixed = answer.slots + len(answer.stem) + method.decoder_shift()
    if dims.decoder_layers and fixed + answer.max_tokens > dims.max_len:
        raise InputError(
            f"data.max_target={answer.max_tokens} + {fixed} positions before the target exceed the "
            f"decoder's {dims.max_len}; lower data.max_target or the prompt's decoder"
        )
    return head_layout._replace(answer=answer)


def example_layout(config: RunConfig, choices: int = 1) -> ExampleLayout:
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
    backbone: Backbone,
    task: Task,
    layout: ExampleLayout,
    *,
    prompt: OpenBlock,
    head: OpenBlock,
    template: str,
    batch: int,
    placement: Placement | None = None,
    demos: Demonstrations | None = None,
    chat: bool = False,
) -> Scorer:
    """Combines backbone, method, head and template and checks that they fit.

    Args:
      backbone: the backbone.
      task: the task.
      layout: how examples are formatted.
      prompt: the block of the method.
      head: the block of the head.
      template: the template, "" = the task's.
      batch: the batch size.
      placement: the mesh, which sets the lengths of batches, and the part of a batch that this
        process has; None = a CPU.
      demos: demonstrations, if any.
      chat: applies the tokenizer's chat template.
    """
    method, head_kind = check_fit(backbone, prompt=prompt, head=head, max_len=layout.max_len)
    form, choices = layout.form, layout.choices
    facts, slots = backbone_facts(backbone), method.num_slots()
    head_kind.check_task(task)
    head_kind.check_form(form, facts.style)
    tokenizer = backbone.tokenizer or load_tokenizer(backbone.folder)
    if chat:
        check_chat(facts, form, demos)
        template = in_chat(tokenizer, template)
    parsed_template = check_template(task, template, head_kind, form, slots)
    if task.messages:
        check_conversations(facts, parsed_template, chat, demos)
    check_instance_prompt(method, prompt.name, parsed_template, facts.style, demos)
    check_metric(task.metric, len(task.labels) or choices, task.kind)
    check_relations(task.metric, task.labels, task.negative)
    setup = TaskSetup(task, parsed_template, form, layout.answer, layout.eos, layout.max_target)
    head_layout = head_kind.lay_out(facts, setup, tokenizer)
    if head_layout.verbalizer is not None:
        check_id(int(head_layout.verbalizer.ids.max()), backbone.module.dims.vocab, tokenizer)
    if facts.style in FED:
        head_layout = _start_answer(backbone, facts, head_layout, method)
    encoder = _example_encoder(
        tokenizer, setup, head_kind, head_layout, facts, layout.max_len, slots, demos
    )
    batch_layout = _batch_layout(backbone, layout, method, head_layout, parsed_template, batch)
    batch_layout = batch_layout.with_ends(encoder.turn_ends)
    if placement is not None:
        batch_layout = placed_layout(batch_layout, layout.multiple, placement)
    info = task_info(task, choices, head_layout.verbalizer, head_layout.specials)
    method = with_task(method, info)
    head_kind.check_rows(prompt.name, method.num_rows())
    last_layer = backbone.config.last_layer
    heads = method.modules() | head_layout.modules
    return Scorer(
        task,
        head_layout.head,
        template,
        head_layout.verbalizer,
        encoder,
        batch_layout,
        Model(module_for(backbone, head_kind), method, heads, last_layer=last_layer),
        tokenizer,
        demos,
    )


def _batch_layout(
    backbone: Backbone,
    layout: ExampleLayout,
    method: Method,
    head_layout: HeadLayout,
    template: Template,
    batch: int,
) -> Layout:
    plan = head_layout.answer.plan
    return Layout(
        batch=batch,
        max_len=layout.max_len,
        pad_id=head_layout.specials.pad,
        side=layout.padding_side,
        multiple=layout.multiple or _CPU_MULTIPLE,
        ends=end_token_ids(backbone, head_layout.specials),
        shift=method.position_shift(),
        decoder_shift=method.decoder_shift(),
        # If the template lists the choices, they are one sequence.
        num_rows=layout.choices if template.uses_choice else 1,
        branches=backbone.module.STYLE == "causal" and plan is not None and len(plan.fed) > 0,
    )


def placed_layout(layout: Layout, multiple: int, placement: Placement) -> Layout:
    """Returns a layout with the lengths of the mesh's devices, and the rows of this process.

    `multiple` is that of the config. An accelerator compiles longer than a CPU and is faster, so
    its lengths are fewer.
    """
    host, hosts = placement.batch_part()
    multiple = layout.multiple if placement.target.platform == "cpu" else multiple
    return dataclasses.replace(layout, multiple=multiple, host=host, hosts=hosts)


def _example_encoder(
    tokenizer: Tokenizer,
    setup: TaskSetup,
    kind: Kind,
    head_layout: HeadLayout,
    facts: BackboneInfo,
    max_len: int,
    slots: int,
    demos: Demonstrations | None,
) -> ExampleEncoder:
    task = setup.task
    return ExampleEncoder(
        tokenizer,
        setup.template,
        head_layout.specials,
        num_slots=slots,
        max_len=max_len,
        num_masks=head_layout.masks,
        needs_mask=kind.needs_mask(setup.form),
        num_types=num_segments(tokenizer, facts.types),
        answer=head_layout.answer,
        option=task.option,
        entities=task.marked,
        markers=task.markers,
        lists=head_layout.lists,
        names=task.widest if task.options else head_layout.names,
        demo_layout=None if demos is None else demo_format(demos, head_layout, tokenizer),
        conversations=_conversation_encoder(tokenizer, task, head_layout.specials),
    )


def _conversation_encoder(
    tokenizer: Tokenizer, task: Task, specials: Specials
) -> ConversationEncoder | None:
    if not task.messages:
        return None
    return ConversationEncoder(tokenizer, specials.stop, begins_with_bos=bool(specials.cls))


def check_conversations(
    facts: BackboneInfo, template: Template, chat: bool, demos: Demonstrations | None
) -> None:
    """Raises InputError if a backbone, a template or another field does not suit conversations."""
    if facts.style != "causal":
        raise InputError(
            f"task.messages needs a model with a chat template that reads left to right, but "
            f"{facts.where} is {with_article(facts.family)}; use a GPT-2 or a Llama"
        )
    if chat:
        raise InputError(
            "task.messages applies the chat template to all messages, task.chat=True to one turn; "
            "set task.chat=False"
        )
    if demos is not None:
        raise InputError(
            f"{demos.settings.field} adds demonstrations, which conversations do not support; set "
            "it to 0, and write them as messages"
        )
    kinds = [part.kind for part in template.parts if part.kind != "mask"]
    if kinds.count("field") != 1 or kinds[-1] != "field":
        raise InputError(
            f"task.template={template.source!r} must end with {{messages}}, which the chat "
            "template writes; e.g. '[soft] {messages}'"
        )


def check_chat(facts: BackboneInfo, form: str, demos: Demonstrations | None) -> None:
    """Raises InputError if a template cannot be a turn of a chat."""
    field = "" if demos is None else demos.settings.field
    if facts.style != "causal":
        raise InputError(
            f"task.chat=True needs a generative model, but {facts.where} is "
            f"{with_article(facts.family)}; set it to False"
        )
    if form not in ("cloze", "text"):
        raise InputError(f"task.chat=True does not support task.form={form}; use cloze or text")
    if field:
        raise InputError(
            f"task.chat=True formats one turn, but {field} would add several; set it to 0, or set "
            "task.chat=False"
        )


def check_instance_prompt(
    method: Method, name: str, template: Template, style: str, demos: Demonstrations | None
) -> None:
    """Raises InputError if a prompt that is computed from the input does not fit the template.

    `name` is the method's in the config, `style` the backbone's.
    """
    if "encoder" not in method.reads:
        return
    if demos is not None:
        raise InputError(
            f"{demos.settings.field} adds other texts to the input, but prompt.name={name} "
            "computes its prompt from the input; set it to 0, or use another method"
        )
    input_parts = [part.kind for part in template.parts if part.kind != "mask"]
    if style == "causal" and method.num_slots() and input_parts[-1:] == ["soft"]:
        raise InputError(
            f"task.template={template.source!r} ends in [soft], where this backbone predicts; with "
            f"prompt.name={name} a short text has fewer soft tokens: put [soft] before the text, "
            "or add words after it"
        )


def demo_format(demos: Demonstrations, head_layout: HeadLayout, tokenizer: Tokenizer) -> DemoLayout:
    """Returns how demonstrations are formatted, each with the first word of its class.

    For a left-to-right model they precede the example, and each ends with a line break. For a
    masked model each ends with the token that ends an input; T5's follow a space.
    """
    specials, settings = head_layout.specials, demos.settings
    assert head_layout.verbalizer is not None  # by `check_demos`
    words = [ids[0][ids[0] >= 0].tolist() for ids in head_layout.verbalizer.ids]
    separator = [*specials.end] if specials.style == "masked" else []
    if specials.style == "causal":
        separator = encode_exact(tokenizer, "\n")
    role = Role.SPECIAL if specials.style == "masked" else Role.HARD
    return DemoLayout(
        words,
        (TokenRun(separator, role, 0),) if separator else (),
        demos_first=settings.per_class == 0 or specials.style == "causal",
        drop_unfit=settings.total > 0,
        never_cut=settings.exact > 0,
        max_demo_tokens=settings.max_demo_tokens,
        max_example_tokens=settings.max_example_tokens,
    )
