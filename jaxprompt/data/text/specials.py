"""The special tokens that each kind of model has around and inside its input."""

from typing import NamedTuple

from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError

STYLES = ("masked", "seq2seq", "causal", "infilling")  # BERT and its kin; T5; GPT-2; GLM
FED = ("seq2seq", "infilling")  # styles whose answer is a separate input
INFILLING = ("[CLS]", "[MASK]", "[gMASK]", "<|startofpiece|>", "<|endofpiece|>")  # GLM's tokens
SENTINEL = "<extra_id_{}>"


class Specials(NamedTuple):
    """Ids of special tokens; an empty tuple means none."""

    style: str  # of STYLES
    cls: tuple[int, ...]  # before the input
    end: tuple[int, ...]  # after the input
    sep: tuple[int, ...]  # for [sep] in a template
    masks: tuple[int, ...]  # for [mask]: BERT's mask, T5's sentinels in order
    pad: int
    start: int = -1  # first token of an answer, -1 = the backbone's decoder start
    stop: int = -1  # last token of an answer


def read_specials(
    tokenizer: Tokenizer, style: str, *, eos: bool, sentinel: str, num_masks: int
) -> Specials:
    """Reads the special tokens of a tokenizer; a template with [mask] needs `num_masks` of them.

    T5's input ends with </s> if `eos`; its [mask] is the sentinel written by the pattern
    `sentinel`. GPT-2 has no mask: [mask] is the end of its input, and the input of such a model
    begins with <s> if the tokenizer adds it. GLM's blank is [MASK], or [gMASK] at the end of the
    input if the template has none. Raises InputError if the vocabulary lacks a token.
    """
    if style == "masked":
        cls, sep, pad = (_special_id(tokenizer, name) for name in ("cls", "sep", "pad"))
        mask = (_special_id(tokenizer, "mask"),) if num_masks else ()
        # RoBERTa has two separators between the texts of a pair; some tokenizers add none.
        inner = max(1, tokenizer.num_special_tokens_to_add(pair=True) - 2)
        return Specials(style, (cls,), (sep,), (sep,) * inner, mask, pad)
    # A GPT-2 or T5 with a BERT's tokenizer ends a text with [SEP].
    has_end = tokenizer.eos_token_id is not None or tokenizer.sep_token_id is None
    eos_id = _special_id(tokenizer, "eos" if has_end else "sep")
    # Padding is masked, so any id will do where a tokenizer has none for it.
    pad = eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if style == "causal":
        bos_id = tokenizer.bos_token_id
        bos_id = tokenizer.cls_token_id if bos_id is None else bos_id
        # Many tokenizers have a <s> that they do not add.
        adds_bos = bos_id is not None and tokenizer("a")["input_ids"][:1] == [bos_id]
        bos = (bos_id,) if bos_id is not None and adds_bos else ()
        return Specials(style, bos, (), (eos_id,), (), pad, stop=eos_id)
    if style == "infilling":
        cls, short_blank, long_blank, start, stop = (
            _vocab_id(tokenizer, name) for name in INFILLING
        )
        blank = short_blank if num_masks else long_blank
        return Specials(style, (cls,), (eos_id,), (eos_id,), (blank,), pad, start, stop)
    sentinels = tuple(_sentinel_id(tokenizer, sentinel, number) for number in range(num_masks))
    return Specials(style, (), (eos_id,) if eos else (), (eos_id,), sentinels, pad, stop=eos_id)


def answer_start(specials: Specials, default: int) -> int:
    """Returns the token that starts an answer: the tokenizer's, else the backbone's `default`."""
    return default if specials.start < 0 else specials.start


def _special_id(tokenizer: Tokenizer, name: str) -> int:
    token_id = getattr(tokenizer, f"{name}_token_id")
    if token_id is None:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no {name} token, which the template needs; "
            "use a backbone that has one"
        )
    return token_id


def _vocab_id(tokenizer: Tokenizer, name: str) -> int:
    vocab = tokenizer.get_vocab()
    if name not in vocab:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no {name}, which GLM's input needs; use the "
            "tokenizer of the weights, with its special tokens"
        )
    return vocab[name]


def _sentinel_id(tokenizer: Tokenizer, pattern: str, number: int) -> int:
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
