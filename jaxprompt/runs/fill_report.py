"""Readable reports of a model's predictions on held-out sequences."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.heads.pretraining import LikeliestHead
from jaxprompt.models.model import Model
from jaxprompt.runs.replaced_tokens import Pair, replace_tokens
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch

_MARKS = ("##", "Ġ", "▁")  # first of a subword: in WordPiece, byte-level BPE, SentencePiece
_SHOWN = 64  # targets of a sequence that are shown

LEGENDS = {
    "mlm": "[a] masked token, predicted correctly; [a|b] predicted a, the token was b",
    "rtd": "[+a|b] a replaced b, detected; [-a|b] not detected; [!a] a not replaced, but judged so",
    "seq2seq": "input, target, most likely token at each position of the target",
    "causal": "end of a sequence, most likely token at each of its positions",
}


def make_fill_step(model: Model | Pair):
    """Returns (trainable, frozen, batch, key) -> tokens [B, M], and a Pair's hits [B, T].

    Tokens are the most likely ones at each target, those of a Pair are sampled by its generator.
    """
    if isinstance(model, Pair):

        def step(trainable: Flat, frozen: Flat, batch: Batch, key):
            params = merge(trainable, frozen)
            generated = model.forward(params, batch, head="generator", key=key)
            detected = model.forward(params, replace_tokens(batch, generated), head="discriminator")
            return generated.sampled, detected.hit

        return step
    likeliest = dataclasses.replace(model, heads={"main": LikeliestHead()})

    def fill(trainable: Flat, frozen: Flat, batch: Batch, key):
        return likeliest.forward(merge(trainable, frozen), batch), None

    return fill


def render(
    objective: str, tokenizer: Tokenizer, batch: Batch, tokens: np.ndarray, hits: np.ndarray | None
) -> Iterator[str]:
    """Yields the legend, then each sequence of a batch as text."""
    inline, targets = objective in ("mlm", "rtd"), batch.targets
    assert targets is not None
    yield LEGENDS[objective if inline else "causal" if batch.decoder is None else "seq2seq"]
    for row in np.flatnonzero(batch.weights):
        is_target = targets[row] >= 0
        target_ids, predicted_ids = targets[row][is_target], tokens[row][is_target]
        ids = batch.encoder.ids[row][batch.encoder.mask[row]]
        if inline:
            positions = batch.label_pos[row][is_target]
            row_hits = None if hits is None else hits[row][: len(ids)]
            predictions = {
                position: (predicted, target)
                for position, predicted, target in zip(
                    positions, predicted_ids, target_ids, strict=True
                )
            }
            yield _inline(tokenizer, ids, predictions, row_hits)
            continue
        if batch.decoder is not None:
            yield f"read:   {tokenizer.decode(ids)}"
        yield f"truth:  {tokenizer.decode(target_ids[-_SHOWN:])}"
        yield f"filled: {tokenizer.decode(predicted_ids[-_SHOWN:])}"


def _inline(
    tokenizer: Tokenizer,
    ids: np.ndarray,
    predictions: dict[int, tuple[int, int]],
    row_hits: np.ndarray | None,
) -> str:
    """Formats a sequence with marks; `predictions` are (predicted id, target id) by position."""
    subwords = _subwords(tokenizer, ids.tolist())
    for position in range(len(subwords)):
        predicted, target = predictions.get(position, (ids[position], ids[position]))
        if row_hits is None and position in predictions:
            text = _format_ids(
                tokenizer, [predicted] if predicted == target else [predicted, target]
            )
        elif row_hits is not None and predicted != target:
            text = "-+"[int(row_hits[position])] + _format_ids(tokenizer, [predicted, target])
        elif row_hits is not None and not row_hits[position]:
            text = "!" + _format_ids(tokenizer, [predicted])
        else:
            subwords[position] = _subwords(tokenizer, [predicted])[0]
            continue
        # With the original's mark of a space, so that words are separated as in the text.
        target_subword = _subwords(tokenizer, [target])[0]
        subwords[position] = (
            next((mark for mark in _MARKS if target_subword.startswith(mark)), "") + f"[{text}]"
        )
    return tokenizer.convert_tokens_to_string(subwords)


def _format_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    def clean(subword):
        return tokenizer.convert_tokens_to_string([subword]).strip().removeprefix("##")

    return "|".join(map(clean, _subwords(tokenizer, ids)))


def _subwords(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the tokens of ids; padding ids of the vocabulary table are shown as numbers."""
    subwords = tokenizer.convert_ids_to_tokens([int(token_id) for token_id in ids])
    return [
        f"[{token_id}]" if subword is None else subword
        for token_id, subword in zip(ids, subwords, strict=True)
    ]
