"""Renders a model's chat template, and puts a template into it."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.data.text.tokenizer import Tokenizer, spaced_sections
from jaxprompt.errors import InputError

# Stands for the user's turn; a control character, which chat templates neither write nor change.
_PLACEHOLDER = "\x02"
# Limits of a chat template. Released ones take milliseconds and write a few thousand characters.
_LIMITS = {"seconds": 10, "bytes": 2**30, "characters": 100_000}
_CHATS = 1000  # rendered by one process, within the limits
_MASK_AT_END = re.compile(r"\s*\[\s*mask\s*\]\s*$", re.IGNORECASE)


def in_chat(tokenizer: Tokenizer, template: str) -> str:
    """Puts the text before [mask] (all of a template without one) into the user's turn.

    The text that the tokenizer's chat template adds is written as literal text, `["..."]`; the
    answer begins the assistant's turn. A date in it is always 26 Jul 2024. Raises InputError for a
    tokenizer without a chat template.
    """
    source = chat_template(tokenizer, "task.chat=True", "task.chat=False")
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    (chat,) = render_chats(
        tokenizer, source, [{"messages": messages, "add_generation_prompt": True}]
    )
    if isinstance(chat, ValueError):
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} fails ({chat}); write the turns in "
            'task.template as ["..."], with task.chat=False'
        ) from chat
    before, placeholder, after = chat.partition(_PLACEHOLDER)
    if not placeholder or _PLACEHOLDER in after:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} writes the user's turn "
            f"{chat.count(_PLACEHOLDER)} times; write the turns in task.template as "
            '["..."], with task.chat=False'
        )
    bos, spacing, is_first = tokenizer.bos_token, spaced_sections(tokenizer), True
    if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        is_first = not before.startswith(bos)
        before = before.removeprefix(bos)  # it begins every input anyway
    turn = _MASK_AT_END.sub("", template).strip()
    blank = "[mask]" if _MASK_AT_END.search(template) else ""
    leading_space = spacing == "always" or (spacing == "first" and is_first)
    before = with_spaces(tokenizer, before + _PLACEHOLDER, leading_space)
    before = before.removesuffix(_PLACEHOLDER)
    # A space at the end belongs to the first word of the turn; it is not a token of its own.
    space = " " if before.endswith(" ") else ""
    before = before.removesuffix(" ")
    return f"{_literal(before)}{space}{turn}{_literal(with_spaces(tokenizer, after, False))}{blank}"


def with_spaces(tokenizer: Tokenizer, text: str, leading_space: bool) -> str:
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


def chat_template(tokenizer: Tokenizer, reason: str, advice: str) -> str:
    """Returns a tokenizer's chat template.

    Raises InputError if it has none; `reason` is the field that needs it, `advice` an alternative.
    """
    source = None
    if getattr(tokenizer, "chat_template", None):
        try:
            source = tokenizer.get_chat_template()
        except ValueError as error:  # of transformers: several templates, and no default
            details = " ".join(str(error).split())
            raise InputError(
                f"the chat template of {tokenizer.name_or_path!r} fails ({details}); keep one, or "
                f"use {advice}"
            ) from error
    if not source:
        raise InputError(
            f"{reason}, but tokenizer {tokenizer.name_or_path!r} has no chat template; use a model "
            f"that was tuned for chat, or {advice}"
        )
    return source


def render_chats(
    tokenizer: Tokenizer, source: str, chats: Sequence[Mapping[str, Any]]
) -> list[str | ValueError]:
    """Renders a chat template once for each dict of variables. Returns the texts, or why not.

    Variables are messages, tools and add_generation_prompt; a date is always 26 Jul 2024.
    """
    fixed = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        "enable_thinking": False,  # Qwen 3: the answer is scored, without thoughts before it
        **tokenizer.special_tokens_map,
    }
    outputs: list[str | ValueError] = []
    for start in range(0, len(chats), _CHATS):
        variables = [{**fixed, **chat} for chat in chats[start : start + _CHATS]]
        outputs += _render(source, json.dumps(variables))
    return outputs


@functools.lru_cache(maxsize=8)  # a grid renders the same texts for each run
def _render(source: str, variables: str) -> list[str | ValueError]:
    """Renders a chat template, in a process of its own, for a list of variables in JSON."""
    chats = json.loads(variables)
    inputs = {**_LIMITS, "source": source, "variables": chats}
    process = subprocess.run(
        [sys.executable, "-P", Path(__file__).with_name("render_process.py")],
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
    )
    reason = ""
    outputs: list[dict[str, str]] = [{} for _ in chats]
    if process.returncode < 0:  # killed at a limit
        reason = "it takes over {seconds} seconds or {bytes:,} bytes".format_map(_LIMITS)
    elif process.returncode:
        reason = process.stderr.strip().rpartition("\n")[2]
    else:
        outputs = json.loads(process.stdout)
    return [
        output["text"] if "text" in output else ValueError(output.get("error", reason))
        for output in outputs
    ]


def _literal(text: str) -> str:
    return f"[{json.dumps(text, ensure_ascii=False)}]" if text else ""
