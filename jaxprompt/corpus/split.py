"""The units of a document: its paragraphs or its sentences."""

import re

from jaxprompt.errors import InputError

# A longer run of text is no paragraph; the tokenizer needs some hundred bytes for each character.
_LONGEST = 2**16
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
        # One call for all of them: each call sets up its rules, longer than most paragraphs take.
        found = _segment()(language, "\n\n".join(parts))
        parts = [stripped for part in found if (stripped := part.strip())]
    return [piece for part in parts for piece in _pieces(part)]


def check_sentences() -> str:
    """Returns the version of the sentence splitter; raises InputError if it is missing."""
    from importlib import metadata

    _segment()
    return metadata.version("sentencex")


def _segment():
    try:
        from sentencex import segment
    except ImportError:
        raise InputError("corpus.units=sentence needs sentencex: pip install sentencex") from None
    return segment


def _pieces(text: str):
    start = 0
    while len(text) - start > _LONGEST:
        space = text.rfind(" ", start, start + _LONGEST)
        end = space if space > start else start + _LONGEST
        yield text[start:end]
        # The space that is cut at belongs to neither piece.
        start = end + (end == space)
    yield text[start:]
