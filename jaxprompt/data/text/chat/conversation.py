"""Encodes conversations by a model's chat template, and which tokens the assistant has written."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.data.tasks.conversation import Conversation
from jaxprompt.data.text.chat.render import chat_template, render_chats, with_spaces
from jaxprompt.data.text.tokenizer import (
    Tokenizer,
    encode_all_exact,
    encode_texts,
    spaced_sections,
)
from jaxprompt.errors import InputError, brief

_FIELD = "task.messages is set"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that marks the assistant's turns
# Characters for private use: around the number of a name in a text, and around marked turns.
_NAME, _NAME_END, _TURN, _TURN_END = "\ue000", "\ue001", "\ue002", "\ue003"
_ADVICE = (
    "mark what the assistant writes by {% generation %} and {% endgeneration %} in the chat "
    'template, or give all but its last message "weight": 0'
)


# Roles whose messages a template writes as they are, or refuses.
_WRITTEN_ROLES = ("system", "developer", "user")
# Names of special tokens in messages are between _NAME and _NAME_END, by number.
_ESCAPED = re.compile(f"{_NAME}(\\d+){_NAME_END}")
_Spans = list[slice]  # of the turns that are learned, in characters


class ChatTokens(NamedTuple):
    """An encoded conversation."""

    ids: np.ndarray  # int32 [T]
    is_trained: np.ndarray  # bool [T], tokens of turns of the assistant that are learned


class ConversationEncoder:
    """Encodes conversations as their chat template writes them.

    Turns of the assistant are what the template marks by {% generation %}, or else what it adds to
    the text before a turn, which ends as at the start of an answer. White space after the token
    that ends a turn is not learned. Names of special tokens in messages stay ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: int, begins_with_bos: bool):
        """Raises InputError for a tokenizer without a chat template.

        `stop` ends an answer if the template has no token for that; with `begins_with_bos` every
        input begins with the first token of a text, so that of the template is dropped.
        """
        self._tokenizer, self._stop = tokenizer, stop
        self._source = chat_template(tokenizer, _FIELD, "task.fields and task.target")
        self._bos = tokenizer.bos_token if begins_with_bos and tokenizer.bos_token else ""
        self._spacing = spaced_sections(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._added = tuple(token.content for token in added.values() if token.content)
        self._moves_spaces = self._spacing != "never" or any(x.rstrip for x in added.values())
        special = [token.content for token in added.values() if token.special and token.content]
        # Longest first, since a name may begin like another one.
        self._names = sorted(special, key=len, reverse=True)
        self._names += [_NAME, _NAME_END, _TURN, _TURN_END]
        self._name = re.compile("|".join(map(re.escape, self._names)))

    def encode(self, texts: Sequence[str], *, targets: bool) -> list[ChatTokens]:
        """Encodes conversations, in JSON as in the texts of examples.

        With `targets` up to the last turn that is learned, else up to the start of an answer, in
        place of a last message of the assistant.

        Raises:
          InputError: if the template refuses one, or its turns cannot be told apart.
        """
        conversations = [Conversation.from_json(self._name.sub(self._escape, x)) for x in texts]
        if targets:
            pieces = [self._divide(*pair) for pair in self._with_targets(conversations)]
        else:
            pieces = [self._divide(text, []) for text in self._open(conversations)]
        # Every other part of a text is the number of a name.
        parts = [part for row in pieces for text, _ in row for part in _ESCAPED.split(text)[::2]]
        unique = list(dict.fromkeys(filter(None, parts)))
        ids = dict(zip(unique, encode_all_exact(self._tokenizer, unique), strict=True))
        return [self._join(row, ids) for row in pieces]

    def end_ids(self) -> tuple[int, ...]:
        """Returns the token that ends a turn of the assistant; () if the template refuses one."""
        messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            (chat,) = self.encode([Conversation(messages, [1], []).to_json()], targets=True)
        except InputError:
            return ()
        return (int(chat.ids[-1]),)

    def _escape(self, match: re.Match[str]) -> str:
        return f"{_NAME}{self._names.index(match[0])}{_NAME_END}"

    def _open(self, conversations: Sequence[Conversation]) -> Iterator[str]:
        """Renders conversations up to the start of an answer."""
        counts = [len(x.messages) - x.is_answered for x in conversations]
        texts = self._render([(*pair, True) for pair in zip(conversations, counts, strict=True)])
        return (_without_marks(text)[0] for text in texts)

    def _with_targets(self, conversations: Sequence[Conversation]) -> Iterator[tuple[str, _Spans]]:
        """Renders conversations with the spans of the turns that are learned."""
        is_marked = _MARKED.search(self._source) is not None
        parts: list[tuple[Conversation, int, bool]] = []
        for conversation in conversations:
            parts.append((conversation, len(conversation.messages), False))
            for turn in () if is_marked else conversation.trained:
                parts += [(conversation, turn, True), (conversation, turn + 1, False)]
        rendered = iter(self._render(parts))
        for conversation in conversations:
            text, spans = _without_marks(next(rendered))
            if is_marked:
                spans = _select_spans(conversation, spans)
            else:
                spans = [
                    _span_between(text, next(rendered), next(rendered), turn)
                    for turn in conversation.trained
                ]
            yield text, [self._trim(text, span) for span in spans]

    def _render(self, parts: Sequence[tuple[Conversation, int, bool]]) -> list[str]:
        """Renders the first messages of conversations, with or without the start of an answer."""
        chats: list[dict[str, Any]] = [
            {"messages": x.messages[:n], "tools": x.tools or None, "add_generation_prompt": opens}
            for x, n, opens in parts
        ]
        texts = render_chats(self._tokenizer, self._source, chats)
        return [
            self._check(text, chat["messages"]) for text, chat in zip(texts, chats, strict=True)
        ]

    def _check(self, text: str | ValueError, messages: Sequence[dict[str, Any]]) -> str:
        """Returns a rendered text. Raises InputError if the template refuses or omits a message."""
        where = f"the chat template of {self._tokenizer.name_or_path!r}"
        advice = "remove or rename the message, or change the template"
        if isinstance(text, ValueError):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise InputError(
                f"{where} refuses messages of the roles {roles} ({text}); {advice}"
            ) from text
        for message in messages:
            if message["role"] in _WRITTEN_ROLES and message["content"].strip() not in text:
                raise InputError(
                    f"{where} does not write the message of role {message['role']}, "
                    f"{brief(message['content'])}; {advice}"
                )
        return text

    def _trim(self, text: str, span: slice) -> slice:
        """Leaves out white space after the token that ends a turn."""
        turn = text[span].rstrip()
        return slice(span.start, span.start + len(turn)) if turn.endswith(self._added) else span

    def _divide(self, text: str, spans: _Spans) -> list[tuple[str, bool]]:
        """Divides a text at the turns that are learned, up to the end of the last.

        Returns pieces, with the spaces that the tokenizer, as released, puts before them, and
        whether each is learned.
        """
        bounds = [x for span in spans for x in (span.start, span.stop)] or [len(text)]
        pieces: list[tuple[str, bool]] = []
        for i, (start, end) in enumerate(itertools.pairwise([0, *bounds])):
            piece = text[start:end]
            # A space goes before the first section of a text, and maybe after each added token.
            is_first, follows_token = i == 0, text[:start].endswith(self._added)
            if is_first and self._bos:
                is_first = not piece.startswith(self._bos)
                piece = piece.removeprefix(self._bos)
            if self._moves_spaces:
                takes_space = self._spacing == "always" and (i == 0 or follows_token)
                takes_space = takes_space or (self._spacing == "first" and is_first)
                piece = with_spaces(self._tokenizer, piece, takes_space)
            pieces.append((piece, i % 2 == 1))
        return pieces

    def _join(self, pieces: Sequence[tuple[str, bool]], ids_of: dict[str, list[int]]) -> ChatTokens:
        """Joins the tokens of pieces; those of a last turn without an end are ended."""
        ids: list[int] = []
        is_trained: list[bool] = []
        for text, trained in pieces:
            for i, part in enumerate(_ESCAPED.split(text)):
                is_name = i % 2 == 1
                ids += self._name_ids(int(part)) if is_name else ids_of.get(part, [])
            is_trained += [trained] * (len(ids) - len(is_trained))
        text, trained = pieces[-1]
        if trained and not text.endswith(self._added):
            ids, is_trained = [*ids, self._stop], [*is_trained, True]
        return ChatTokens(np.array(ids, np.int32), np.array(is_trained, bool))

    def _name_ids(self, number: int) -> list[int]:
        """Encodes the name of a special token in a message, as ordinary text."""
        return encode_texts(self._tokenizer, [self._names[number]])[0]


def _without_marks(text: str) -> tuple[str, _Spans]:
    """Removes the marks of turns from a text. Returns it, and where the turns are."""
    parts = re.split(f"[{_TURN}{_TURN_END}]", text)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    spans = [slice(start, end) for start, end in zip(ends[::2], ends[1::2], strict=False)]
    return "".join(parts), spans


def _select_spans(conversation: Conversation, spans: _Spans) -> _Spans:
    """Selects the marked turns that are learned."""
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if len(spans) != len(turns):
        raise InputError(
            f"the chat template marks {len(spans)} turns by {{% generation %}}, but the assistant "
            f"has {len(turns)}; mark each of its messages once"
        )
    return [span for turn, span in zip(turns, spans, strict=True) if turn in conversation.trained]


def _span_between(text: str, start: str, end: str, turn: int) -> slice:
    """Returns what `end` adds to `start`, both of which `text` must begin with."""
    if not (text.startswith(end) and end.startswith(start)):
        later, earlier = (end, start) if not end.startswith(start) else (text, end)
        common = next(
            (i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), len(later)
        )
        raise InputError(
            f"the chat template writes message {turn + 1}, an assistant turn, in another way "
            f"if other messages follow or the answer begins ({brief(earlier[common:])}, "
            f"{brief(later[common:])}); {_ADVICE}"
        )
    return slice(len(start), len(end))
