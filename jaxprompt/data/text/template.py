r"""Templates: a line of text that says where fields, masks, soft tokens and hard words stand.

    {sentence} It was [mask].            a text field, hard words, the position that the head reads
    {premise|chop} ? [mask] , {hypothesis|lower}
    [soft*4] [cls] {text} [soft*16]      4 slots before [CLS], 16 after the text
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
template does not place precede [CLS].
White space at the beginning puts a space before the first text. A backslash makes `{ } [ ] \`
literal.

How {choices} writes each of them is a small template of its own, "{name}. {text}"; see
`read_option`.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxprompt.errors import InputError, check_known, nearest

MODIFIERS: dict[str, Callable[[str], str]] = {
    "chop": lambda text: text[:-1],
    "lower": lambda text: text[:1].lower() + text[1:],
    "strip": str.strip,
    "whole": str,  # this and MARKS do not change the text; they are for the encoder
    "marked": str,
    "soft": str,
}
MARKS = ("marked", "soft")  # how the entities of a field are marked: by words, by slots
BRACKETS = ("mask", "soft", "soft*n", "classes", "cls", "sep", '"..."')
OPTION = " {name}. {text}"

_LEXER = re.compile(
    # The first match counts: an escape, then text in quotes, which may contain brackets.
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
    text: str = ""  # hard words, literal text, or the name of a field
    modifiers: tuple[str, ...] = ()
    number: int = 0  # slots of a soft part, 0 = all; index of the choice of an option
    space: bool = False  # whether white space precedes it

    @property
    def mark(self) -> str:
        """How its entities are marked, one of MARKS, or ""."""
        return next((name for name in self.modifiers if name in MARKS), "")


class Template(NamedTuple):
    """A parsed template."""

    source: str
    parts: tuple[Part, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The distinct names of the text fields, in order."""
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
        """Returns whether literal text before [mask] ends with a space that belongs to that text.

        It does not if the answer begins a decoder's input, or with `one_space`: the space then
        belongs to the answer, see `completed`.
        """
        preceding = [*itertools.takewhile(lambda part: part.kind != "mask", self.parts)][-1:]
        ends_in_space = any(part.kind == "exact" and part.text[-1:].isspace() for part in preceding)
        return ends_in_space and style != "seq2seq" and not one_space

    def completed(self, *, cls: bool, soft: bool, mask: bool, one_space: bool) -> list[Part]:
        """Adds the parts that an input needs at its beginning, and a [mask] at its end.

        A space at the end of literal text moves to the text after it, because tokenizers have a
        word and the space before it as one token. With `one_space` any white space is such a space.
        """
        kinds = {part.kind for part in self.parts}
        parts = list(self.parts)
        if mask and "mask" not in kinds:
            parts.insert(len(parts) - (parts[-1].kind == "sep"), Part("mask"))
        if cls and "cls" not in kinds:
            parts.insert(0, Part("cls"))
        if soft and "soft" not in kinds:
            parts.insert(0, Part("soft"))
        for i, (part, following) in enumerate(itertools.pairwise(parts)):
            if part.kind == "exact" and following.kind in ("words", "field", "choice", "option"):
                stripped = part.text.rstrip() if one_space else part.text.removesuffix(" ")
                parts[i] = part._replace(text=stripped)
                parts[i + 1] = following._replace(space=following.space or stripped != part.text)
        return parts

    def slots_around(self, entities: int) -> int:
        """Returns the number of slots around `entities` entities."""
        return 2 * entities if any(part.mark == "soft" for part in self.parts) else 0


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
    words = ""  # hard words since the last part, with the white space around them
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
            # Byte-level tokenizers distinguish "word" and " word", so a part records the space.
            parts.append(read(value, text)._replace(space=words[-1:].isspace()))
            words = ""
    return Template(text, tuple(parts + _hard_words(words)))


def read_option(text: str) -> Template:
    """Parses the format of one choice, with {name} and {text} once each."""
    option = parse(text)
    fields = [part.text for part in option.parts if part.kind == "field" and not part.modifiers]
    words = [part for part in option.parts if part.kind == "words"]
    if sorted(fields) != ["name", "text"] or len(words) + 2 < len(option.parts):
        raise InputError(
            f"task.option={text!r} must contain {{name}} and {{text}} once each, and otherwise "
            f"only words; e.g. {OPTION!r}"
        )
    return option


def with_options(template: Template, option: Template, names: Sequence[str]) -> Template:
    """Replaces {choices} by one option per name, and merges adjacent hard words."""
    parts: list[Part] = []
    space = False  # white space at the end of an option
    for part in template.parts:
        if part.kind != "choices":
            parts.append(part._replace(space=part.space or space))
            space = False
            continue
        space = part.space
        for number, name in enumerate(names):
            replacements = {
                "name": Part("words", name),
                "text": Part("option", modifiers=part.modifiers, number=number),
            }
            for option_part in option.parts:
                new_part = (
                    replacements[option_part.text] if option_part.kind == "field" else option_part
                )
                parts.append(new_part._replace(space=option_part.space or space))
                space = False
            space = option.source != option.source.rstrip()
    return template._replace(parts=tuple(_merge_words(parts)))


def _merge_words(parts: Iterable[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        if part.kind == "words" and joined and joined[-1].kind == "words":
            before = joined.pop()
            part = before._replace(text=f"{before.text}{' ' if part.space else ''}{part.text}")
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
    names = tuple(fields)
    where = f"template {template.source!r}"
    counts = Counter(part.kind for part in template.parts)
    for name in template.fields:
        if name not in names:
            raise InputError(f"{where}: unknown field {name!r}; {nearest(name, names)}")
    if not template.fields:
        raise InputError(f"{where} has no text field; write one in braces, {nearest('', names)}")
    if not has_choices and counts["choice"] + counts["choices"]:
        raise InputError(f"{where} uses choices, but the task has none; remove them")
    for kind in ("mask", "cls", "classes"):
        if counts[kind] > 1:
            raise InputError(f"{where} has {counts[kind]} [{kind}]; keep 1")
    if needs_mask and not counts["mask"]:
        raise InputError(f"{where} has no [mask], which the head reads; add one")
    if counts["classes"] != lists_classes:
        problem = "has [classes], which this head does not read; remove it"
        if lists_classes:
            problem = "has no [classes], which the head reads; e.g. '{text} Class: [classes].'"
        raise InputError(f"{where} {problem}")
    if counts["cls"] and next(p.kind for p in template.parts if p.kind != "soft") != "cls":
        raise InputError(
            f"{where}: only [soft] may come before [cls]; move everything else after it"
        )
    _check_marks(template, names, entities)
    _check_slots(template, num_slots, entities)


def _check_marks(template: Template, names: Sequence[str], entities: int) -> None:
    marked = [part for part in template.parts if part.mark]
    for part in marked:
        where = f"template {template.source!r} marks the entities of {part.text!r}"
        if not entities:
            raise InputError(
                f"{where}, but the task has none; set task.entities to their columns, or remove "
                f"|{part.mark}"
            )
        if part.text != names[0] or len(marked) > 1:
            raise InputError(
                f"{where}, but only {{{names[0]}}} has entities; write |{part.mark} there, and once"
            )
        if others := [name for name in part.modifiers if name not in (part.mark, "whole")]:
            raise InputError(f"{where}, whose positions |{others[0]} would change; remove it")


def _hard_words(words: str) -> list[Part]:
    return [Part("words", words.strip(), space=words[0].isspace())] if words.strip() else []


def _check_slots(template: Template, num_slots: int, entities: int) -> None:
    where = f"template {template.source!r}"
    soft_counts = [p.number for p in template.parts if p.kind == "soft"]
    num_marks = template.slots_around(entities)
    if num_marks > num_slots:
        raise InputError(
            f"{where} puts {num_marks} soft tokens around {entities} entities, but the method has "
            f"only {num_slots} slots; use a method with more, or mark them by words: |marked "
            "instead of |soft"
        )
    if soft_counts and not num_slots:
        raise InputError(f"{where} has soft tokens, but the method has 0 slots; remove [soft]")
    if 0 in soft_counts and len(soft_counts) > 1:
        raise InputError(
            f"{where}: [soft] uses all {num_slots} slots; use [soft*n] to place several"
        )
    num_placed = sum(soft_counts) + num_marks
    if soft_counts and 0 not in soft_counts and num_placed != num_slots:
        note = f" ({num_marks} of them are around entities)" if num_marks else ""
        raise InputError(
            f"{where} places {num_placed} soft tokens, but the prompt has {num_slots} slots; "
            f"make the two equal{note}"
        )


def _read_brace(value: str, source: str) -> Part:
    name, *modifiers = (piece.strip() for piece in value.split("|"))
    if not name:
        raise InputError(f"template {source!r}: empty braces; name a field, or write \\{{ \\}}")
    for modifier in modifiers:
        check_known(f"template {source!r}: the modifier of {name!r}", modifier, MODIFIERS)
    if name in ("choice", "choices"):
        return Part(name, modifiers=tuple(modifiers))
    return Part("field", name, tuple(modifiers))


def _read_bracket(value: str, source: str) -> Part:
    word = value.strip().lower()
    if word in ("mask", "soft", "classes", "cls", "sep"):
        return Part(word)
    if match := re.fullmatch(r"soft\s*\*\s*([1-9][0-9]{0,8})", word):
        return Part("soft", number=int(match[1]))
    raise InputError(
        f"template {source!r}: unknown [{value}]; {nearest(word[:80], BRACKETS)}; "
        "write \\[ \\] for literal brackets"
    )


def _read_exact(value: str, source: str) -> Part:
    try:
        text = json.loads(value)
        text.encode()  # half of a surrogate pair is no text
        return Part("exact", text)
    except ValueError as error:
        raise InputError(
            f"template {source!r}: [{value}] is no text as JSON writes it ({error}); a line break "
            'is \\n, a quote \\", a backslash \\\\'
        ) from None


_READERS = {"brace": _read_brace, "bracket": _read_bracket, "exact": _read_exact}
