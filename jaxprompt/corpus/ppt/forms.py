"""Lays out a task's pattern for a backbone, with the encoder for downstream tasks."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxprompt.corpus.ppt.patterns import Pattern, fields
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encode import Answer, ExampleEncoder
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.marking import truncated_lengths
from jaxprompt.data.text.specials import FED, SENTINEL, answer_start, read_specials
from jaxprompt.data.text.target import (
    Branches,
    Frame,
    answer_frame,
    branch_plan,
    default_answer,
    masked_plan,
    read_answer,
)
from jaxprompt.data.text.template import Template, parse
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.verbalizer import Verbalizer, make_verbalizer
from jaxprompt.errors import InputError
from jaxprompt.types import NO_LIMIT, Role

_PROBE = "a"  # stands for a text while a form is made


class Form:
    """A row that is complete except for its texts; `fill` adds their tokens."""

    def __init__(self, encoder: ExampleEncoder, template: Template, max_len: int, options: int = 0):
        """Makes the form from the output of `encoder` for an example that is not truncated."""
        where = f"template {template.source!r}"
        parts = template.parts
        if odd := [p for p in parts if p.modifiers or p.kind in ("choice", "choices")]:
            raise InputError(
                f"{where}: {odd[0].text or odd[0].kind} has modifiers or is a choice, but texts of "
                "a corpus are already tokens; use only fields"
            )
        self._names = tuple(part.text for part in parts if part.kind == "field")
        example = Example(dict.fromkeys(self._names, _PROBE), (_PROBE,) * options)
        (row,) = encoder.encode(example)
        is_text = row.roles == Role.TEXT
        # The probe may be several tokens, of which the first is kept. Texts that touch would become
        # one, which their number tells below.
        goes_on = is_text & np.concatenate([[False], is_text[:-1]])
        before = goes_on.cumsum()
        kept = ~goes_on
        # A text is one token here.
        self._row = row._replace(
            ids=row.ids[kept], slot=row.slot[kept], types=row.types[kept], roles=row.roles[kept],
            positions=row.positions[kept] - before[kept].astype(np.int32),
        )  # fmt: skip
        # With a decoder, label_pos counts places of the decoder, which no text moves.
        if row.decoder is None:
            moved = row.label_pos - before[row.label_pos]
            self._row = self._row._replace(label_pos=moved.astype(np.int32))
        self._at = np.flatnonzero(self._row.roles == Role.TEXT)
        if len(self._at) != len(self._names):
            raise InputError(
                f"{where}: two texts are adjacent; put the mask or a word between them"
            )
        self.room = max_len - len(self._row.ids) + len(self._at)  # tokens of all texts
        if self.room < len(self._at):
            raise InputError(
                f"{where} leaves {self.room} tokens of max_len {max_len} for {len(self._at)} "
                f"texts; raise max_len to {max_len + len(self._at) - self.room} or more, "
                "or use fewer slots"
            )
        starts, stops = [0, *(self._at + 1)], [*self._at, len(self._row.ids)]
        self._fixed = [self._row.ids[a:b] for a, b in zip(starts, stops, strict=True)]
        self.reads = len(row.label_pos)
        self.decoder_length = 0 if row.decoder is None else len(row.decoder.ids)

    def fill(self, texts: Mapping[str, np.ndarray]) -> Encoded:
        """Makes a row of texts, by field. If too long, texts lose their end, the longest first."""
        own = [texts[name] for name in self._names]
        whole = [len(text) for text in own]
        lengths = truncated_lengths(whole, self.room)
        ids = [self._fixed[0]]
        for text, length, fixed in zip(own, lengths, self._fixed[1:], strict=True):
            ids += (text[:length], fixed)
        row = self._row
        counts = np.ones(len(row.ids), np.int32)
        counts[self._at] = lengths
        more = counts.cumsum(dtype=np.int32) - counts  # tokens before, here
        shift = more - np.arange(len(counts), dtype=np.int32)
        within = np.arange(more[-1] + counts[-1], dtype=np.int32) - more.repeat(counts)
        label_pos = row.label_pos
        # The positions read move with the texts, unless they are a decoder's.
        if row.decoder is None:
            label_pos = label_pos + shift[label_pos]
        return row._replace(
            ids=np.concatenate(ids, dtype=np.int32, casting="same_kind"),
            slot=row.slot.repeat(counts), types=row.types.repeat(counts),
            roles=row.roles.repeat(counts), label_pos=label_pos,
            positions=(row.positions + shift).repeat(counts) + within, cut=lengths != whole,
        )  # fmt: skip


class Forms(NamedTuple):
    """Everything that converts the texts of a task to rows, and what a head needs to score them."""

    verbalizer: Verbalizer
    plan: Branches
    forms: dict[int, Form]  # by the number of options; 0 where there are none
    pad: int


def make_forms(
    task: str, pattern: Pattern, tokenizer: Tokenizer, style: str, *, num_slots: int, max_len: int,
    options: Iterable[int] = (0,), start: int = 0, decoder_slots: int = 0, num_types: int = 1,
    eos: bool = False, sentinel: str = SENTINEL, answer: str = "",
    whole: bool = False,
) -> Forms:  # fmt: skip
    """Lays out a pattern, for each number of options, as for a downstream task with a verbalizer.

    `style`, one of STYLES, says whether [mask] is a mask or a sentinel. `start` and `decoder_slots`
    come first in the decoder's input. With `whole` the sentinels of `answer` are scored too, so
    that the loss can cover all of them, as in the released code with "[mask] {label} [mask]".
    """
    said, sentinels = read_answer(answer or default_answer(style))
    specials = read_specials(
        tokenizer, style, eos=eos, sentinel=sentinel, num_masks=max(1, sentinels)
    )
    verbalizer = make_verbalizer(tokenizer, pattern.words, leading_space=pattern.space)
    around = answer_frame(said, specials) if style in FED else Frame((), ())
    if style == "masked":
        # One position per piece of a word; a decoder has branches instead.
        plan = masked_plan(verbalizer.ids)
    else:
        plan = branch_plan(verbalizer.ids, around, whole=whole)
    stem = (answer_start(specials, start), *around.stem) if style in FED else ()
    forms = {}
    for number in sorted(options, reverse=True):  # the longest first, for the errors
        template = parse(pattern.text(number))
        _check_fields(task, template, number)
        encoder = ExampleEncoder(
            tokenizer, template, specials, num_slots=num_slots, num_masks=verbalizer.num_masks,
            # The probes must come through whole: `Form.fill` cuts, by the lengths of real texts.
            max_len=NO_LIMIT, needs_mask=True, num_types=num_types,
            answer=Answer(plan, stem, decoder_slots),
        )  # fmt: skip
        forms[number] = Form(encoder, template, max_len, number)
    return Forms(verbalizer, plan, forms, specials.pad)


def _check_fields(task: str, template: Template, options: int) -> None:
    wanted = fields(task, options)
    found = [part.text for part in template.parts if part.kind == "field"]
    if sorted(found) != sorted(wanted):
        raise InputError(
            f"template {template.source!r} has the texts {', '.join(found)}, but {task} needs each "
            f"of {', '.join(wanted)} once"
        )
