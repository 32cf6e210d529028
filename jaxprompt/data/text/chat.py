"""Puts a template into a model's chat template."""

import datetime
import json
import re

from jaxprompt.data.text.tokenizer import Tokenizer, spaced_sections
from jaxprompt.errors import InputError

# A control character, which chat templates neither write nor change.
_MARK = "\x02"  # stands for the user's turn while the tokenizer lays the chat out
# What a chat template reads from the clock: a run must read the same text on every day. Those of
# Llama 3 name this date where they have no clock.
_TODAY = datetime.datetime(2024, 7, 26)
_CODES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBcdDefFHIjmMpRSTxXyY"))
_AT_END = re.compile(r"\s*\[\s*mask\s*\]\s*$", re.IGNORECASE)


def in_chat(tokenizer: Tokenizer, template: str) -> str:
    """Puts the text before [mask] (all of a template without one) into the user's turn.

    The text that the tokenizer's chat template adds is written as literal text, `["..."]`; the
    answer begins the assistant's turn. A date in it is always 26 Jul 2024. Raises InputError for a
    tokenizer without a chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"task.chat=True, but tokenizer {tokenizer.name_or_path!r} has no chat template; use a "
            "model that was tuned for chat, or task.chat=False"
        )
    turns = [{"role": "user", "content": _MARK}]
    try:
        laid = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True,
            enable_thinking=False,  # Qwen 3's: the answer is scored, and no thought before it
            chat_template=_stop_clock(tokenizer.get_chat_template()),
        )  # fmt: skip
    except Exception as error:  # of Jinja, or of what its template calls
        reason = " ".join(str(error).split())
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} fails ({reason}); write the turns in "
            'task.template as ["..."], with task.chat=False'
        ) from error
    front, mark, back = laid.partition(_MARK)
    if not mark or _MARK in back:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} writes the user's turn "
            f'{laid.count(_MARK)} times; write the turns in task.template as ["..."], with '
            "task.chat=False"
        )
    bos, scheme, begins = tokenizer.bos_token, spaced_sections(tokenizer), True
    if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        begins = not front.startswith(bos)
        front = front.removeprefix(bos)  # which stands in front of every input
    turn = _AT_END.sub("", template).strip()
    blank = "[mask]" if _AT_END.search(template) else ""
    leads = scheme == "always" or (scheme == "first" and begins)
    front, space = _spaced(tokenizer, front + _MARK, leads).removesuffix(_MARK), ""
    if front.endswith(" "):  # of the first word of the turn, not a token of its own
        front, space = front[:-1], " "
    return f"{_as_is(front)}{space}{turn}{_as_is(_spaced(tokenizer, back, False))}{blank}"


def _spaced(tokenizer: Tokenizer, text: str, leads: bool) -> str:
    """Writes out the spaces that a tokenizer, as released, puts before sections of a text.

    These are what stands between its added tokens. `leads`: whether the first section has one.
    """
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    tokens = sorted(filter(None, added), key=len, reverse=True)
    sections = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    always = spaced_sections(tokenizer) == "always"
    for at in range(0, len(sections), 2):  # every other one is an added token
        if at and added[sections[at - 1]].rstrip:  # it takes the white space behind it
            sections[at] = sections[at].lstrip()
        if sections[at] and not sections[at].startswith(" ") and (always if at else leads):
            sections[at] = f" {sections[at]}"
    return "".join(sections)


def _stop_clock(chat: str) -> str:
    """Replaces transformers' `strftime_now` in a chat template by the fixed date."""
    if "strftime_now" not in chat:
        return chat
    # A macro: transformers hands no function of a caller's to a template.
    date = "".join(f".replace('{code}', '{_TODAY.strftime(code)}')" for code in _CODES)
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{date} }}}}{{% endmacro %}}"
    return macro + "{{ '' }}" + chat  # without which a line break behind the macro would be cut


def _as_is(text: str) -> str:
    return f"[{json.dumps(text, ensure_ascii=False)}]" if text else ""
