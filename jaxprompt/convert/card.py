"""The model card (README.md) of a saved backbone: its origin and its scores."""

from collections.abc import Iterator, Mapping
from typing import Any

# What every card holds, next to "run" and "versions", which the writer adds.
CARD_FIELDS = (
    "corpus",  # its texts, their size
    "objective",  # name and settings
    "steps",  # of how many tokens
    "held_out",  # scores on the documents held out
)
# The same of one that was tuned for a task.
TUNED_FIELDS = (
    "task",  # its name
    "method",  # what else was learned beside the weights
    "start",  # the weights that it started from
    "metrics",  # dev, test
)
# The same of one that was read and written as it is.
CONVERTED_FIELDS = (
    "source",  # what was read
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
    how = "pre-trained"
    fields: tuple[str, ...] = CARD_FIELDS
    if "task" in card:
        how, fields = "tuned", TUNED_FIELDS
    elif "source" in card:
        how, fields = "converted", CONVERTED_FIELDS
    missing = [field for field in fields if field not in card]
    if missing:
        raise ValueError(f"the card lacks {', '.join(missing)}")
    lines = ["---", "library_name: transformers", "tags: [jaxprompt]", "---", "", f"# {title}", ""]
    lines += [f"`{architecture}`, {how} with jaxprompt.", ""]
    single = {name: value for name, value in card.items() if not isinstance(value, Mapping | list)}
    lines += _table(single)
    for name, value in card.items():
        if name not in single:
            lines += [f"## {name}", ""]
            lines += _table(value) if isinstance(value, Mapping) else _items(value)
    return "\n".join(lines)


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {_plain(name)} | {_plain(value)} |" for name, value in _leaves(values)]
    return ["| | |", "|---|---|", *rows, ""] if rows else []


def _items(values: list[Any]) -> list[str]:
    return [*(f"- {_plain(value)}" for value in values), ""]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # A line break or a bar would end the cell of the table.
    return " ".join(text.split()).replace("|", "\\|")
