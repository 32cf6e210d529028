"""Puts a template, or the messages of a conversation, into a model's chat template."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.data.text.tokenizer import Tokenizer, spaced_sections
from jaxprompt.errors import InputError, brief

# Stands for the user's turn; a control character, which chat templates neither write nor change.
_PLACEHOLDER = "\x02"
# Limits of a chat template. Released ones take milliseconds and write a few thousand characters.
_LIMITS = {"seconds": 10, "bytes": 2**30, "characters": 100_000}
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
    chat = _apply_template(
        tokenizer,
        [{"role": "user", "content": _PLACEHOLDER}],
        'write the turns in task.template as ["..."], with task.chat=False',
    )
    before, placeholder, after = chat.partition(_PLACEHOLDER)
    if not placeholder or _PLACEHOLDER in after:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} writes the user's turn "
            f"{chat.count(_PLACEHOLDER)} times; write the turns in task.template as "
            '["..."], with task.chat=False'
        )
    before, leading_space = _without_bos(tokenizer, before)
    turn = _MASK_AT_END.sub("", template).strip()
    blank = "[mask]" if _MASK_AT_END.search(template) else ""
    before = _with_spaces(tokenizer, before + _PLACEHOLDER, leading_space)
    before = before.removesuffix(_PLACEHOLDER)
    # A space at the end belongs to the first word of the turn; it is not a token of its own.
    space = " " if before.endswith(" ") else ""
    before = before.removesuffix(" ")
    return (
        f"{_literal(before)}{space}{turn}{_literal(_with_spaces(tokenizer, after, False))}{blank}"
    )


def render_conversation(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
    """Applies the chat template to messages, and begins the assistant's turn.

    Without the [BOS] that every input has anyway; `encode_exact` gives the tokens.

    Raises:
      InputError: for a tokenizer without a chat template, messages that the template refuses, and a
        last message of the assistant.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template for messages; give texts, "
            "or use a model that was tuned for chat"
        )
    if messages[-1]["role"] == "assistant":
        raise InputError(
            f"the last message, {brief(messages[-1]['content'])}, is the assistant's, but its next "
            "turn is generated; end with a message of the user"
        )
    chat = _apply_template(tokenizer, messages, "correct the messages")
    chat, leading_space = _without_bos(tokenizer, chat)
    return _with_spaces(tokenizer, chat, leading_space)


def _apply_template(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], advice: str
) -> str:
    """Renders the chat template. Raises InputError, with advice, if that fails."""
    variables = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "enable_thinking": False,  # Qwen 3: the answer is scored, without thoughts before it
        **tokenizer.special_tokens_map,
    }
    try:
        return _render(tokenizer.get_chat_template(), json.dumps(variables))
    # Of json for values that it lacks; of transformers for several templates and no default.
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} fails ({reason}); {advice}"
        ) from error


def _without_bos(tokenizer: Tokenizer, chat: str) -> tuple[str, bool]:
    """Removes the [BOS] that every input has anyway.

    Returns:
      The chat, and whether its first section has a leading space.
    """
    bos, spacing, is_first = tokenizer.bos_token, spaced_sections(tokenizer), True
    if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        is_first = not chat.startswith(bos)
        chat = chat.removeprefix(bos)
    return chat, spacing == "always" or (spacing == "first" and is_first)


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


@functools.cache
def _render(source: str, variables: str) -> str:
    """Renders a chat template with variables in JSON. Raises ValueError if that fails."""
    inputs = _LIMITS | {"source": source, "variables": json.loads(variables)}
    process = subprocess.run(
        [sys.executable, "-P", Path(__file__).with_name("chat_process.py")],
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
    )
    if process.returncode < 0:  # killed at a limit
        raise ValueError("it takes over {seconds} seconds or {bytes:,} bytes".format_map(_LIMITS))
    if process.returncode:
        raise ValueError(process.stderr.strip().rpartition("\n")[2])
    output = json.loads(process.stdout)
    if "error" in output:
        raise ValueError(output["error"])
    return output["text"]


def _literal(text: str) -> str:
    return f"[{json.dumps(text, ensure_ascii=False)}]" if text else ""
