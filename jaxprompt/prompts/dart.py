"""DART: trained template and label vectors, with a fluency objective (Zhang et al. 2022)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.text.tokenizer import unused_ids
from jaxprompt.data.text.words import template_ids
from jaxprompt.errors import InputError, at_least, check_known, check_share
from jaxprompt.layers.hiding import fill_masks, mask_text
from jaxprompt.layers.reading import TargetScores
from jaxprompt.prompts import Method, Source
from jaxprompt.scoring.losses import free_text
from jaxprompt.types import Asks, Batch, Injection, Objective, Stream


class Prompt(Method):
    """Trains `length` vectors for the template and one per label word (sections 4.2 and 4.3).

    The template places them with [soft*n], in the order of the words of `text`, from which they are
    initialised, one vector per subword. A label vector is initialised from its word. It scores its
    class and, in the fluency objective, replaces the mask (section 4.4); if a class has several,
    the first is used.
    """

    READ_WITH = {"fluency": "hide", "start=words": "text"}
    asks: Asks = Asks()
    length: int = kinds.option(3, "rows of the template, one per subword of `text`")
    text: str = kinds.option("", 'words of the template that they start from; "" = N(0, 0.02^2)')
    start: str = kinds.option(
        "words", "words | unused: BERT's [unused1], ... for all rows, in place of `text`"
    )
    labels: bool = kinds.option(True, "label rows are trained; False = label words stay words")
    each: str = kinds.option("class", "a label row for each class | word of a class")
    pieces: str = kinds.option(
        "mean", "a label row starts from the mean of its subwords | from the first"
    )
    fluency: float = kinds.option(0.0, "weight of the fluency objective; 0 = none")
    hide: float = kinds.option(
        0.1, "fluency: share of the text's tokens that is hidden; 0 = one token"
    )

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""
        at_least("prompt.length", self.length, 0)
        at_least("prompt.fluency", self.fluency, 0)
        check_share("prompt.hide", self.hide)
        check_known("prompt.start", self.start, ("words", "unused"))
        check_known("prompt.each", self.each, ("class", "word"))
        check_known("prompt.pieces", self.pieces, ("mean", "first"))

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the template, which has no label vectors."""
        return self.length

    def num_rows(self) -> int:
        """Returns the number of trained label vectors."""
        return sum(map(len, self._words())) if self.labels else 0

    def modules(self) -> dict[str, nn.Module]:
        """Returns the head for hidden words. Raises InputError if there is nothing to hide."""
        if self.fluency and (self.asks.mask < 0 or not self.asks.words):
            raise InputError(
                f"prompt.fluency={self.fluency:g} needs a masked language model and label words, "
                "with head.name=label_rows or verbalizer; set prompt.fluency=0"
            )
        return {"fluency": TargetScores()} if self.fluency else {}

    def objectives(self) -> list[Objective]:
        """Returns the fluency objective: -log p of hidden words given the label (eq. 8-9)."""
        own = Objective("fluency", free_text, "fluency", self.fluency, self._hide_words)
        return [own] if self.fluency else []

    def _hide_words(self, batch: Batch, key) -> Batch:
        """Replaces the masks by the right label, and hides words of the text."""
        hidden = mask_text(batch.encoder, key, share=self.hide, mask=self.asks.mask)
        table = np.full((len(self.asks.words), batch.label_pos.shape[1]), -1)  # [C, M]
        first = self.length + np.cumsum([0, *map(len, self._words()[:-1])])
        for masks, words, row in zip(table, self.asks.words, first, strict=True):
            right = [row] if self.labels else words[0]
            masks[: len(right)] = right  # no mask is left beside a word that is short (eq. 8)
        field = "slot" if self.labels else "ids"
        values = jnp.asarray(table)[batch.labels]
        tokens, at = fill_masks(hidden.tokens, batch.label_pos, field, values)
        places = jnp.take_along_axis(at, hidden.places, axis=1)
        return batch._replace(encoder=tokens, label_pos=places, targets=hidden.targets)

    def _words(self) -> list[list[tuple[tuple[int, ...], ...]]]:
        """Lists the words that each label row stands for, by class."""
        return [[(w,) for w in own] if self.each == "word" else [own] for own in self.asks.words]

    def begin(self, params: dict[str, Any], source: Source) -> dict[str, Any]:
        """Copies the embeddings of the template's words and of the label words. -> params"""
        found = dict(params)
        if self.start == "unused":
            counts = {name: len(rows) for name, rows in params.items()}
            ids, cut = unused_ids(source.tokenizer, sum(counts.values())), counts.get("table", 0)
            own = {"table": (source.embed, ids[:cut]), "rows": (source.rows, ids[cut:])}
            read = lambda pick, ids: np.asarray(pick(ids), np.float32)
            return found | {name: read(*own[name]) for name in counts}
        if self.text:
            ids = template_ids(source.tokenizer, self.text)
            if len(ids) != self.length:
                raise InputError(
                    f"prompt.text={self.text!r} has {len(ids)} subwords, but prompt.length is "
                    f"{self.length}; set prompt.length={len(ids)} and write [soft*{len(ids)}]"
                )
            found["table"] = np.asarray(source.embed(ids), np.float32)
        if "rows" in params:
            mean = lambda w: source.rows(list(w[: 1 if self.pieces == "first" else None])).mean(0)
            rows = [np.mean([*map(mean, row)], axis=0) for own in self._words() for row in own]
            found["rows"] = np.stack(rows).astype(np.float32)
        return found

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns slots [1, S + R, E], of which the template places S, and rows [R, E]."""
        draw = nn.initializers.normal(0.02)
        part = lambda name, count: self.param(name, draw, (count, self.dims.embed))
        parts = [part("table", self.length)] if self.length else []
        rows = part("rows", self.num_rows()) if self.num_rows() else None
        whole = parts + ([] if rows is None else [rows])
        slots = jnp.concatenate(whole)[None] if whole else None
        # Without either, neither the template nor a view writes a slot.
        return Injection(Stream(slots=slots if self.length or self.fluency else None), rows=rows)
