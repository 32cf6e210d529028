r"""Templates: a line of text that says where fields, masks, soft tokens and hard words stand.

    {sentence} It was [mask].            a text field, hard words, the position that the head reads
    {premise|chop} ? [mask] , {hypothesis|lower}
    [soft*4] [cls] {text} [soft*16]      4 slots in front of [CLS], 16 after the text
    {question} {choices} Answer: [mask]  the choices lettered, "A. first B. second"
    {article} {question|whole} {choices} what does not fit is cut from the article alone
    {premise} [sep] {choice}             one row a choice
    {text|soft} {entity1} is the [mask] of {entity2}    entities between soft tokens, then by name
    {text} Class: [classes].             the classes listed, "negative, positive"
    ["<|user|>\n"]{text}["<|end|>\n"][mask]    text as it is, line breaks and special tokens too

In braces: a field, `choice` or `choices`, and modifiers after `|`, applied left to right: `chop`
drops the last character, `lower` lower-cases the first, `strip` strips white space; `whole` keeps
a field from being cut. Of a task with entities, `marked` puts words around those that stand in the
field, `soft` two slots each: those of {entity1}, then of {entity2}. In brackets: `mask`, `soft`
(all slots of the prompt), `soft*n` (the next n), `classes` (for a head that reads them), `cls`,
`sep`, and text in double quotes, written as JSON has it, in which names of special tokens are these
tokens. Without `[cls]` or a closing `[sep]` the tokenizer's own are put around. Slots that the
template does not place stand in front of [CLS].
White space in front of all puts a space before the first text. A backslash makes `{ } [ ] \`
literal.

How {choices} writes each of them is a small template of its own, "{name}. {text}"; see
`read_option`.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxprompt.errors import InputError, nearest

MODIFIERS: dict[str, Callable[[str], str]] = {
    "chop": lambda text: text[:-1],
    "lower": lambda text: text[:1].lower() + text[1:],
    "strip": str.strip,
    "whole": str,  # changes nothing: it is for the encoder, and so are those of MARKS
    "marked": str,
    "soft": str,
}
MARKS = ("marked", "soft")  # how the entities of a field are marked: by words, by slots
BRACKETS = ("mask", "soft", "soft*n", "classes", "cls", "sep", '"..."')
OPTION = " {name}. {text}"
_ONCE = ("mask", "cls", "classes")  # kinds of parts of which a template has one at most

_LEXER = re.compile(
    # The first that fits counts: an escape, then text in quotes, which may hold brackets itself.
    r"\\(?P<escape>[{}\[\]\\])"
    r'|\[(?P<exact>"(?:[^"\\]|\\.)*")\]'
    r"|\{(?P<brace>[^{}\[\]]*)\}"
    r"|\[(?P<bracket>[^{}\[\]]*)\]"
    r"|(?P<stray>[{}\[\]])"
    r"|(?P<literal>.)",
    re.DOTALL,
)


class Part(NamedTuple):
    """One element of a template."""

    kind: str  # words exact field choice choices option mask soft classes cls sep
    text: str = ""  # the hard words, the text as it is, or the name of a field
    modifiers: tuple[str, ...] = ()
    number: int = 0  # of slots of a soft part, 0 = all; of the choice an option is, from 0
    space: bool = False  # white space stands before it

    @property
    def mark(self) -> str:
        """How entities in it are marked, one of MARKS; "" = not at all."""
        return next((name for name in self.modifiers if name in MARKS), "")


class Template(NamedTuple):
    """A parsed template."""

    source: str
    parts: tuple[Part, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the text fields, in order, without repeats."""
        return tuple(dict.fromkeys(p.text for p in self.parts if p.kind == "field"))

    @property
    def has_mask(self) -> bool:
        """Whether the template has a [mask]."""
        return any(p.kind == "mask" for p in self.parts)

    @property
    def uses_choice(self) -> bool:
        """Whether an example becomes one row per choice."""
        return any(p.kind == "choice" for p in self.parts)

    @property
    def lists_choices(self) -> bool:
        """Whether a row contains all choices of its example."""
        return any(p.kind == "choices" for p in self.parts)

    def writes_space(self, style: str, one_space: bool) -> bool:
        """Returns whether the space before an answer is written as it is.

        It is not if the answer begins a decoder's input, or if any white space is one space, which
        then belongs to the answer: see `completed`.
        """
        before = [*itertools.takewhile(lambda part: part.kind != "mask", self.parts)][-1:]
        written = any(part.kind == "exact" and part.text[-1:].isspace() for part in before)
        return written and style != "seq2seq" and not one_space

    def completed(self, *, cls: bool, soft: bool, mask: bool, one_space: bool) -> list[Part]:
        """Adds the parts that an input needs at its beginning, and a [mask] at its end.

        A space at the end of literal text moves to the text after it, because tokenizers have a
        word and the space before it as one token. With `one_space` any white space is such a space.
        """
        own = {part.kind for part in self.parts}
        front = [
            kind for kind, asked in (("soft", soft), ("cls", cls)) if asked and kind not in own
        ]
        last = len(self.parts) - (self.parts[-1].kind == "sep")
        blank = [Part("mask")] * (mask and "mask" not in own)
        parts = [*map(Part, front), *self.parts[:last], *blank, *self.parts[last:]]
        for i, (part, text) in enumerate(itertools.pairwise(parts)):
            if part.kind == "exact" and text.kind in ("words", "field", "choice", "option"):
                bare = part.text.rstrip() if one_space else part.text.removesuffix(" ")
                parts[i] = part._replace(text=bare)
                parts[i + 1] = text._replace(space=text.space or bare != part.text)
        return parts

    def slots_around(self, entities: int) -> int:
        """Returns the number of slots around so many entities."""
        return 2 * entities * any(part.mark == "soft" for part in self.parts)


def modify(text: str, modifiers: Iterable[str]) -> str:
    """Applies modifiers left to right."""
    for name in modifiers:
        text = MODIFIERS[name](text)
    return text


def get_field(template: "Template", fields: Mapping[str, str], name: str) -> str:
    """Returns the text of a field. Raises InputError if an example has no such field."""
    if name not in fields:
        raise InputError(
            f"template {template.source!r}: an example has no field {name!r}; "
            f"{nearest(name, fields)}"
        )
    return fields[name]


def parse(text: str) -> Template:
    """Parses a template. Raises InputError if the text does not follow the grammar."""
    parts: list[Part] = []
    words = ""  # hard words read since the last part, white space around them included
    for match in _LEXER.finditer(text):
        kind = match.lastgroup or ""  # all alternatives have names
        value = match.group(kind)
        if kind in ("escape", "literal"):
            words += value
        elif kind == "stray":
            raise InputError(
                f"template {text!r}: unbalanced {value!r} at character {match.start()}; close it, "
                f"or write \\{value} for the literal character"
            )
        else:
            parts += _hard_words(words)
            read = _READERS[kind]
            # Byte-level tokenizers tell "word" from " word", so a part keeps the space before it.
            parts.append(read(value, text)._replace(space=words[-1:].isspace()))
            words = ""
    return Template(text, tuple(parts + _hard_words(words)))


def read_option(text: str) -> Template:
    """Reads how one choice is written: {name}, its label word, and {text}, each once."""
    option = parse(text)
    found = [part.text for part in option.parts if part.kind == "field" and not part.modifiers]
    words = [part for part in option.parts if part.kind == "words"]
    if sorted(found) != ["name", "text"] or len(words) + 2 < len(option.parts):
        raise InputError(
            f"task.option={text!r} must contain {{name}} and {{text}} once each, and otherwise "
            f"only words; e.g. {OPTION!r}"
        )
    return option


def with_options(template: Template, option: Template, names: Sequence[str]) -> Template:
    """Replaces {choices} by one option per name. Adjacent hard words become one part."""
    parts: list[Part] = []
    space = False  # white space at the end of an option
    for part in template.parts:
        if part.kind != "choices":
            parts.append(part._replace(space=part.space or space))
            space = False
            continue
        space = part.space
        for number, name in enumerate(names):
            made = {
                "name": Part("words", name),
                "text": Part("option", modifiers=part.modifiers, number=number),
            }
            for own in option.parts:
                new = made[own.text] if own.kind == "field" else own
                parts.append(new._replace(space=own.space or space))
                space = False
            space = option.source != option.source.rstrip()
    return template._replace(parts=tuple(_joined(parts)))


def _joined(parts: Iterable[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        if part.kind == "words" and joined and joined[-1].kind == "words":
            before = joined.pop()
            part = before._replace(text=before.text + " " * part.space + part.text)
        joined.append(part)
    return joined


def validate_template(
    template: Template,
    *,
    fields: Iterable[str],
    num_slots: int,
    needs_mask: bool,
    has_choices: bool,
    entities: int = 0,
    lists_classes: bool = False,
) -> None:
    """Raises InputError if a template does not fit its task, its prompt or its head.

    `entities` are those in the first of `fields`.
    """
    known = tuple(fields)
    where = f"template {template.source!r}"
    count = {kind: sum(p.kind == kind for p in template.parts) for kind in _ONCE}
    for name in template.fields:
        if name not in known:
            raise InputError(f"{where}: unknown field {name!r}; {nearest(name, known)}")
    if not template.fields:
        raise InputError(f"{where} has no text field; write one in braces, {nearest('', known)}")
    if not has_choices and any(p.kind in ("choice", "choices") for p in template.parts):
        raise InputError(f"{where} uses choices, but the task has none; remove them")
    if count["mask"] > 1:
        raise InputError(
            f"{where} has {count['mask']} [mask]; keep 1 (it is repeated for words of several "
            "tokens)"
        )
    if needs_mask and not count["mask"]:
        raise InputError(f"{where} has no [mask], which the head reads; add one")
    if lists_classes and count["classes"] != 1:
        raise InputError(
            f"{where} has {count['classes']} lists of classes; write 1 [classes], which the head "
            f"reads, e.g. '{{text}} Class: [classes].'"
        )
    if count["classes"] and not lists_classes:
        raise InputError(f"{where} has [classes], which this head does not read; remove it")
    if count["cls"] > 1:
        raise InputError(f"{where} has {count['cls']} [cls]; keep at most 1")
    if count["cls"]:
        first = next(p.kind for p in template.parts if p.kind != "soft")
        if first != "cls":
            raise InputError(
                f"{where}: only [soft] may come before [cls]; move everything else after it"
            )
    _check_marks(template, known, entities)
    _check_slots(template, num_slots, entities)


def _check_marks(template: Template, known: Sequence[str], entities: int) -> None:
    where = f"template {template.source!r}"
    marked = [part for part in template.parts if part.mark]
    for part in marked:
        if not entities:
            raise InputError(
                f"{where} marks the entities of {part.text!r}, but the task has none; set "
                f"task.entities to their columns, or remove |{part.mark}"
            )
        if part.text != known[0]:
            raise InputError(
                f"{where} marks the entities of {part.text!r}, but they are in {known[0]!r}; write "
                f"{{{known[0]}|{part.mark}}}"
            )
        if others := [name for name in part.modifiers if name not in (part.mark, "whole")]:
            raise InputError(
                f"{where}: |{others[0]} would move the entities of {part.text!r}; remove it"
            )
    if len(marked) > 1:
        raise InputError(f"{where} marks the entities of {known[0]!r} twice; keep one")


def _hard_words(words: str) -> list[Part]:
    return [Part("words", words.strip(), space=words[0].isspace())] if words.strip() else []


def _check_slots(template: Template, num_slots: int, entities: int) -> None:
    where = f"template {template.source!r}"
    soft = [p.number for p in template.parts if p.kind == "soft"]
    marks = template.slots_around(entities)
    if marks > num_slots:
        raise InputError(
            f"{where} puts {marks} soft tokens around {entities} entities, but the method has only "
            f"{num_slots} slots; use a method with more, or mark them by words: |marked instead of "
            "|soft"
        )
    if soft and not num_slots:
        raise InputError(f"{where} has soft tokens, but the method has 0 slots; remove [soft]")
    if 0 in soft and len(soft) > 1:
        raise InputError(
            f"{where}: [soft] uses all {num_slots} slots; use [soft*n] to place several"
        )
    placed = sum(soft) + marks
    if soft and 0 not in soft and placed != num_slots:
        around = f" ({marks} of them are around entities)" * bool(marks)
        raise InputError(
            f"{where} places {placed} soft tokens, but the prompt has {num_slots} slots; "
            f"make the two equal{around}"
        )


def _read_brace(value: str, source: str) -> Part:
    name, *modifiers = (piece.strip() for piece in value.split("|"))
    if not name:
        raise InputError(f"template {source!r}: empty braces; name a field, or write \\{{ \\}}")
    for modifier in modifiers:
        if modifier not in MODIFIERS:
            raise InputError(
                f"template {source!r}: unknown modifier {modifier!r} of {name!r}; "
                f"{nearest(modifier, MODIFIERS)}"
            )
    if name in ("choice", "choices"):
        return Part(name, modifiers=tuple(modifiers))
    return Part("field", name, tuple(modifiers))


def _read_bracket(value: str, source: str) -> Part:
    word = value.strip().lower()
    if word in ("mask", "soft", "classes", "cls", "sep"):
        return Part(word)
    if match := re.fullmatch(r"soft\s*\*\s*([0-9]{1,9})", word):
        if not int(match[1]):
            raise InputError(f"template {source!r}: [{value}] has no slot; use 1 or more")
        return Part("soft", number=int(match[1]))
    raise InputError(
        f"template {source!r}: unknown [{value}]; {nearest(word[:80], BRACKETS)}; "
        "write \\[ \\] for literal brackets"
    )


def _read_exact(value: str, source: str) -> Part:
    try:
        text = json.loads(value)
    except ValueError as error:
        raise InputError(
            f"template {source!r}: [{value}] is no text as JSON writes it ({error}); a line break "
            'is \\n, a quote \\", a backslash \\\\'
        ) from None
    if not text:
        raise InputError(f'template {source!r}: [""] is empty; remove it')
    return Part("exact", text)


_READERS = {"brace": _read_brace, "bracket": _read_bracket, "exact": _read_exact}
