"""Templates: what is read, and the one line a wrong one gets."""

import pytest

from jaxprompt.data.text.template import (
    Part,
    modify,
    parse,
    read_option,
    validate_template,
    with_options,
)
from jaxprompt.errors import InputError

FIELDS = ("sentence", "premise", "hypothesis")


def verify(text, num_slots=0, needs_mask=False, has_choices=False, fields=FIELDS, **more):
    validate_template(
        parse(text),
        fields=fields,
        num_slots=num_slots,
        needs_mask=needs_mask,
        has_choices=has_choices,
        **more,
    )


def test_every_element_is_read():
    template = parse("[soft*2] [cls]{premise|chop|lower} ? [MASK], {choice} [sep]{choices}[soft]")
    assert template.parts == (
        Part("soft", number=2),
        Part("cls", space=True),
        Part("field", "premise", ("chop", "lower")),
        Part("words", "?", space=True),
        Part("mask", space=True),
        Part("words", ","),
        Part("choice", space=True),
        Part("sep", space=True),
        Part("choices"),
        Part("soft"),
    )
    assert template.fields == ("premise",)
    assert template.has_mask
    assert template.uses_choice


def test_plain_template_has_neither_mask_nor_choice():
    template = parse(" {sentence} {premise} {sentence}")
    assert template.fields == ("sentence", "premise")
    assert not template.has_mask
    assert not template.uses_choice


def test_escapes_are_literal():
    assert parse(r"\{a\} \[b\] \\ \n {sentence}").parts[0] == Part("words", r"{a} [b] \ \n")


@pytest.mark.parametrize(
    ("modifiers", "text", "expected"),
    [
        (("chop",), "A cat.", "A cat"),
        (("lower",), "The US", "the US"),
        (("strip",), " a b ", "a b"),
        (("whole",), " A b ", " A b "),
        (("strip", "chop", "lower"), " It rains. ", "it rains"),
        (("chop", "lower"), "", ""),
    ],
)
def test_modifiers(modifiers, text, expected):
    assert modify(text, modifiers) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{sentence", r"unbalanced '\{' at character 0"),
        ("sentence}", r"unbalanced '\}' at character 8"),
        ("{sentence} [mask", r"unbalanced '\[' at character 11"),
        ("{{sentence}}", "unbalanced"),
        ("{sentence|lowr}", "modifier of 'sentence' 'lowr' is unknown; nearest: lower"),
        ("{sentence} [maks]", r"unknown \[maks\]; nearest: mask"),
        ("{sentence} [1]", "unknown .*classes, cls, mask, sep, soft"),
        ("{} [mask]", "empty braces"),
        ("{sentence} [soft*0]", r"unknown \[soft\*0\]"),
        ('["a\\q"]{text}', "is no text as JSON"),
        ('["\\ud800"]{text}', "is no text as JSON"),
        ('{text}["a]', "unknown"),
    ],
)
def test_bad_grammar(text, message):
    with pytest.raises(InputError, match=message) as error:
        parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "context", "message"),
    [
        ("{sentense}", {}, "unknown field 'sentense'; nearest: sentence"),
        ("It was [mask].", {}, "no text field"),
        ("{sentence} [classes]", {"lists_classes": False}, r"has \[classes\], which this head"),
        ("{sentence}", {"needs_mask": True}, r"no \[mask\]"),
        ("[mask] {sentence} [mask]", {}, r"2 \[mask\]"),
        ("{sentence} {choice}", {}, "uses choices, but the task has none"),
        ("{sentence} {choices}", {}, "uses choices, but the task has none"),
        ("[cls] {sentence} [cls]", {}, r"2 \[cls\]"),
        ("{sentence}", {"lists_classes": True}, r"has no \[classes\]"),
        ("[classes] {sentence} [classes]", {"lists_classes": True}, r"has 2 \[classes\]"),
        ("{sentence} [cls]", {}, r"only \[soft\] may come before \[cls\]"),
        ("[soft] {sentence}", {}, "the method has 0 slots"),
        ("[soft*3] {sentence}", {"num_slots": 5}, "places 3 soft tokens.*has 5 slots"),
        ("[soft] {sentence} [soft]", {"num_slots": 5}, r"\[soft\] uses all 5 slots"),
        ("[soft] {sentence} [soft*2]", {"num_slots": 5}, r"\[soft\] uses all 5 slots"),
    ],
)
def test_template_that_does_not_fit(text, context, message):
    with pytest.raises(InputError, match=message) as error:
        verify(text, **context)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", [" {name}. {text}", "{name}. {text}.", "({name}) {text} "])
@pytest.mark.parametrize("text", ["{sentence}? {choices} so [mask]", "{sentence}{choices}[mask]!"])
@pytest.mark.parametrize("names", ["A", "ABC"])
def test_choices_written_out_are_the_text_written_out(option, text, names):
    """Touching words are one, as if the options had been typed into the template."""
    typed = [option.format(name=name, text=f"{{option{i}}}") for i, name in enumerate(names)]
    typed = parse(text.replace("{choices}", "".join(typed))).parts
    written = with_options(parse(text), read_option(option), names).parts
    shown = [
        part._replace(kind="field", text=f"option{part.number}", number=0)
        if part.kind == "option" else part
        for part in written
    ]  # fmt: skip
    single = lambda part: part._replace(text=" ".join(part.text.split()))
    assert shown == [single(part) for part in typed]


def test_modifiers_of_choices_are_those_of_each():
    written = with_options(parse("{a} {choices|lower}"), read_option("{name} {text}"), "AB")
    options = [part for part in written.parts if part.kind == "option"]
    assert [(part.number, part.modifiers) for part in options] == [(0, ("lower",)), (1, ("lower",))]


def test_templates_that_fit():
    verify("{sentence}", num_slots=5)
    verify("[soft] [cls] {sentence} [mask] [sep]", num_slots=5, needs_mask=True)
    verify("[soft*2] {sentence} [soft*3]", num_slots=5)
    verify("{premise} [sep] {choice}", has_choices=True)
    verify("{sentence} Class: [classes].", lists_classes=True)
