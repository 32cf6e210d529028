"""Puts a template into a model's chat template."""

import datetime
import json
import re

from jaxprompt.data.text.tokenizer import Tokenizer, spaced_sections
from jaxprompt.errors import InputError

# Stands for the user's turn; a control character, which chat templates neither write nor change.
_PLACEHOLDER = "\x02"
# Today's date for chat templates, so that a run reads the same text on every day. Llama 3's
# templates use this date where they have no clock.
_DATE = datetime.datetime(2024, 7, 26)
_DATE_CODES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBcdDefFHIjmMpRSTxXyY"))
_MASK_AT_END = re.compile(r"\s*\[\s*mask\s*\]\s*$", re.IGNORECASE)


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
    turns = [{"role": "user", "content": _PLACEHOLDER}]
    try:
        chat = tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # Qwen 3: the answer is scored, without thoughts before it
            chat_template=_stop_clock(tokenizer.get_chat_template()),
        )
    except Exception as error:  # raised by Jinja, or by what the template calls
        reason = " ".join(str(error).split())
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} fails ({reason}); write the turns in "
            'task.template as ["..."], with task.chat=False'
        ) from error
    before, placeholder, after = str(chat).partition(_PLACEHOLDER)
    if not placeholder or _PLACEHOLDER in after:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} writes the user's turn "
            f"{str(chat).count(_PLACEHOLDER)} times; write the turns in task.template as "
            '["..."], with task.chat=False'
        )
    bos, spacing, is_first = tokenizer.bos_token, spaced_sections(tokenizer), True
    if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        is_first = not before.startswith(bos)
        before = before.removeprefix(bos)  # it begins every input anyway
    turn = _MASK_AT_END.sub("", template).strip()
    blank = "[mask]" if _MASK_AT_END.search(template) else ""
    leading_space = spacing == "always" or (spacing == "first" and is_first)
    before = _with_spaces(tokenizer, before + _PLACEHOLDER, leading_space)
    before = before.removesuffix(_PLACEHOLDER)
    # A space at the end belongs to the first word of the turn; it is not a token of its own.
    space = " " if before.endswith(" ") else ""
    before = before.removesuffix(" ")
    return (
        f"{_literal(before)}{space}{turn}{_literal(_with_spaces(tokenizer, after, False))}{blank}"
    )


def _with_spaces(tokenizer: Tokenizer, text: str, leading_space: bool) -> str:
    """Inserts the spaces that a tokenizer, as released, puts before sections of a text.

    Sections are separated by added tokens. `leading_space`: whether the first section has a space.
    """
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    tokens = sorted(filter(None, added), key=len, reverse=True)
    sections = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    always = spaced_sections(tokenizer) == "always"
    for i in range(0, len(sections), 2):  # every other one is an added token
        if i and added[sections[i - 1]].rstrip:  # the token includes the white space after it
            sections[i] = sections[i].lstrip()
        if sections[i] and not sections[i].startswith(" ") and (always if i else leading_space):
            sections[i] = f" {sections[i]}"
    return "".join(sections)


def _stop_clock(chat_template: str) -> str:
    """Replaces transformers' `strftime_now` in a chat template by the fixed date."""
    if "strftime_now" not in chat_template:
        return chat_template
    # A macro, because transformers cannot pass a caller's function to a template.
    date = "".join(f".replace('{code}', '{_DATE.strftime(code)}')" for code in _DATE_CODES)
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{date} }}}}{{% endmacro %}}"
    # Without the empty expression a line break after the macro would be removed.
    return macro + "{{ '' }}" + chat_template


def _literal(text: str) -> str:
    return f"[{json.dumps(text, ensure_ascii=False)}]" if text else ""
