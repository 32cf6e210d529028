"""The special tokens that each kind of model has around and inside its input."""

from typing import NamedTuple

from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError

STYLES = ("masked", "seq2seq", "causal", "infilling")  # BERT and its kin; T5; GPT-2; GLM
FED = ("seq2seq", "infilling")  # those that are fed an answer apart from the input
INFILLING = ("[CLS]", "[MASK]", "[gMASK]", "<|startofpiece|>", "<|endofpiece|>")  # GLM's own
SENTINEL = "<extra_id_{}>"


class Specials(NamedTuple):
    """Token ids. An empty tuple writes nothing."""

    style: str  # of STYLES
    cls: tuple[int, ...]  # in front of the input
    end: tuple[int, ...]  # behind it
    sep: tuple[int, ...]  # where a template says [sep]
    masks: tuple[int, ...]  # where it says [mask]: BERT's mask, T5's sentinels in order
    pad: int
    start: int = -1  # what an answer begins with, -1 = what the backbone says
    stop: int = -1  # what it ends with


def read_specials(
    tokenizer: Tokenizer, style: str, *, eos: bool, sentinel: str, masks: int
) -> Specials:
    """Reads the special tokens of a tokenizer; a template with [mask] needs `masks` of them.

    T5's input ends with </s> if `eos`; its [mask] is the sentinel written by the pattern
    `sentinel`. GPT-2 has no mask: [mask] is the end of its input, and the input of such a model
    begins with <s> if the tokenizer adds it. GLM's blank is [MASK], or [gMASK] at the end of the
    input if the template has none. Raises InputError if the vocabulary lacks a token.
    """
    if style == "masked":
        cls, sep, pad = (_need(tokenizer, name) for name in ("cls", "sep", "pad"))
        mask = (_need(tokenizer, "mask"),) if masks else ()
        # RoBERTa's own pairs have two separators between the texts; a tokenizer may know of none.
        inner = max(1, tokenizer.num_special_tokens_to_add(pair=True) - 2)
        return Specials(style, (cls,), (sep,), (sep,) * inner, mask, pad)
    # A GPT-2 or T5 with a BERT's tokenizer ends a text with [SEP].
    has_end = tokenizer.eos_token_id is not None or tokenizer.sep_token_id is None
    last = _need(tokenizer, "eos" if has_end else "sep")
    # Padding is masked, so any id will do where a tokenizer has none for it.
    pad = last if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if style == "causal":
        first = tokenizer.bos_token_id
        first = tokenizer.cls_token_id if first is None else first
        # By what it does: many tokenizers have a <s> and do not write it.
        begins = first is not None and tokenizer("a")["input_ids"][:1] == [first]
        front = (first,) if first is not None and begins else ()
        return Specials(style, front, (), (last,), (), pad, stop=last)
    if style == "infilling":
        cls, word, text, start, stop = (_find(tokenizer, name) for name in INFILLING)
        blank = word if masks else text
        return Specials(style, (cls,), (last,), (last,), (blank,), pad, start, stop)
    found = tuple(_sentinel(tokenizer, sentinel, number) for number in range(masks))
    return Specials(style, (), (last,) if eos else (), (last,), found, pad, stop=last)


def answer_start(specials: Specials, own: int) -> int:
    """Returns the token that starts an answer: the tokenizer's, else the backbone's `own`."""
    return own if specials.start < 0 else specials.start


def _need(tokenizer: Tokenizer, name: str) -> int:
    number = getattr(tokenizer, f"{name}_token_id")
    if number is None:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no {name} token, which the template needs; "
            "use a backbone that has one"
        )
    return number


def _find(tokenizer: Tokenizer, name: str) -> int:
    vocab = tokenizer.get_vocab()
    if name not in vocab:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no {name}, which GLM's input needs; use the "
            "tokenizer of the weights, with its special tokens"
        )
    return vocab[name]


def _sentinel(tokenizer: Tokenizer, pattern: str, number: int) -> int:
    name = pattern.format(number)
    vocab = tokenizer.get_vocab()
    for spelling in (name, f"▁{name}"):  # mT5's have the space in them
        if spelling in vocab:
            return vocab[spelling]
    raise InputError(
        f"tokenizer {tokenizer.name_or_path!r} has no sentinel {name!r} for [mask]; set "
        f"backbone.sentinel to its form in the vocabulary, with {{}} for the number, or "
        "task.form=text"
    )
