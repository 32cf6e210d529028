"""Classes by trained label vectors, on the backbone's language-model head (DART, section 4.3)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.heads import BackboneInfo, HeadLayout, TaskSetup
from jaxprompt.heads.verbalizer import SCORES, LabelWordHead
from jaxprompt.layers.capping import logit_cap, soft_cap
from jaxprompt.layers.product import einsum
from jaxprompt.layers.quantized import score_table
from jaxprompt.layers.reading import Scores, mask_absent, select_positions
from jaxprompt.scoring.losses import cross_entropy, nll
from jaxprompt.types import Batch, Objective


@dataclasses.dataclass(frozen=True)
class Head(LabelWordHead):
    """Scores classes by vectors that the method trains, initialised from the label words."""

    scores: str = kinds.option(
        "restricted",
        "softmax over the label embeddings (restricted), or also the vocabulary (full)",
        SCORES,
    )

    def reads_rows(self) -> bool:
        """Returns True."""
        return True

    def check_form(self, form: str, style: str) -> None:
        """Raises InputError for task.form=text, where an answer has several tokens."""
        if form == "text":
            raise InputError(
                f"head.name={self.name} reads one position, but task.form=text has several; use "
                "task.form=cloze, or head.name=verbalizer and prompt.labels=False"
            )

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads the single position of a label."""
        words = self.read_words(facts, setup, tokenizer)
        plan = words.plan(words.verbalizer.ids[:, :1, :1])  # a vector replaces a whole word
        counts = tuple(int(n) for n in (words.verbalizer.ids >= 0).any(-1).sum(-1))
        return words.layout(self, {"main": LabelRows(counts, self.scores)}, plan, masks=1)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the cross entropy over the label vectors, or over these and the vocabulary."""
        # "full" is already normalised over the vocabulary, and must not be over the classes.
        loss = nll if self.scores == "full" else cross_entropy
        return [Objective("main", partial(loss, smoothing=smoothing))]


class LabelRows(Scores):
    """Scores each class by its vectors of `Injection.rows` and a bias. [B, T, H] -> float32 [B, C]

    There is one vector per class, or one per word: then the score of a class is the mean over its
    words. Normalised over the label vectors, or with "full" over the vocabulary as well. The
    vectors are separate from the word embeddings, so the original label words remain words; these
    are never predicted, since the prediction is always the best of the label vectors.
    """

    words: tuple[int, ...]  # number of words of each class
    scores: str = "restricted"

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores the classes."""
        rows, classes = injection.rows, len(self.words)
        count = 0 if rows is None else len(rows)
        if count not in (classes, sum(self.words)):
            raise InputError(
                f"head.name=label_rows needs one vector for each of {classes} classes or for each "
                f"of their words, but the method trains {count or 'none'}; use prompt.name=dart "
                "with prompt.labels=True, or head.name=verbalizer"
            )
        per_word = count > classes
        counts = self.words if per_word else (1,) * classes
        features = backbone.lm_features(select_positions(hidden, batch.label_pos[:, :1]))
        features = features[:, 0]  # [B, X]
        bias = self.param("bias", nn.initializers.zeros, (classes,))
        class_of = np.repeat(np.arange(classes), counts)  # the class of each row
        logits = einsum("bx,rx->br", features, rows.astype(features.dtype), jnp.float32)
        cap = logit_cap(backbone)
        # The cap belongs to the backbone, so it does not apply to the trained bias.
        logits = soft_cap(logits, cap) + bias[class_of]
        logits = mask_absent(logits, batch.counts, class_of)
        if self.scores == "full":
            table, table_bias = backbone.lm_table()
            words = soft_cap(score_table(features, table), cap)
            words = words if table_bias is None else words + table_bias.astype(jnp.float32)
            logits = jnp.concatenate([logits, words], axis=-1)
        logp = jax.nn.log_softmax(logits)
        # Sliced after normalising, so that "full" includes the vocabulary.
        scores = logp[:, : len(class_of)]
        if per_word:
            means = np.eye(classes, dtype=np.float32)[class_of] / np.asarray(counts, np.float32)
            scores = einsum("br,rc->bc", scores, jnp.asarray(means), jnp.float32)
        return scores
