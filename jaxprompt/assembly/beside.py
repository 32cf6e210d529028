"""What stands beside an example: demonstrations, and soft tokens computed from its text."""

from typing import Any

from jaxprompt.data.text.demos import Beside, Demonstrations
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.token_runs import TokenRun
from jaxprompt.data.text.tokenizer import encode_exact
from jaxprompt.errors import InputError
from jaxprompt.heads import HeadLayout
from jaxprompt.prompts import Method
from jaxprompt.types import Role


def check_computed(
    method: Method, name: str, template: Template, style: str, demos: Demonstrations | None
) -> None:
    """Raises InputError where a prompt that is computed from the input cannot stand beside it.

    `name` is that of the config, `style` that of the backbone.
    """
    if "encoder" not in method.reads:
        return
    if demos is not None:
        raise InputError(
            f"{demos.settings.shown} puts other texts into the input, and prompt.name={name} "
            "computes its prompt from the input; set it to 0, or take another method"
        )
    before = [part.kind for part in template.parts if part.kind != "mask"]
    if style == "causal" and method.num_slots() and before[-1:] == ["soft"]:
        raise InputError(
            f"task.template={template.source!r} ends in [soft], where this backbone reads; with "
            f"prompt.name={name} a short text has fewer soft tokens: put [soft] before the text, "
            "or words after it"
        )


def how_beside(demos: Demonstrations, laid: HeadLayout, tokenizer: Any) -> Beside:
    """Says how demonstrations are laid for a kind of backbone, each with its class's first word.

    A left-to-right model reads them in front of the example; a line break ends each. On a masked
    model the token that ends an input does, and T5's stand behind a space.
    """
    specials, settings = laid.specials, demos.settings
    words = [ids[0][ids[0] >= 0].tolist() for ids in laid.verbalizer.ids]
    between = [*specials.end] if specials.style == "masked" else []
    if specials.style == "causal":
        between = encode_exact(tokenizer, "\n")
    role = Role.SPECIAL if specials.style == "masked" else Role.HARD
    return Beside(
        words, (TokenRun(between, role, 0),) if between else (),
        first=settings.per_class == 0 or specials.style == "causal", drops=settings.total > 0,
        whole=settings.exact > 0, limit=settings.limit, own_limit=settings.own_limit,
    )  # fmt: skip
