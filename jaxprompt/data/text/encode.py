"""Turns an example and a template into token ids, slots and roles, before padding."""

import copy
import string
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.class_list import ClassList
from jaxprompt.data.text.demos import Beside, lay
from jaxprompt.data.text.encoded import Encoded, Row, make_row
from jaxprompt.data.text.marking import default_markers, divide
from jaxprompt.data.text.specials import Specials
from jaxprompt.data.text.target import Branches, say
from jaxprompt.data.text.template import (
    OPTION,
    Template,
    check,
    read_option,
    take_field,
    with_options,
)
from jaxprompt.data.text.token_runs import Gap, OpenPart, TokenRun, cut_runs, join_runs, with_ids
from jaxprompt.data.text.tokenizer import (
    Tokenizer,
    encode_exact,
    encode_texts,
    starts_with_space,
    takes_one_space,
)
from jaxprompt.errors import InputError
from jaxprompt.types import Role, SharedPrefix

_CHUNK = 8192  # examples tokenised in one call; bounds the memory of the texts held beside the ids


class Answer(NamedTuple):
    """What follows the input: label words, free text, or nothing."""

    plan: Branches | None = None
    stem: tuple[int, ...] = ()  # tokens that a decoder is fed before what is read
    slots: int = 0  # soft tokens in front of them
    text: int = 0  # tokens that a free text may have, the end of sequence included


class ExampleEncoder:
    """Encodes examples of one task for one backbone; the template's tokens are encoded once.

    A text after white space in the template has the leading space that a byte-level BPE needs; the
    first text after [CLS] or [SEP] has none, unless the template itself begins with one. To fit
    `max_len`, only fields are truncated, the longest first, and none that is `whole`. `max_len`
    counts slots, special tokens, and in a decoder-only model the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        specials: Specials,
        *,
        num_slots: int,
        num_masks: int,
        max_len: int,
        needs_mask: bool,
        num_types: int,
        answer: Answer = Answer(),  # noqa: B008, immutable
        option: str = "",
        names: Sequence[str] = string.ascii_uppercase,
        entities: int = 0,
        markers: Sequence[str] = (),
        lists: Sequence[ClassList] = (),
        beside: Beside | None = None,
    ):
        """Lays out the template.

        `num_types` is the number of segments that the backbone has. `option`, or OPTION if it is
        empty, is how {choices} writes one choice, `names` are the names of the choices. `markers`
        are the words around each entity of the field with entities, () = the default. [classes]
        writes the first of `lists`; `listing` selects another. `beside` says how demonstrations are
        laid out, if there are any.
        """
        marked = [part.text for part in template.parts if part.mark]
        check(
            template, fields=(*marked, *template.fields), num_slots=num_slots,
            needs_mask=needs_mask, has_choices=True, entities=entities,
            lists_classes=bool(lists),
        )  # fmt: skip
        self._entities = entities
        self._markers = tuple(markers) or default_markers(entities)
        self._whole = {f"entity{i}" for i in range(1, 1 + entities)}  # never cut
        self._tokenizer, self._template, self._specials = tokenizer, template, specials
        self._max_len = max_len
        self._max_type, self._answer = max(num_types - 1, 0), answer
        self._first_space = starts_with_space(tokenizer)
        self._one_space = takes_one_space(tokenizer)
        self._option, self._names = read_option(option or OPTION), tuple(names)
        self._sizes = num_slots, num_masks
        self._lists = tuple(lists)
        self._beside = beside
        self._shown: Sequence[Sequence[Example]] | None = None  # demonstrations of each example
        # By the number of choices listed.
        self._layouts: dict[int, list[TokenRun | OpenPart]] = {}
        behind = answer.text or (len(answer.plan.fed) if answer.plan else 0)
        self._room_behind = behind if specials.style == "causal" else 0
        cuts = any(p.kind == "field" and "whole" not in p.modifiers for p in template.parts)
        self._least = int(cuts)  # tokens of what is cut
        longest = max(range(len(lists)), key=lambda i: lists[i].tokens, default=0)
        widest = self.listing(longest) if lists else self
        fixed = [run for run in widest._layout(0) if isinstance(run, TokenRun)]
        leading = list(takewhile(lambda run: run.role == Role.SOFT, fixed))
        self._cls_at = sum(len(run.ids) for run in leading)
        placed = any(part.kind == "soft" for part in template.parts)
        # Runs in front of demonstrations: [CLS] with what precedes it, or slots not placed.
        self._front = len(leading) + 1 if specials.cls else int(num_slots > 0 and not placed)
        widest._check_room(fixed)

    def writing(self, tokens: int) -> "ExampleEncoder":
        """Returns an encoder of the same inputs, followed by up to `tokens` generated tokens."""
        other = copy.copy(self)
        start = self._answer.stem[:1]
        other._answer = Answer(stem=start, slots=self._answer.slots, text=tokens)
        return other

    def listing(self, number: int) -> "ExampleEncoder":
        """Returns an encoder of the same inputs in which [classes] writes another list."""
        other = copy.copy(self)
        other._lists, other._layouts = self._lists[number:], {}
        return other

    def showing(self, demos: Sequence[Sequence[Example]]) -> "ExampleEncoder":
        """Returns an encoder that adds `demos[i]` to the i-th example of `encode_all`."""
        other = copy.copy(self)
        other._shown = demos
        return other

    def encode(self, example: Example) -> list[Encoded]:
        """Encodes one example: one row per choice if the template has {choice}, else 1 row."""
        return self.encode_all([example])[0]

    def encode_all(
        self, examples: Sequence[Example], *, targets: bool = False
    ) -> list[list[Encoded]]:
        """Encodes examples, in order, K rows each; with `targets` also free-text targets."""
        rows = []
        shown = self._shown or [()] * len(examples)
        for start in range(0, len(examples), _CHUNK):
            part = slice(start, start + _CHUNK)
            rows += self._encode_chunk(examples[part], targets, shown[part])
        return rows

    def gaps(self, examples: Sequence[Example], window: str) -> Iterator[Gap]:
        """Encodes examples without the field `window`; the other fields are whole.

        Raises InputError if there is no room for a token of that field.
        """
        filled = [self._fill(example, "", window) for example in examples]
        runs = (run for parts in filled for run in parts if run.field != window)
        texts = list({run.text: 0 for run in runs if run.pending})
        tokens = dict(zip(texts, encode_texts(self._tokenizer, texts), strict=True))
        for parts in filled:
            at = [run.field for run in parts].index(window)
            others = with_ids([*parts[:at], *parts[at + 1 :]], tokens)
            others = [run._replace(cut=False) for run in others]
            field = parts[at]._replace(cut=True)  # cut where nothing else fits beside
            yield Gap(others[:at], field, others[at:], self._check_room(others))

    def place(self, gap: Gap, ids: list[int]) -> tuple[Encoded, int]:
        """Puts tokens into a gap; returns the row, and the position of the first token."""
        runs = [*gap.before, gap.field._replace(ids=ids, pending=False), *gap.after]
        return self._assemble(runs, {}, None), sum(len(run.ids) for run in gap.before)

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts as inside an input, after a space."""
        return encode_texts(self._tokenizer, [f" {text}" for text in texts])

    @property
    def cls_at(self) -> int:
        """Position of [CLS]."""
        return self._cls_at

    @property
    def markers(self) -> tuple[str, ...]:
        """The words around what the template marks, () = it marks nothing."""
        return self._markers if any(part.mark for part in self._template.parts) else ()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._tokenizer

    def shared_front(self) -> SharedPrefix | None:
        """Returns the prefix that all rows share, before the first text; None = no prefix."""
        layout, runs = self._layout(1), []
        for run in layout if self._beside is None else ():
            if not isinstance(run, TokenRun):
                break
            runs.append(run)
        # A token is left to each row: where its text is empty, that is what is read.
        row = join_runs(runs)
        parts = (row.ids, row.slot, row.types, row.roles)
        return SharedPrefix(*(tuple(x[:-1].tolist()) for x in parts)) if len(row.ids) > 1 else None

    def _encode_chunk(
        self, examples: Sequence[Example], targets: bool, shown: Sequence[Sequence[Example]]
    ) -> list[list[Encoded]]:
        filled = [
            [self._fill(example, choice) for choice in self._choices(example)]
            for example in examples
        ]
        counts = [0 if self._template.uses_choice else len(e.choices) for e in examples]
        demos = [[self._demonstrate(demo) for demo in own] for own in shown]
        every = (run for rows in [*filled, *demos] for runs in rows for run in runs)
        texts = list({run.text: 0 for run in every if run.pending})
        tokens = dict(zip(texts, encode_texts(self._tokenizer, texts), strict=True))
        said = self._targets(examples) if targets else [None] * len(examples)
        return [
            [self._assemble(runs, tokens, target, own)._replace(num_choices=count) for runs in rows]
            for rows, target, own, count in zip(filled, said, demos, counts, strict=True)
        ]

    def _demonstrate(self, demo: Example) -> list[TokenRun]:
        """Lays out a demonstration like an example, with its label word in place of the mask."""
        word = self._demonstrations().words[demo.label]
        return [
            run._replace(ids=list(word), role=Role.HARD) if run.role == Role.LABEL else run
            for run in self._fill(demo, "")[self._front : -1]
        ]

    def _demonstrations(self) -> Beside:
        """Returns the layout of demonstrations."""
        if self._beside is None:
            raise ValueError("demonstrations are given to an encoder that was made without")
        return self._beside

    def _targets(self, examples: Sequence[Example]) -> list[list[int]]:
        """Encodes free texts, each with its end of sequence."""
        # A T5's text starts like an input; in or behind an input it goes on after a space.
        style = self._specials.style
        space = self._first_space or style != "seq2seq"
        space = space and not self._template.writes_space(style, self._one_space)
        texts = [" " * space + example.target.strip() for example in examples]
        found = []
        for text, ids in zip(texts, encode_texts(self._tokenizer, texts), strict=True):
            ids = [*ids, self._specials.stop]
            if len(ids) > self._answer.text:
                raise InputError(
                    f"the target {text.strip()[:40]!r} has {len(ids)} tokens with its end token, "
                    f"over data.max_target={self._answer.text}; raise data.max_target, or shorten "
                    "the target"
                )
            found.append(ids)
        return found

    def _choices(self, example: Example) -> Sequence[str]:
        return self._need_choices(example) if self._template.uses_choice else ("",)

    def _need_choices(self, example: Example) -> Sequence[str]:
        if not 1 <= len(example.choices) <= len(self._names):
            raise InputError(
                f"template {self._template.source!r}: an example has {len(example.choices)} "
                f"choices; give it 1 to {len(self._names)}"
            )
        return example.choices

    def _layout(self, choices: int) -> list[TokenRun | OpenPart]:
        """Returns the layout for so many choices, made once."""
        if choices not in self._layouts:
            shown = with_options(self._template, self._option, self._names[:choices])
            self._layouts[choices] = self._lay_out(shown, *self._sizes)
        return self._layouts[choices]

    def _lay_out(
        self, shown: Template, num_slots: int, num_masks: int
    ) -> list[TokenRun | OpenPart]:
        """Encodes the fixed parts; adds the special tokens and slots not in the template."""
        tok, sp = self._tokenizer, self._specials
        where = f"template {self._template.source!r}"
        if sp.style == "causal" and any(p.kind == "mask" for p in shown.parts[:-1]):
            raise InputError(
                f"{where}: a left-to-right model predicts at the end of its input; move [mask] "
                "there, or set task.template to one that ends with it"
            )
        if not sp.cls and any(p.kind == "cls" for p in shown.parts):
            raise InputError(f"{where} has [cls], which this backbone does not have; remove it")
        blank = sp.style == "infilling"
        given = dict(soft=num_slots > 0, mask=blank, one_space=self._one_space)
        parts = shown.completed(cls=bool(sp.cls), **given)
        closed = parts[-1].kind == "sep"
        lead = self._first_space or self._template.parts[0].space
        layout: list[TokenRun | OpenPart] = []
        next_slot, seps, at_start = 0, 0, True
        marks = self._template.slots_around(self._entities)
        for i, part in enumerate(parts):
            segment = min(seps, self._max_type)
            space = lead if at_start else part.space
            if part.kind in ("field", "choice", "option"):
                layout.append(OpenPart(part, space, segment, next_slot))
                next_slot += marks * (part.mark == "soft")
            elif part.kind == "words":
                ids = encode_texts(tok, [" " * space + part.text])[0]
                layout.append(TokenRun(ids, Role.HARD, segment))
            elif part.kind == "exact":
                layout.append(TokenRun(encode_exact(tok, part.text), Role.HARD, segment))
            elif part.kind == "mask":
                count = {"masked": num_masks, "causal": 0}.get(sp.style, 1)
                layout.append(TokenRun([*sp.masks[:1]] * count, Role.LABEL, segment))
            elif part.kind == "soft":
                count = part.number or num_slots - marks
                slots = range(next_slot, next_slot + count)
                layout.append(TokenRun([sp.pad] * count, Role.SOFT, segment, slots))
                next_slot += count
            elif part.kind == "classes":
                for tokens, role, row in self._lists[0].pieces():
                    first, count = num_slots + row, len(tokens)
                    placed = range(first, first + count) if row >= 0 else None
                    ids = [*tokens] if placed is None else [sp.pad] * count
                    layout.append(TokenRun(ids, role, segment, placed))
            elif part.kind == "cls":
                layout.append(TokenRun([*sp.cls], Role.SPECIAL, segment))
            else:
                last = closed and i + 1 == len(parts)
                end = (sp.end or sp.sep[:1]) if last else sp.sep
                layout.append(TokenRun([*end], Role.SPECIAL, segment))
                seps += 1
            if part.kind != "soft":
                at_start = part.kind in ("cls", "sep")
                lead = lead if part.kind == "cls" else self._first_space
        if not closed:
            layout.append(TokenRun([*sp.end], Role.SPECIAL, min(seps, self._max_type)))
        return layout

    def _fill(self, example: Example, choice: str, window: str = "") -> list[TokenRun]:
        """Puts the example's texts into the layout; the field `window` is not marked."""
        runs: list[TokenRun] = []
        listed = len(self._need_choices(example)) if self._template.lists_choices else 0
        for item in self._layout(listed):
            if isinstance(item, TokenRun):
                runs.append(item)
                continue
            part = item.part
            if part.kind == "field":
                text = take_field(self._template, example.fields, part.text)
                cut = "whole" not in part.modifiers
            else:
                text, cut = example.choices[part.number] if part.kind == "option" else choice, False
            name = part.text if part.kind == "field" else ""
            if part.mark and name != window:
                runs += self._mark(example, text, item, cut)
                continue
            cut = cut and name not in self._whole
            runs.append(item.run(text, cut)._replace(field=name))
        return runs

    def _mark(self, example: Example, text: str, item: OpenPart, cut: bool) -> Iterator[TokenRun]:
        """Divides a field at its entities, which are never truncated."""
        words = self._markers if item.part.mark == "marked" else ()
        for piece in divide(text, example.entities, words=words, space=item.space):
            run = TokenRun([], Role.TEXT, item.segment, text=piece.text, pending=True)
            if piece.kind == "context":
                yield run._replace(cut=cut, side=piece.number)
            elif piece.kind == "entity":
                yield run._replace(field=f"entity{piece.number + 1}")
            elif words:
                yield run._replace(role=Role.HARD)
            else:
                slots = range(item.first + piece.number, item.first + piece.number + 1)
                yield TokenRun([self._specials.pad], Role.SOFT, item.segment, slots, piece.text)

    def _check_room(self, fixed: list[TokenRun]) -> int:
        taken = sum(len(run.ids) for run in fixed) + self._room_behind
        needed = taken + self._least
        if needed > self._max_len:
            tokens = lambda role: sum(len(run.ids) for run in fixed if run.role == role)
            whole = tokens(Role.TEXT)
            names = {f"{run.text.strip()!r:.40}": 0 for run in fixed if run.field in self._whole}
            kinds = f"the entities {' and '.join(names)}, choices" if names else "choices"
            shown = f", {whole} for {kinds} and whole texts" * bool(whole)
            cure = "or use fewer slots or a shorter template"
            if self._lists:
                shown += f", {self._lists[0].tokens} for a list of classes"
                cure = f"list fewer classes in one input by head.group or head.hierarchy, {cure}"
            if self._room_behind:
                shown += f", {self._room_behind} for the answer"
                cure = "lower data.max_target, " * bool(self._answer.text) + cure
            raise InputError(
                f"template {self._template.source!r} takes {taken} tokens ({tokens(Role.SOFT)} for "
                f"slots{shown}) besides the text, which leaves no room in max_len {self._max_len}; "
                f"raise max_len to {needed} or more, {cure}"
            )
        return self._max_len - taken

    def _assemble(
        self, runs: list[TokenRun], tokens: dict[str, list[int]], target: list[int] | None,
        demos: Sequence[list[TokenRun]] = (),
    ) -> Encoded:  # fmt: skip
        runs = with_ids(runs, tokens)
        if demos:
            room, where = self._max_len - self._room_behind, f"template {self._template.source!r}"
            shown = [with_ids(demo, tokens) for demo in demos]
            runs, cut = lay(runs, shown, self._demonstrations(), self._front, room, where)
        else:
            runs, cut = cut_runs(runs, self._check_room([run for run in runs if not run.cut]))
        row = join_runs(runs)
        if self._specials.style == "masked":
            read = np.flatnonzero(row.roles == Role.LABEL).tolist() or [self._cls_at]
            label_pos = np.array(read, np.int32)
            order = self._lists[0].order if self._lists else slice(None)
            return Encoded(**row._asdict(), label_pos=label_pos[order], cut=cut)
        if self._specials.style == "causal":
            joined, label_pos, targets = say(row, self._answer.plan, target)
            return Encoded(**joined._asdict(), label_pos=label_pos, targets=targets, cut=cut)
        decoder, label_pos, targets = say(self._stem(), self._answer.plan, target)
        return Encoded(
            **row._asdict(), label_pos=label_pos, decoder=decoder, targets=targets, cut=cut
        )

    def _stem(self) -> Row:
        """Returns the decoder's input before the scored tokens: its soft tokens and the stem."""
        slots, stem = self._answer.slots, self._answer.stem
        ids = [self._specials.pad] * slots + list(stem)
        roles = [Role.SOFT] * slots + [Role.SPECIAL] * len(stem)
        slot = [*range(slots), *([-1] * len(stem))]
        return make_row(ids, slot, [0] * len(ids), roles, range(len(ids)))
