"""DART: trained template and label vectors, with a fluency objective (Zhang et al. 2022)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.text.tokenizer import unused_ids
from jaxprompt.data.text.words import template_ids
from jaxprompt.errors import InputError
from jaxprompt.layers.hiding import fill_masks, mask_text
from jaxprompt.layers.reading import TargetScores
from jaxprompt.prompts import InitSource, Method
from jaxprompt.scoring.losses import text_loss
from jaxprompt.types import Batch, Injection, Objective, Stream, TaskInfo


class Prompt(Method):
    """Trains `length` vectors for the template and one per label word (sections 4.2 and 4.3).

    The template places them with [soft*n], in the order of the words of `text`, from which they are
    initialised, one vector per subword. A label vector is initialised from its word. It scores its
    class and, in the fluency objective, replaces the mask (section 4.4); if a class has several,
    the first is used.
    """

    READ_WITH = {"fluency": "hide", "start=words": "text"}
    task_info: TaskInfo = TaskInfo()
    length: int = kinds.option(
        3, "trained embeddings in the template, one per subword of `text`", "at least 0"
    )
    text: str = kinds.option("", 'words that initialise the template embeddings; "" = N(0, 0.02^2)')
    start: str = kinds.option(
        "words",
        "initial embeddings. words: those of `text`; unused: BERT's [unused1] and so on",
        ("words", "unused"),
    )
    labels: bool = kinds.option(True, "train label embeddings; False = score the label words")
    each: str = kinds.option(
        "class", "train one label embedding per class, or one per label word", ("class", "word")
    )
    pieces: str = kinds.option(
        "mean",
        "initialise a label embedding from the mean of its subwords, or from the first",
        ("mean", "first"),
    )
    fluency: float = kinds.option(0.0, "weight of the fluency objective; 0 = none", "at least 0")
    hide: float = kinds.option(
        0.1, "fluency: probability that a token of the text is masked; 0 = one token", "in [0, 1)"
    )

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the template, which has no label vectors."""
        return self.length

    def num_rows(self) -> int:
        """Returns the number of trained label vectors."""
        return sum(map(len, self._words())) if self.labels else 0

    def modules(self) -> dict[str, nn.Module]:
        """Returns the head for hidden words. Raises InputError if there is nothing to hide."""
        if self.fluency and (self.task_info.mask < 0 or not self.task_info.words):
            raise InputError(
                f"prompt.fluency={self.fluency:g} needs a masked language model and label words, "
                "with head.name=label_rows or verbalizer; set prompt.fluency=0"
            )
        return {"fluency": TargetScores()} if self.fluency else {}

    def objectives(self) -> list[Objective]:
        """Returns the fluency objective: -log p of hidden words given the label (eq. 8-9)."""
        fluency = Objective("fluency", text_loss, "fluency", self.fluency, self._hide_words)
        return [fluency] if self.fluency else []

    def _hide_words(self, batch: Batch, key) -> Batch:
        """Replaces the masks by the right label, and hides words of the text."""
        hidden = mask_text(batch.encoder, key, share=self.hide, mask=self.task_info.mask)
        table = np.full((len(self.task_info.words), batch.label_pos.shape[1]), -1)  # [C, M]
        first_slots = self.length + np.cumsum([0, *map(len, self._words()[:-1])])
        for row, words, slot in zip(table, self.task_info.words, first_slots, strict=True):
            label = [slot] if self.labels else words[0]
            row[: len(label)] = label  # masks after a short word are removed (eq. 8)
        field = "slot" if self.labels else "ids"
        values = jnp.asarray(table)[batch.labels]  # [B, M]
        tokens, at = fill_masks(hidden.tokens, batch.label_pos, field, values)
        label_pos = jnp.take_along_axis(at, hidden.places, axis=1)
        return batch._replace(encoder=tokens, label_pos=label_pos, targets=hidden.targets)

    def _words(self) -> list[list[tuple[tuple[int, ...], ...]]]:
        """Lists the words of each label vector, by class."""
        if self.each == "class":
            return [[words] for words in self.task_info.words]
        return [[(word,) for word in words] for words in self.task_info.words]

    def begin(self, params: dict[str, Any], source: InitSource) -> dict[str, Any]:
        """Copies the embeddings of the template's words and of the label words. -> params"""
        init_params = dict(params)
        if self.start == "unused":
            length = len(params.get("table", ()))
            ids = unused_ids(source.tokenizer, length + len(params.get("rows", ())))
            if "table" in params:
                init_params["table"] = np.asarray(source.embed(ids[:length]), np.float32)
            if "rows" in params:
                init_params["rows"] = np.asarray(source.rows(ids[length:]), np.float32)
            return init_params
        if self.text:
            ids = template_ids(source.tokenizer, self.text)
            if len(ids) != self.length:
                raise InputError(
                    f"prompt.text={self.text!r} has {len(ids)} subwords, but prompt.length is "
                    f"{self.length}; set prompt.length={len(ids)} and write [soft*{len(ids)}]"
                )
            init_params["table"] = np.asarray(source.embed(ids), np.float32)
        if "rows" in params:
            last = 1 if self.pieces == "first" else None

            def mean(word: tuple[int, ...]) -> np.ndarray:
                return source.rows(list(word[:last])).mean(0)

            rows = [np.mean([*map(mean, row)], axis=0) for words in self._words() for row in words]
            init_params["rows"] = np.stack(rows).astype(np.float32)
        return init_params

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns slots [1, S + R, E], of which the template places S, and rows [R, E]."""
        injection = self._vectors(0.02)
        if self.length or self.fluency:
            return injection
        # Neither the template nor a view writes slots.
        return injection._replace(encoder=Stream())
