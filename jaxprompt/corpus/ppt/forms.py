"""Lays out a task's pattern for a backbone, with the encoder for downstream tasks."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxprompt.corpus.ppt.patterns import Pattern
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encode import Answer, ExampleEncoder
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.marking import truncated_lengths
from jaxprompt.data.text.specials import FED, SENTINEL, answer_start, read_specials
from jaxprompt.data.text.target import (
    Branches,
    Frame,
    branch_plan,
    default_answer,
    make_answer_frame,
    masked_plan,
    read_answer,
)
from jaxprompt.data.text.template import Template, parse
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.verbalizer import Verbalizer, make_verbalizer
from jaxprompt.errors import InputError
from jaxprompt.types import NO_LIMIT, Role

_PROBE = "a"  # stands for a text while a form is built


class Form:
    """A row that is complete except for its texts; `fill` adds their tokens."""

    def __init__(self, encoder: ExampleEncoder, template: Template, max_len: int, options: int = 0):
        """Builds the form from the output of `encoder` for an example that is not truncated."""
        self._names = tuple(part.text for part in template.parts if part.kind == "field")
        example = Example(dict.fromkeys(self._names, _PROBE), (_PROBE,) * options)
        (row,) = encoder.encode(example)
        is_text = row.roles == Role.TEXT
        # Of a probe of several tokens only the first is kept, so that each text is one token. No
        # pattern has adjacent texts, which would become one.
        is_dropped = is_text & np.concatenate([[False], is_text[:-1]])
        dropped_before, keep = is_dropped.cumsum(), ~is_dropped
        self._row = row._replace(
            ids=row.ids[keep],
            slot=row.slot[keep],
            types=row.types[keep],
            roles=row.roles[keep],
            positions=row.positions[keep] - dropped_before[keep].astype(np.int32),
        )
        # With a decoder, label_pos are positions of the decoder, which no text shifts.
        if row.decoder is None:
            label_pos = row.label_pos - dropped_before[row.label_pos]
            self._row = self._row._replace(label_pos=label_pos.astype(np.int32))
        self._text_pos = np.flatnonzero(self._row.roles == Role.TEXT)
        num_texts = len(self._text_pos)
        self.max_text_tokens = max_len - len(self._row.ids) + num_texts  # of all texts together
        if self.max_text_tokens < num_texts:
            needed = max_len + num_texts - self.max_text_tokens
            raise InputError(
                f"template {template.source!r} leaves {self.max_text_tokens} tokens of max_len "
                f"{max_len} for {num_texts} texts; raise max_len to {needed} or more, or use fewer "
                "slots"
            )
        starts, stops = [0, *(self._text_pos + 1)], [*self._text_pos, len(self._row.ids)]
        self._fixed = [self._row.ids[a:b] for a, b in zip(starts, stops, strict=True)]
        self.label_width = len(row.label_pos)
        self.decoder_length = 0 if row.decoder is None else len(row.decoder.ids)

    def fill(self, texts: Mapping[str, np.ndarray]) -> Encoded:
        """Makes a row of texts, by field. If too long, they are truncated, the longest first."""
        texts_in_order = [texts[name] for name in self._names]
        full_lengths = [len(text) for text in texts_in_order]
        lengths = truncated_lengths(full_lengths, self.max_text_tokens)
        ids = [self._fixed[0]]
        for text, length, fixed in zip(texts_in_order, lengths, self._fixed[1:], strict=True):
            ids += (text[:length], fixed)
        row = self._row
        counts = np.ones(len(row.ids), np.int32)  # tokens that replace each of the form
        counts[self._text_pos] = lengths
        starts = counts.cumsum(dtype=np.int32) - counts
        shift = starts - np.arange(len(counts), dtype=np.int32)
        within = np.arange(starts[-1] + counts[-1], dtype=np.int32) - starts.repeat(counts)
        label_pos = row.label_pos
        # Label positions shift with the texts, unless they are a decoder's.
        if row.decoder is None:
            label_pos = label_pos + shift[label_pos]
        return row._replace(
            ids=np.concatenate(ids, dtype=np.int32, casting="same_kind"),
            slot=row.slot.repeat(counts),
            types=row.types.repeat(counts),
            roles=row.roles.repeat(counts),
            label_pos=label_pos,
            positions=(row.positions + shift).repeat(counts) + within,
            cut=sum(full_lengths) - sum(lengths),
        )


class Forms(NamedTuple):
    """Converts the texts of a task to rows; the verbalizer and the plan score them."""

    verbalizer: Verbalizer
    plan: Branches
    forms: dict[int, Form]  # by the number of options; 0 = without options
    pad: int


def make_forms(
    pattern: Pattern,
    tokenizer: Tokenizer,
    style: str,
    *,
    num_slots: int,
    max_len: int,
    options: Iterable[int] = (0,),
    start: int = 0,
    decoder_slots: int = 0,
    num_types: int = 1,
    eos: bool = False,
    sentinel: str = SENTINEL,
    answer: str = "",
    whole: bool = False,
) -> Forms:
    """Lays out a pattern, for each number of options, as for a downstream task with a verbalizer.

    `style`, one of STYLES, says whether [mask] is a mask or a sentinel. `start` and `decoder_slots`
    come first in the decoder's input. With `whole` the sentinels of `answer` are scored too, so
    that the loss can cover all of them, as in the released code with "[mask] {label} [mask]".
    """
    answer_template, sentinels = read_answer(answer or default_answer(style))
    specials = read_specials(
        tokenizer, style, eos=eos, sentinel=sentinel, num_masks=max(1, sentinels)
    )
    verbalizer = make_verbalizer(tokenizer, pattern.words, leading_space=pattern.space)
    answer_frame = make_answer_frame(answer_template, specials) if style in FED else Frame((), ())
    if style == "masked":
        # One position per subword; a decoder has branches instead.
        plan = masked_plan(verbalizer.ids)
    else:
        plan = branch_plan(verbalizer.ids, answer_frame, whole=whole)
    stem = (answer_start(specials, start), *answer_frame.stem) if style in FED else ()
    forms = {}
    for count in sorted(options, reverse=True):  # the longest first, for the errors
        template = parse(pattern.text(count))
        encoder = ExampleEncoder(
            tokenizer,
            template,
            specials,
            num_slots=num_slots,
            num_masks=verbalizer.num_masks,
            max_len=NO_LIMIT,  # `Form.fill` truncates, by the lengths of the real texts
            needs_mask=True,
            num_types=num_types,
            answer=Answer(plan, stem, decoder_slots),
        )
        forms[count] = Form(encoder, template, max_len, count)
    return Forms(verbalizer, plan, forms, specials.pad)
