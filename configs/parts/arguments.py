"""Reads the argument of a config file, such as `rte,prefix,bert-large`."""

from jaxprompt.errors import InputError, check_known


def read_argument(text, **parts):
    """Returns the parts of an argument, with the default of each one that is left out.

    Args:
      text: the parts, with a comma between two.
      parts: by the name of a part, in order, its default and the values that it can have.
    """
    words = text.split(",")
    if len(words) > len(parts):
        raise InputError(f"{text!r} has {len(words)} parts; use {','.join(parts)}")
    words += [""] * (len(parts) - len(words))
    return [
        check_known(f"the {name.lower()}", word or default, values)
        for word, (name, (default, values)) in zip(words, parts.items(), strict=True)
    ]
