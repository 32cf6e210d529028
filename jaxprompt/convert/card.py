"""The model card (README.md) of a saved backbone: its origin and its scores."""

from collections.abc import Iterator, Mapping
from typing import Any

# The required fields of a pre-trained backbone; the writer adds "run" and "versions".
CARD_FIELDS = (
    "corpus",  # its texts and their size
    "objective",  # name and settings
    "steps",  # of how many tokens
    "held_out",  # scores on the held-out documents
)
# Those of a backbone that was tuned for a task.
TUNED_FIELDS = (
    "task",  # its name
    "method",  # the prompt that was trained with it
    "start",  # the initial weights
    "metrics",  # dev, test
)
# Those of a backbone that was only converted.
CONVERTED_FIELDS = (
    "source",  # the checkpoint
    "fingerprint",  # of its weights
)


def render_card(title: str, architecture: str, card: Mapping[str, Any]) -> str:
    """Renders a model card as Markdown, with the YAML header that the Hub reads.

    Args:
      title: the heading.
      architecture: the class of transformers.
      card: plain JSON; mappings become tables, lists become items.

    Raises:
      ValueError: if one of CARD_FIELDS is missing, or of TUNED_FIELDS if the card names a task, or
        of CONVERTED_FIELDS if it names a source.
    """
    verb = "pre-trained"
    fields: tuple[str, ...] = CARD_FIELDS
    if "task" in card:
        verb, fields = "tuned", TUNED_FIELDS
    elif "source" in card:
        verb, fields = "converted", CONVERTED_FIELDS
    missing = [field for field in fields if field not in card]
    if missing:
        raise ValueError(f"the card lacks {', '.join(missing)}")
    lines = ["---", "library_name: transformers", "tags: [jaxprompt]", "---", "", f"# {title}", ""]
    lines += [f"`{architecture}`, {verb} with jaxprompt.", ""]
    scalars = {name: value for name, value in card.items() if not isinstance(value, Mapping | list)}
    lines += _table(scalars)
    for name, value in card.items():
        if name not in scalars:
            lines += [f"## {name}", ""]
            lines += _table(value) if isinstance(value, Mapping) else _list(value)
    return "\n".join(lines)


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in _leaves(values)]
    return ["| | |", "|---|---|", *rows, ""] if rows else []


def _list(values: list[Any]) -> list[str]:
    return [*(f"- {_cell(value)}" for value in values), ""]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # A line break or a bar would end a cell of the table.
    return " ".join(text.split()).replace("|", "\\|")
