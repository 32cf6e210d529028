"""Encoders of single templates, and encoded rows as text."""

from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.specials import SENTINEL, read_specials
from jaxprompt.data.text.template import parse
from jaxprompt.types import Role

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LETTERS = {role.value: role.name[0] for role in Role} | {Role.SPECIAL.value: "*"}


def make_encoder(tokenizer, template, style="masked", *, eos=True, **changes):
    """Makes an encoder of a template, without slots, for up to 64 tokens in two segments."""
    parsed = parse(template)
    specials = read_specials(
        tokenizer, style, eos=eos, sentinel=SENTINEL, num_masks=int(parsed.has_mask)
    )
    settings = {"num_slots": 0, "num_masks": 1, "max_len": 64, "needs_mask": False, "num_types": 2}
    return ExampleEncoder(tokenizer, parsed, specials, **settings | changes)


def shown(tokenizer, row):
    """Returns the tokens of a row in one line, slots as their numbers."""
    tokens = tokenizer.convert_ids_to_tokens(row.ids.tolist())
    slots = row.slot.tolist()
    return " ".join(t if s < 0 else str(s) for t, s in zip(tokens, slots, strict=True))


def roles(row):
    """Returns a letter for the role of each token."""
    return "".join(LETTERS[r] for r in row.roles.tolist())
