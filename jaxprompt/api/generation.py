"""Generation of free text from Python: whole texts, samples, and a stream of pieces."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxprompt.api.banks import BankedModel
from jaxprompt.api.models import PromptedModel
from jaxprompt.api.rows import AnyRows, as_conversations
from jaxprompt.data.tasks.conversation import MESSAGES, Conversation
from jaxprompt.data.tasks.task import Example
from jaxprompt.errors import InputError, brief, check_type

Messages = Sequence[Mapping[str, Any]]  # each with a role and a content


def generate(
    model: PromptedModel | BankedModel,
    rows: AnyRows | Sequence[str] | Sequence[Messages],
    **options: Any,
) -> list[Any]:
    """Generates a text for each text, row or conversation, whatever the task of the prompt is.

    Args:
      model: result of `attach`.
      rows: texts or rows, which the prompt's template is applied to; or conversations, lists of
        messages such as {"role": "user", "content": "Hello"}, which the tokenizer's chat template
        is applied to, after the soft tokens of the prompt. One conversation may be given alone. For
        several prompts: rows, each with the name of its prompt.
      **options: fields of the config block `generate`: max_new_tokens, temperature, top_k, top_p,
        min_p, n, repetition_penalty, stop, seed, logprobs, num_beams, length_penalty,
        early_stopping; by default as in the metadata of each prompt.

    Returns:
      A text for each row; with n > 1 a list of n texts; with logprobs=True a dict with the columns
      generated, tokens and logprobs. For several prompts always a dict, with the name of the row's
      prompt.

    Raises:
      InputError: for a backbone that cannot generate text, and for invalid options or messages.
    """
    if isinstance(model, BankedModel):
        return model.generate(rows, options)
    check_type("model", model, PromptedModel, "the result of attach")
    conversations = as_conversations(rows, model.scorer.task.fields)
    generation = model.generation(options)
    if conversations is None:
        examples = model.read(rows)
    else:
        examples = _as_examples(model, conversations)
    if not examples:
        return []
    answer = model.writer(generation, reads_chat=conversations is not None)
    columns = answer(model.params, examples).columns
    return columns if generation.logprobs else [row["generated"] for row in columns]


def stream(
    model: PromptedModel, row: str | Mapping[str, Any] | Messages, **options: Any
) -> Iterator[str]:
    """Generates one text and yields its pieces as soon as they are final.

    The pieces joined are the text that `generate` returns.

    Args:
      model: result of `attach` with one prompt.
      row: a text, a row or a conversation, see `generate`.
      **options: as for `generate`, without num_beams, n and logprobs.

    Yields:
      Strings.

    Raises:
      InputError: as `generate`, at once, before the first piece is requested.
    """
    check_type("model", model, PromptedModel, "the result of attach with one prompt")
    conversations = as_conversations(row, model.scorer.task.fields)
    if conversations is not None and len(conversations) != 1:
        raise InputError(f"stream generates 1 text, not {len(conversations)}; call it for each")
    generation = model.generation(options)
    for name, one in (("num_beams", 1), ("n", 1), ("logprobs", False)):
        if (value := getattr(generation, name)) != one:
            raise InputError(f"stream yields one text as it grows; set {name}={one}, not {value}")
    if conversations is None:
        examples = model.read([row])
    else:
        examples = _as_examples(model, conversations)
    if len(examples) != 1:
        raise InputError(f"stream generates 1 text, and {brief(row)} has {len(examples)} examples")
    return model.stream(generation, examples[0], reads_chat=conversations is not None)


def _as_examples(model: PromptedModel, conversations: Sequence[Messages]) -> list[Example]:
    tokenizer, backbone = model.scorer.tokenizer, model.scorer.model.backbone
    if backbone.STYLE != "causal":
        raise InputError(
            "messages need a backbone that reads left to right, a GPT-2 or a Llama; give texts"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template for messages; give texts, "
            "or use a model that was tuned for chat"
        )
    for messages in conversations:
        if messages[-1]["role"] == "assistant":
            raise InputError(
                f"the last message, {brief(messages[-1]['content'])}, is the assistant's, but its "
                "next turn is generated; end with a message of the user"
            )
    chats = (Conversation(list(map(dict, messages)), [], []) for messages in conversations)
    return [Example({MESSAGES: chat.to_json()}) for chat in chats]
