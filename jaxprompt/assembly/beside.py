"""How demonstrations are laid beside examples, by the kind of backbone."""

from typing import Any

from jaxprompt.data.demos import Beside, Demonstrations
from jaxprompt.data.token_runs import TokenRun
from jaxprompt.data.tokenizer import encode_exact
from jaxprompt.heads import HeadLayout
from jaxprompt.types import Role


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
