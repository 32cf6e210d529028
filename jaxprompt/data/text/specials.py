"""The special tokens that each kind of model has around and inside its input."""

from typing import NamedTuple

from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError

STYLES = ("masked", "seq2seq", "causal", "infilling")  # BERT and its kin; T5 and BART; GPT-2; GLM
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
    `sentinel`. GPT-2 has no mask: [mask] is the end of its input. The input of these models begins
    with <s> if the tokenizer adds it, as BART's does. GLM's blank is [MASK], or [gMASK] at the end
    of the input if the template has none. Raises InputError if the vocabulary lacks a token.
    """
    if style == "masked":
        # EuroBERT's text stands between the tokens of a Llama.
        has_cls = tokenizer.cls_token_id is not None or tokenizer.bos_token_id is None
        names = ("cls", "sep", "pad") if has_cls else ("bos", "eos", "pad")
        cls, sep, pad = (special_id(tokenizer, name) for name in names)
        mask = (special_id(tokenizer, "mask"),) if num_masks else ()
        return Specials(style, (cls,), (sep,), (sep,) * _num_inner(tokenizer), mask, pad)
    # A GPT-2 or T5 with a BERT's tokenizer ends a text with [SEP].
    has_end = tokenizer.eos_token_id is not None or tokenizer.sep_token_id is None
    eos_id = special_id(tokenizer, "eos" if has_end else "sep")
    # Padding is masked, so any id will do where a tokenizer has none for it.
    pad = eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    bos_id = tokenizer.bos_token_id
    if bos_id is None and style == "causal":
        bos_id = tokenizer.cls_token_id
    # Many tokenizers have a <s> that they do not add.
    adds_bos = bos_id is not None and tokenizer("a")["input_ids"][:1] == [bos_id]
    bos = (bos_id,) if bos_id is not None and adds_bos else ()
    if style == "causal":
        return Specials(style, bos, (), (eos_id,), (), pad, stop=eos_id)
    if style == "infilling":
        vocab = tokenizer.get_vocab()
        if absent := [name for name in INFILLING if name not in vocab]:
            raise InputError(
                f"tokenizer {tokenizer.name_or_path!r} has no {absent[0]}, which GLM's input "
                "needs; use the tokenizer of the weights, with its special tokens"
            )
        cls, short_blank, long_blank, start, stop = (vocab[name] for name in INFILLING)
        blank = short_blank if num_masks else long_blank
        return Specials(style, (cls,), (eos_id,), (eos_id,), (blank,), pad, start, stop)
    sentinels = sentinel_ids(tokenizer, num_masks, sentinel)
    end, inner = (eos_id,) if eos else (), (eos_id,) * _num_inner(tokenizer)
    return Specials(style, bos, end, inner, sentinels, pad, stop=eos_id)


def _num_inner(tokenizer: Tokenizer) -> int:
    """Returns how many separators are between the texts of a pair: two in RoBERTa and BART."""
    # Some tokenizers add none.
    return max(1, tokenizer.num_special_tokens_to_add(pair=True) - 2)


def answer_start(specials: Specials, default: int) -> int:
    """Returns the token that starts an answer: the tokenizer's, else the backbone's `default`."""
    return default if specials.start < 0 else specials.start


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """Returns the id of a special token. Raises InputError if the tokenizer has none."""
    token_id = getattr(tokenizer, f"{name}_token_id", None)
    if token_id is None:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no {name} token, which this template or "
            "objective needs; use another, or a backbone that has one"
        )
    return token_id


def sentinel_ids(tokenizer: Tokenizer, count: int, pattern: str = SENTINEL) -> tuple[int, ...]:
    """Returns the ids of the first sentinels, in order. Raises InputError if there are too few."""
    vocab = tokenizer.get_vocab()
    names = [pattern.format(number) for number in range(count)]
    ids = [vocab.get(name, vocab.get(f"▁{name}")) for name in names]  # mT5's have the space in them
    if None in ids:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r} has no sentinel {names[ids.index(None)]!r}, but "
            f"{count} are needed; set backbone.sentinel to its form in the vocabulary, with {{}} "
            "for the number, task.form=text, or an objective with fewer spans"
        )
    return tuple(token_id for token_id in ids if token_id is not None)
