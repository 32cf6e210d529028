"""The units of a document: its paragraphs or its sentences."""

import re

from jaxprompt.errors import check_extra

# Longer text is no paragraph, and the tokenizer needs some hundred bytes for each character.
_MAX_CHARS = 2**16
_ENDS = {"line": r"[\n\f\u2028\u2029]", "blank": r"\n[^\S\n]*\n|[\f\u2029]"}
PARAGRAPHS = tuple(_ENDS)
UNITS = ("paragraph", "sentence")


def split_units(text: str, *, units: str, paragraphs: str, language: str) -> list[str]:
    """Splits a document into units, of UNITS, without white space around them.

    A paragraph is a "line", or the lines up to a "blank" line, joined by spaces. A sentence never
    crosses paragraphs; `language` is its ISO 639 code. Units longer than 65,536 characters are
    split, at a space if there is one.
    """
    raw = re.split(_ENDS[paragraphs], text.replace("\r\n", "\n").replace("\r", "\n"))
    if paragraphs == "blank":
        raw = [" ".join(part.split()) for part in raw]
    parts = [stripped for part in raw if (stripped := part.strip())]
    if units == "sentence":
        from sentencex import segment

        # One call for all paragraphs: setting up its rules takes longer than most paragraphs.
        sentences = segment(language, "\n\n".join(parts))
        parts = [stripped for sentence in sentences if (stripped := sentence.strip())]
    return [unit for part in parts for unit in _split_long(part)]


def sentencex_version() -> str:
    """Returns the version of the sentence splitter; raises InputError if it is missing."""
    from importlib import metadata

    check_extra("corpus", "sentencex", "corpus.units=sentence")
    return metadata.version("sentencex")


def _split_long(text: str):
    start = 0
    while len(text) - start > _MAX_CHARS:
        space = text.rfind(" ", start, start + _MAX_CHARS)
        end = space if space > start else start + _MAX_CHARS
        yield text[start:end]
        # A space at the split belongs to neither part.
        start = end + (end == space)
    yield text[start:]
