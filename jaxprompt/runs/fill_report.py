"""Readable reports of a model's predictions on held-out sequences."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.heads.pretraining import LikeliestHead
from jaxprompt.models.model import Model
from jaxprompt.runs.replaced_tokens import Pair, replace
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch

_MARKS = ("##", "Ġ", "▁")  # in front of a piece: of WordPiece, byte-level BPE, SentencePiece
_SHOWN = 64  # targets of a causal model

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
            scored = model.forward(params, batch, head="generator", key=key)
            found = model.forward(params, replace(batch, scored), head="discriminator")
            return scored.sampled, found.hit

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
        asked = targets[row] >= 0
        truth, said = targets[row][asked], tokens[row][asked]
        ids = batch.encoder.ids[row][batch.encoder.mask[row]]
        if inline:
            places = batch.label_pos[row][asked]
            told = None if hits is None else hits[row][: len(ids)]
            filled = {at: (new, old) for at, new, old in zip(places, said, truth, strict=True)}
            yield _inline(tokenizer, ids, filled, told)
            continue
        if batch.decoder is not None:
            yield f"read:   {tokenizer.decode(ids)}"
        yield f"truth:  {tokenizer.decode(truth[-_SHOWN:])}"
        yield f"filled: {tokenizer.decode(said[-_SHOWN:])}"


def _inline(
    tokenizer: Tokenizer, ids: np.ndarray, places: dict[int, tuple[int, int]],
    told: np.ndarray | None,
) -> str:  # fmt: skip
    """Formats a sequence with marks; `places` has the predicted and the true token by position."""
    pieces = _pieces(tokenizer, ids.tolist())
    for at in range(len(pieces)):
        new, old = places.get(at, (ids[at], ids[at]))
        if told is None and at in places:
            shown = _names(tokenizer, [new] if new == old else [new, old])
        elif told is not None and new != old:
            shown = "-+"[int(told[at])] + _names(tokenizer, [new, old])
        elif told is not None and not told[at]:
            shown = "!" + _names(tokenizer, [new])
        else:
            pieces[at] = _pieces(tokenizer, [new])[0]
            continue
        # The original's mark of a space, so that the words around stay apart as in the text.
        front = _pieces(tokenizer, [old])[0]
        pieces[at] = next((mark for mark in _MARKS if front.startswith(mark)), "") + f"[{shown}]"
    return tokenizer.convert_tokens_to_string(pieces)


def _names(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    clean = lambda piece: tokenizer.convert_tokens_to_string([piece]).strip().removeprefix("##")
    return "|".join(map(clean, _pieces(tokenizer, ids)))


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the tokens of ids; padding ids of the vocabulary table are shown as numbers."""
    pieces = tokenizer.convert_ids_to_tokens([int(one) for one in ids])
    return [f"[{one}]" if piece is None else piece for one, piece in zip(ids, pieces, strict=True)]
