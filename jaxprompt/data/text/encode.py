"""Turns an example and a template into token ids, slots and roles, before padding."""

import copy
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from jaxprompt.data.tasks.conversation import MESSAGES
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.chat.conversation import ChatTokens, ConversationEncoder
from jaxprompt.data.text.class_list import ClassList
from jaxprompt.data.text.demos import DemoLayout, lay_out_demos
from jaxprompt.data.text.encoded import Encoded, Row, make_row
from jaxprompt.data.text.marking import default_markers, mark_entities
from jaxprompt.data.text.specials import Specials
from jaxprompt.data.text.target import Branches, append_answer
from jaxprompt.data.text.template import (
    OPTION,
    Part,
    Template,
    get_field,
    read_option,
    validate_template,
    with_options,
)
from jaxprompt.data.text.token_runs import Gap, TextPart, TokenRun, cut_runs, join_runs, with_ids
from jaxprompt.data.text.tokenizer import (
    Tokenizer,
    encode_exact,
    encode_texts,
    starts_with_space,
    takes_one_space,
)
from jaxprompt.errors import InputError
from jaxprompt.types import Role, SharedPrefix

_CHUNK = 8192  # examples tokenised in one call, which bounds the memory of texts and ids


class Answer(NamedTuple):
    """What follows the input: label words, free text, or nothing."""

    plan: Branches | None = None  # of label words
    stem: tuple[int, ...] = ()  # decoder inputs before the scored positions
    slots: int = 0  # soft tokens before the stem
    max_tokens: int = 0  # of a free text, with its end of sequence
    num_start: int = 1  # tokens of the stem before every answer


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
        demo_layout: DemoLayout | None = None,
        conversations: ConversationEncoder | None = None,
    ):
        """Checks and lays out the template.

        `num_types` is the number of segments that the backbone has. `option`, or OPTION if it is
        empty, is how {choices} writes one choice, `names` are the names of the choices. `markers`
        are the words around each entity of the field with entities, () = the default. [classes]
        writes the first of `lists`; `with_list` selects another. `demo_layout` is the layout of
        demonstrations, if there are any. `conversations` encodes the field MESSAGES of a task that
        has it: training keeps the first tokens of a conversation, an input the last ones.
        """
        marked_fields = [part.text for part in template.parts if part.mark]
        validate_template(
            template,
            fields=(*marked_fields, *template.fields),
            num_slots=num_slots,
            needs_mask=needs_mask,
            has_choices=True,
            entities=entities,
            lists_classes=bool(lists),
        )
        self._entities = entities
        self._markers = tuple(markers) or default_markers(entities)
        self._whole_fields = {f"entity{i}" for i in range(1, 1 + entities)}  # never cut
        self.tokenizer, self._template, self._specials = tokenizer, template, specials
        self._max_len = max_len
        self._max_type, self._answer = max(num_types - 1, 0), answer
        self._leading_space = starts_with_space(tokenizer)
        self._one_space = takes_one_space(tokenizer)
        self._option, self._names = read_option(option or OPTION), tuple(names)
        self._num_slots, self._num_masks = num_slots, num_masks
        self._lists = tuple(lists)
        self._demo_layout, self._conversations = demo_layout, conversations
        self._demos: Sequence[Sequence[Example]] | None = None  # demonstrations of each example
        self._layouts: dict[int, list[TokenRun | TextPart]] = {}  # by the number of choices listed
        answer_tokens = answer.max_tokens or (len(answer.plan.fed) if answer.plan else 0)
        self._answer_tokens = answer_tokens if specials.style == "causal" else 0
        is_cut = any(p.kind == "field" and "whole" not in p.modifiers for p in template.parts)
        self._min_text = int(is_cut)  # tokens that must be left for truncated fields
        longest_list = max(range(len(lists)), key=lambda i: lists[i].num_tokens, default=0)
        longest = self.with_list(longest_list) if lists else self
        fixed = [run for run in longest._layout(0) if isinstance(run, TokenRun)]
        leading = list(takewhile(lambda run: run.role == Role.SOFT, fixed))
        self.cls_at = sum(len(run.ids) for run in leading)  # position of [CLS]
        is_placed = any(part.kind == "soft" for part in template.parts)
        # Runs before demonstrations: [CLS] with what precedes it, or slots that are not placed.
        self._num_leading = (
            len(leading) + 1 if specials.cls else int(num_slots > 0 and not is_placed)
        )
        longest._check_room(fixed)

    def with_generation(self, max_tokens: int) -> "ExampleEncoder":
        """Returns an encoder that leaves room for `max_tokens` generated tokens."""
        other = copy.copy(self)
        answer = self._answer
        start = answer.stem[: answer.num_start]
        other._answer = answer._replace(plan=None, stem=start, max_tokens=max_tokens)
        return other

    def for_conversations(self) -> "ExampleEncoder":
        """Returns an encoder of the field MESSAGES alone, behind all slots and [CLS].

        Raises InputError for a tokenizer without a chat template.
        """
        other = copy.copy(self)
        part = Part("field", MESSAGES)
        other._template, other._layouts = Template(f"{{{MESSAGES}}}", (part,)), {}
        other._min_text, other._demo_layout, other._lists = 0, None, ()
        other._conversations = self._conversations or ConversationEncoder(
            self.tokenizer, self._specials.stop, begins_with_bos=bool(self._specials.cls)
        )
        return other

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The token ids that end a turn of a conversation."""
        return () if self._conversations is None else self._conversations.end_ids()

    def with_list(self, index: int) -> "ExampleEncoder":
        """Returns an encoder whose [classes] writes the list `index`."""
        other = copy.copy(self)
        other._lists, other._layouts = self._lists[index:], {}
        return other

    def with_demos(self, demos: Sequence[Sequence[Example]]) -> "ExampleEncoder":
        """Returns an encoder that adds `demos[i]` to the i-th example of `encode_all`."""
        other = copy.copy(self)
        other._demos = demos
        return other

    def encode(self, example: Example) -> list[Encoded]:
        """Encodes one example: one row per choice if the template has {choice}, else 1 row."""
        return self.encode_all([example])[0]

    def encode_all(
        self, examples: Sequence[Example], *, targets: bool = False
    ) -> list[list[Encoded]]:
        """Encodes examples, in order, K rows each; with `targets` also free-text targets."""
        rows = []
        demos = self._demos or [()] * len(examples)
        for start in range(0, len(examples), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            rows += self._encode_chunk(examples[chunk], targets, demos[chunk])
        return rows

    def gaps(self, examples: Sequence[Example], window: str) -> Iterator[Gap]:
        """Encodes examples without the field `window`; the other fields are not truncated.

        Raises InputError if there is no room for a token of that field.
        """
        filled = [self._fill(example, "", window) for example in examples]
        tokens = self._encode_runs(run for parts in filled for run in parts if run.field != window)
        for parts in filled:
            at = [run.field for run in parts].index(window)
            others = with_ids([*parts[:at], *parts[at + 1 :]], tokens)
            others = [run._replace(cut=False) for run in others]
            field = parts[at]._replace(cut=True)
            yield Gap(others[:at], field, others[at:], self._check_room(others))

    def fill_gap(self, gap: Gap, ids: list[int]) -> tuple[Encoded, int]:
        """Puts tokens into a gap; returns the row and the position of the first token."""
        runs = [*gap.before, gap.field._replace(ids=ids, pending=False), *gap.after]
        return self._assemble(runs, {}, None), sum(len(run.ids) for run in gap.before)

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts as inside an input, after a space."""
        return encode_texts(self.tokenizer, [f" {text}" for text in texts])

    @property
    def markers(self) -> tuple[str, ...]:
        """The words around marked entities, () if the template marks none."""
        return self._markers if any(part.mark for part in self._template.parts) else ()

    def shared_prefix(self) -> SharedPrefix | None:
        """Returns the tokens before the first text, which all rows share; None without any."""
        layout, runs = self._layout(1), []
        for run in layout if self._demo_layout is None else ():
            if not isinstance(run, TokenRun):
                break
            runs.append(run)
        # One token is left to each row, so that a row with an empty text is not empty.
        row = join_runs(runs)
        arrays = (row.ids, row.slot, row.types, row.roles)
        return SharedPrefix(*(tuple(x[:-1].tolist()) for x in arrays)) if len(row.ids) > 1 else None

    def _encode_chunk(
        self, examples: Sequence[Example], targets: bool, demos: Sequence[Sequence[Example]]
    ) -> list[list[Encoded]]:
        if self._conversations is not None:
            texts = [example.fields[MESSAGES] for example in examples]
            chats = self._conversations.encode(texts, targets=targets)
            return [[self._assemble_chat(chat, targets)] for chat in chats]
        uses_choice = self._template.uses_choice
        filled = [
            [self._fill(example, choice) for choice in (example.choices if uses_choice else ("",))]
            for example in examples
        ]
        demo_runs = [[self._fill_demo(demo) for demo in row] for row in demos]
        tokens = self._encode_runs(
            run for rows in [*filled, *demo_runs] for runs in rows for run in runs
        )
        target_ids = self._encode_targets(examples) if targets else [None] * len(examples)
        encoded = []
        for i, example in enumerate(examples):
            count = 0 if uses_choice else len(example.choices)
            rows = [self._assemble(runs, tokens, target_ids[i], demo_runs[i]) for runs in filled[i]]
            encoded.append([row._replace(num_choices=count) for row in rows])
        return encoded

    def _encode_runs(self, runs: Iterable[TokenRun]) -> dict[str, list[int]]:
        """Encodes every distinct text of runs once. Returns a dict from texts to tokens."""
        texts = list(dict.fromkeys(run.text for run in runs if run.pending))
        return dict(zip(texts, encode_texts(self.tokenizer, texts), strict=True))

    def _fill_demo(self, demo: Example) -> list[TokenRun]:
        """Lays out a demonstration like an example, with its label word instead of the mask."""
        assert self._demo_layout is not None
        word = self._demo_layout.words[demo.label]
        return [
            run._replace(ids=list(word), role=Role.HARD) if run.role == Role.LABEL else run
            for run in self._fill(demo, "")[self._num_leading : -1]
        ]

    def _encode_targets(self, examples: Sequence[Example]) -> list[list[int]]:
        """Encodes free texts, each with its end of sequence."""
        # A T5's target starts like an input; a target inside or after an input follows a space.
        style = self._specials.style
        space = self._leading_space or style != "seq2seq"
        space = space and not self._template.writes_space(style, self._one_space)
        texts = [f"{' ' if space else ''}{example.target.strip()}" for example in examples]
        targets = []
        for text, ids in zip(texts, encode_texts(self.tokenizer, texts), strict=True):
            ids = [*ids, self._specials.stop]
            if len(ids) > self._answer.max_tokens:
                raise InputError(
                    f"the target {text.strip()[:40]!r} has {len(ids)} tokens with its end token, "
                    f"over data.max_target={self._answer.max_tokens}; raise data.max_target, or "
                    "shorten the target"
                )
            targets.append(ids)
        return targets

    def _layout(self, choices: int) -> list[TokenRun | TextPart]:
        """Returns the layout for a number of choices, cached."""
        if choices not in self._layouts:
            template = with_options(self._template, self._option, self._names[:choices])
            self._layouts[choices] = self._lay_out(template)
        return self._layouts[choices]

    def _check_specials(self, template: Template) -> None:
        """Raises InputError if the template does not fit the special tokens of the backbone."""
        where = f"template {self._template.source!r}"
        is_causal = self._specials.style == "causal"
        if is_causal and any(p.kind == "mask" for p in template.parts[:-1]):
            raise InputError(
                f"{where}: a left-to-right model predicts at the end of its input; move [mask] "
                "there, or set task.template to one that ends with it"
            )
        if not self._specials.cls and any(p.kind == "cls" for p in template.parts):
            raise InputError(f"{where} has [cls], which this backbone does not have; remove it")

    def _lay_out(self, template: Template) -> list[TokenRun | TextPart]:
        """Encodes the fixed parts; adds the special tokens and slots not in the template."""
        if self._num_slots > self._max_len:  # before lists of this length are made
            raise InputError(
                f"the prompt has {self._num_slots} slots, over max_len {self._max_len}; use fewer, "
                "or raise max_len"
            )
        self._check_specials(template)
        tokenizer, specials = self.tokenizer, self._specials
        parts = template.completed(
            cls=bool(specials.cls),
            soft=self._num_slots > 0,
            mask=specials.style == "infilling",
            one_space=self._one_space,
        )
        closed = parts[-1].kind == "sep"
        leading_space = self._leading_space or self._template.parts[0].space
        layout: list[TokenRun | TextPart] = []
        next_slot, seps, at_start = 0, 0, True
        marks = self._template.slots_around(self._entities)
        for i, part in enumerate(parts):
            segment = min(seps, self._max_type)
            space = leading_space if at_start else part.space
            if part.kind in ("field", "choice", "option"):
                layout.append(TextPart(part, space, segment, next_slot))
                next_slot += marks * (part.mark == "soft")
            elif part.kind == "words":
                ids = encode_texts(tokenizer, [f" {part.text}" if space else part.text])[0]
                layout.append(TokenRun(ids, Role.HARD, segment))
            elif part.kind == "exact":
                layout.append(TokenRun(encode_exact(tokenizer, part.text), Role.HARD, segment))
            elif part.kind == "mask":
                count = {"masked": self._num_masks, "causal": 0}.get(specials.style, 1)
                layout.append(TokenRun([*specials.masks[:1]] * count, Role.LABEL, segment))
            elif part.kind == "soft":
                count = part.number or self._num_slots - marks
                slots = range(next_slot, next_slot + count)
                layout.append(TokenRun([specials.pad] * count, Role.SOFT, segment, slots))
                next_slot += count
            elif part.kind == "classes":
                layout += self._class_list_runs(segment)
            elif part.kind == "cls":
                layout.append(TokenRun([*specials.cls], Role.SPECIAL, segment))
            else:
                last = closed and i + 1 == len(parts)
                end = (specials.end or specials.sep[:1]) if last else specials.sep
                layout.append(TokenRun([*end], Role.SPECIAL, segment))
                seps += 1
            if part.kind != "soft":
                at_start = part.kind in ("cls", "sep")
                leading_space = leading_space if part.kind == "cls" else self._leading_space
        if not closed:
            layout.append(TokenRun([*specials.end], Role.SPECIAL, min(seps, self._max_type)))
        return layout

    def _class_list_runs(self, segment: int) -> Iterator[TokenRun]:
        for tokens, role, row in self._lists[0].runs():
            if row < 0:
                yield TokenRun([*tokens], role, segment)
            else:
                first, count = self._num_slots + row, len(tokens)
                slots = range(first, first + count)
                yield TokenRun([self._specials.pad] * count, role, segment, slots)

    def _fill(self, example: Example, choice: str, window: str = "") -> list[TokenRun]:
        """Puts the example's texts into the layout; the field `window` is not marked."""
        runs: list[TokenRun] = []
        num_listed = len(example.choices) if self._template.lists_choices else 0
        for part in self._layout(num_listed):
            if isinstance(part, TokenRun):
                runs.append(part)
                continue
            spec = part.spec
            if spec.kind == "field":
                text = get_field(self._template, example.fields, spec.text)
                cut = "whole" not in spec.modifiers
            else:
                text, cut = example.choices[spec.number] if spec.kind == "option" else choice, False
            name = spec.text if spec.kind == "field" else ""
            if "exact" in spec.modifiers:
                ids = encode_exact(self.tokenizer, text)
                runs.append(TokenRun(ids, Role.TEXT, part.segment, field=name))
                continue
            if spec.mark and name != window:
                runs += self._mark(example, text, part, cut)
                continue
            cut = cut and name not in self._whole_fields
            runs.append(part.run(text, cut)._replace(field=name))
        return runs

    def _mark(self, example: Example, text: str, slot: TextPart, cut: bool) -> Iterator[TokenRun]:
        """Divides a field at its entities, which are never truncated."""
        words = self._markers if slot.spec.mark == "marked" else ()
        for piece in mark_entities(text, example.entities, words=words, space=slot.space):
            run = TokenRun([], Role.TEXT, slot.segment, text=piece.text, pending=True)
            if piece.kind == "context":
                yield run._replace(cut=cut, side=piece.number)
            elif piece.kind == "entity":
                yield run._replace(field=f"entity{piece.number + 1}")
            elif words:
                yield run._replace(role=Role.HARD)
            else:
                slots = range(slot.first + piece.number, slot.first + piece.number + 1)
                yield TokenRun([self._specials.pad], Role.SOFT, slot.segment, slots, piece.text)

    def _check_room(self, fixed: list[TokenRun]) -> int:
        num_fixed = sum(len(run.ids) for run in fixed) + self._answer_tokens
        needed = num_fixed + self._min_text
        if needed > self._max_len:
            counts: Counter[Role] = Counter()
            for run in fixed:
                counts[run.role] += len(run.ids)
            parts = {
                "slots": counts[Role.SOFT],
                "entities, choices and whole texts": counts[Role.TEXT],
                "a list of classes": self._lists[0].num_tokens if self._lists else 0,
                "the answer": self._answer_tokens,
            }
            details = ", ".join(f"{count} for {name}" for name, count in parts.items() if count)
            details = f" ({details})" if details else ""
            shorter = "use fewer slots or a shorter template"
            if self._lists:
                shorter = f"list fewer classes by head.group or head.hierarchy, or {shorter}"
            if self._answer.max_tokens:
                shorter = f"lower data.max_target, or {shorter}"
            raise InputError(
                f"template {self._template.source!r} takes {num_fixed} tokens{details} besides "
                f"the text, which leaves no room in max_len {self._max_len}; raise max_len to "
                f"{needed} or more, or {shorter}"
            )
        return self._max_len - num_fixed

    def _assemble(
        self,
        runs: list[TokenRun],
        tokens: dict[str, list[int]],
        target: list[int] | None,
        demos: Sequence[list[TokenRun]] = (),
    ) -> Encoded:
        runs = with_ids(runs, tokens)
        if demos:
            assert self._demo_layout is not None
            runs, is_cut = lay_out_demos(
                runs,
                [with_ids(demo, tokens) for demo in demos],
                self._demo_layout,
                self._num_leading,
                self._max_len - self._answer_tokens,
                f"template {self._template.source!r}",
            )
            cut = int(is_cut)
        else:
            runs, cut = cut_runs(runs, self._check_room([run for run in runs if not run.cut]))
        row = join_runs(runs)
        if not len(row.ids):
            raise InputError(
                f"template {self._template.source!r} gives an input of no tokens, because the text "
                "is empty; remove the example, or put words around the text in task.template"
            )
        if self._specials.style == "masked":
            scored = np.flatnonzero(row.roles == Role.LABEL).tolist() or [self.cls_at]
            label_pos = np.array(scored, np.int32)
            order = self._lists[0].order if self._lists else slice(None)
            return Encoded(**row._asdict(), label_pos=label_pos[order], cut=cut)
        if self._specials.style == "causal":
            joined, label_pos, targets = append_answer(row, self._answer.plan, target)
            return Encoded(**joined._asdict(), label_pos=label_pos, targets=targets, cut=cut)
        decoder, label_pos, targets = append_answer(self._stem(), self._answer.plan, target)
        return Encoded(
            **row._asdict(), label_pos=label_pos, decoder=decoder, targets=targets, cut=cut
        )

    def _assemble_chat(self, chat: ChatTokens, targets: bool) -> Encoded:
        """Puts a conversation after the fixed parts; with `targets`, turns of it are learned."""
        before = [run for run in self._layout(0) if isinstance(run, TokenRun)]  # it comes last
        num_before = sum(len(run.ids) for run in before)
        room = self._max_len - num_before - (0 if targets else self._answer_tokens)
        part = slice(room) if targets else slice(max(len(chat.ids) - room, 0), None)
        ids, is_trained = chat.ids[part], np.flatnonzero(chat.is_trained[part])
        row = join_runs([*before, TokenRun(ids.tolist(), Role.TEXT, 0)])
        cut = len(chat.ids) - len(ids)
        if not targets:
            joined, label_pos, _ = append_answer(row, None, None)
            return Encoded(**joined._asdict(), label_pos=label_pos, cut=cut)
        row.roles[num_before + is_trained] = Role.LABEL
        at = (num_before + is_trained).astype(np.int32)
        at = at[at > 0]  # nothing predicts the first token
        if not at.size:
            # The last position, which no row shares with others; see `shared_prefix`.
            label_pos, none = np.array([len(row.ids) - 1], np.int32), np.full(1, -1, np.int32)
            return Encoded(**row._asdict(), label_pos=label_pos, targets=none, cut=cut)
        # The last token is predicted, never fed.
        fed, columns = slice(at[-1]), (row.ids, row.slot, row.types, row.roles, row.positions)
        row_fed = Row(*(column[fed] for column in columns))
        return Encoded(**row_fed._asdict(), label_pos=at - 1, targets=row.ids[at], cut=cut)

    def _stem(self) -> Row:
        """Returns the decoder's input before the scored tokens: its soft tokens and the stem."""
        slots, stem = self._answer.slots, self._answer.stem
        ids = [self._specials.pad] * slots + list(stem)
        roles = [Role.SOFT] * slots + [Role.SPECIAL] * len(stem)
        slot = [*range(slots), *([-1] * len(stem))]
        return make_row(ids, slot, [0] * len(ids), roles, range(len(ids)))
