"""What an encoded row holds, as text."""

from jaxprompt.types import Role

LETTERS = {role.value: role.name[0] for role in Role} | {Role.SPECIAL.value: "*"}


def shown(tokenizer, row):
    """Writes the tokens of a row in one line, slots as their numbers."""
    tokens = tokenizer.convert_ids_to_tokens(row.ids.tolist())
    slots = row.slot.tolist()
    return " ".join(t if s < 0 else str(s) for t, s in zip(tokens, slots, strict=True))


def roles(row):
    """Writes a letter for the role of each token."""
    return "".join(LETTERS[r] for r in row.roles.tolist())
