"""From an example and a template to token ids, slots and roles, before any padding."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.data.tasks import Example
from jaxprompt.data.template import Part, Template, check, modify
from jaxprompt.data.tokenizer import encode_texts
from jaxprompt.errors import InputError, nearest
from jaxprompt.types import Role

_CHUNK = 8192  # examples tokenised in one call; bounds the memory of the texts held beside the ids
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Encoded(NamedTuple):
    """One row of input without padding. All arrays are [T] but the last, [M]."""

    ids: np.ndarray  # int32, the pad id where a soft token stands
    slot: np.ndarray  # int32, -1 = none
    types: np.ndarray  # int32
    roles: np.ndarray  # int8, Role
    label_pos: np.ndarray  # int32, the masks in order, else [CLS]


class _Run(NamedTuple):
    """Tokens in a row that share role and segment; `text` is tokenised where `ids` is None."""

    ids: list[int] | None
    role: Role
    segment: int
    slots: range | None = None
    text: str = ""
    cut: bool = False


class _Open(NamedTuple):
    """A part whose text comes with the example."""

    part: Part
    space: bool
    segment: int


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths left when the longest loses a token, ties the later one, until they fit `room`."""
    kept = list(lengths)
    if sum(kept) <= room:
        return kept
    level = 0
    left = room
    for rank, length in enumerate(sorted(lengths)):
        level = min(length, left // (len(lengths) - rank))
        if level < length:
            break
        left -= length
    kept = [min(length, level) for length in lengths]
    spare = room - sum(kept)
    for i, length in enumerate(lengths):
        if spare and length > level:
            kept[i] += 1
            spare -= 1
    return kept


class Encoder:
    """Encodes examples of one task for one backbone. Holds the template's own tokens, encoded once.

    A text after white space in the template carries the leading space that a byte-level BPE needs;
    the first text after [CLS] or [SEP] has none. Only fields are cut to fit `max_len`, which counts
    slots and specials.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Template,
        *,
        num_slots: int,
        num_masks: int,
        max_len: int,
        needs_mask: bool,
        num_types: int,
    ):
        """Lays the template out. `num_types` is the number of segments that the backbone knows."""
        check(
            template,
            fields=template.fields,
            num_slots=num_slots,
            needs_mask=needs_mask,
            has_choices=True,
        )
        for name in ("cls", "sep", "pad") + (("mask",) if template.has_mask else ()):
            if getattr(tokenizer, f"{name}_token_id") is None:
                raise InputError(
                    f"tokenizer {tokenizer.name_or_path!r} has no {name} token, which template "
                    f"{template.source!r} needs; take a backbone that has one"
                )
        self._tokenizer = tokenizer
        self._template = template
        self._max_len = max_len
        self._max_type = max(num_types - 1, 0)
        # RoBERTa's own pairs have two separators between the texts.
        self._inner_seps = tokenizer.num_special_tokens_to_add(pair=True) - 2
        self._layout = self._lay_out(num_slots, num_masks)
        fixed = [run for run in self._layout if isinstance(run, _Run)]
        front = takewhile(lambda run: run.role == Role.SOFT, fixed)
        self._cls_at = sum(len(run.ids) for run in front)
        self._check_room(fixed)

    def encode(self, example: Example) -> list[Encoded]:
        """Encodes one example: K rows, one a choice where the template has {choice}, else 1."""
        return self.encode_all([example])[0]

    def encode_all(self, examples: Sequence[Example]) -> list[list[Encoded]]:
        """Encodes examples, in order, K rows each."""
        rows = []
        for start in range(0, len(examples), _CHUNK):
            rows += self._encode_chunk(examples[start : start + _CHUNK])
        return rows

    def _encode_chunk(self, examples: Sequence[Example]) -> list[list[Encoded]]:
        filled = [
            [self._fill(example, choice) for choice in self._choices(example)]
            for example in examples
        ]
        texts = list({r.text: 0 for rows in filled for runs in rows for r in runs if r.ids is None})
        tokens = dict(zip(texts, encode_texts(self._tokenizer, texts), strict=True))
        return [[self._assemble(runs, tokens) for runs in rows] for rows in filled]

    def _choices(self, example: Example) -> Sequence[str]:
        return self._need_choices(example) if self._template.uses_choice else ("",)

    def _need_choices(self, example: Example) -> Sequence[str]:
        if not 1 <= len(example.choices) <= len(_LETTERS):
            raise InputError(
                f"template {self._template.source!r}: an example has {len(example.choices)} "
                f"choices; give it 1 to {len(_LETTERS)}"
            )
        return example.choices

    def _lay_out(self, num_slots: int, num_masks: int) -> list[_Run | _Open]:
        """Encodes what does not come with the example; adds the specials and slots not written."""
        tok, parts = self._tokenizer, list(self._template.parts)
        if not any(p.kind == "cls" for p in parts):
            parts.insert(0, Part("cls"))
        if parts[-1].kind != "sep":
            parts.append(Part("sep"))
        if num_slots and not any(p.kind == "soft" for p in parts):
            parts.insert(0, Part("soft"))
        layout: list[_Run | _Open] = []
        next_slot, seps, at_start = 0, 0, True
        for i, part in enumerate(parts):
            segment = min(seps, self._max_type)
            space = part.space and not at_start
            if part.kind in ("field", "choice", "choices"):
                layout.append(_Open(part, space, segment))
            elif part.kind == "words":
                ids = encode_texts(tok, [" " * space + part.text])[0]
                layout.append(_Run(ids, Role.HARD, segment))
            elif part.kind == "mask":
                layout.append(_Run([tok.mask_token_id] * num_masks, Role.LABEL, segment))
            elif part.kind == "soft":
                count = part.count or num_slots
                slots = range(next_slot, next_slot + count)
                layout.append(_Run([tok.pad_token_id] * count, Role.SOFT, segment, slots))
                next_slot += count
            elif part.kind == "cls":
                layout.append(_Run([tok.cls_token_id], Role.SPECIAL, segment))
            else:
                inner = i + 1 < len(parts)
                ids = [tok.sep_token_id] * (self._inner_seps if inner else 1)
                layout.append(_Run(ids, Role.SPECIAL, segment))
                seps += 1
            if part.kind != "soft":
                at_start = part.kind in ("cls", "sep")
        return layout

    def _fill(self, example: Example, choice: str) -> list[_Run]:
        """Puts the example's texts into the layout."""
        runs: list[_Run] = []
        for item in self._layout:
            if isinstance(item, _Run):
                runs.append(item)
            elif item.part.kind == "choices":
                runs += self._lettered(example, item)
            else:
                is_field = item.part.kind == "field"
                text = self._field(example, item.part.text) if is_field else choice
                runs.append(_text_run(text, item, item.space, cut=is_field))
        return runs

    def _lettered(self, example: Example, item: _Open) -> list[_Run]:
        runs = []
        for i, choice in enumerate(self._need_choices(example)):
            letter = " " * (item.space or i > 0) + f"{_LETTERS[i]}."
            runs.append(_Run(None, Role.HARD, item.segment, text=letter))
            runs.append(_text_run(choice, item, space=True, cut=False))
        return runs

    def _field(self, example: Example, name: str) -> str:
        if name not in example.fields:
            raise InputError(
                f"template {self._template.source!r}: an example has no field {name!r}; "
                f"{nearest(name, example.fields)}"
            )
        return example.fields[name]

    def _check_room(self, fixed: list[_Run]) -> int:
        taken = sum(len(run.ids) for run in fixed)
        if taken + 1 > self._max_len:
            slots = sum(len(run.ids) for run in fixed if run.role == Role.SOFT)
            raise InputError(
                f"template {self._template.source!r} takes {taken} tokens ({slots} of them slots) "
                f"beside the text, which leaves no room in max_len {self._max_len}; "
                f"raise max_len above {taken}, use fewer slots or a shorter template"
            )
        return self._max_len - taken

    def _assemble(self, runs: list[_Run], tokens: dict[str, list[int]]) -> Encoded:
        runs = [r if r.ids is not None else r._replace(ids=tokens[r.text]) for r in runs]
        room = self._check_room([run for run in runs if not run.cut])
        kept = iter(kept_lengths([len(run.ids) for run in runs if run.cut], room))
        ids: list[int] = []
        slots: list[int] = []
        types: list[int] = []
        roles: list[int] = []
        for run in runs:
            count = next(kept) if run.cut else len(run.ids)
            ids += run.ids[:count]
            slots += run.slots or [-1] * count
            types += [run.segment] * count
            roles += [int(run.role)] * count
        label_pos = [i for i, role in enumerate(roles) if role == Role.LABEL] or [self._cls_at]
        return Encoded(
            np.array(ids, np.int32),
            np.array(slots, np.int32),
            np.array(types, np.int32),
            np.array(roles, np.int8),
            np.array(label_pos, np.int32),
        )


def _text_run(text: str, item: _Open, space: bool, cut: bool) -> _Run:
    text = modify(text, item.part.modifiers)
    if space:
        text = text.lstrip()
        text = f" {text}" if text else ""
    return _Run(None, Role.TEXT, item.segment, text=text, cut=cut)
