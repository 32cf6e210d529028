"""Classes by a linear layer on a pooled hidden state."""

import dataclasses

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.text.specials import FED
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, with_article
from jaxprompt.heads import BackboneInfo, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.reading import Scores, mask_absent, score_layer
from jaxprompt.scoring.losses import make_loss
from jaxprompt.types import ABSENT, Batch, Objective, Role

POOLERS = ("checkpoint", "trained", "cls", "mean")


@dataclasses.dataclass(frozen=True)
class Head(Kind):
    """Classes, or the choices of an example, by a linear layer."""

    pooler: str = kinds.option(
        "auto",
        "input of the linear layer; auto = checkpoint if it has a pooler, else cls",
        ("auto", *POOLERS),
    )
    dropout: float = kinds.option(0.1, "dropout before the linear layer", "in [0, 1)")

    def check_backbone(self, facts: BackboneInfo) -> None:
        """Raises InputError for a pooler that the backbone does not have."""
        if self.pooler == "mean" and facts.style in FED:
            raise InputError(
                f"head.pooler=mean has no text to average in the output of "
                f"{with_article(facts.family)}; use cls"
            )
        if self.pooler == "checkpoint" and "pooler" not in facts.heads:
            raise InputError(
                f"{facts.where} has no pooler for head.pooler=checkpoint; use trained, cls or mean"
            )

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads [CLS], a left-to-right model's last input token, or a decoder's first state."""
        task, choice = setup.task, setup.template.uses_choice
        if not (choice or task.labels):
            raise InputError(
                f"task {task.name}: the choices are the classes; use {{choice}} in task.template"
            )
        head, module = self.classifier(facts, 1 if choice else len(task.labels))
        specials = self.specials(facts, setup, tokenizer)
        layout = HeadLayout(head, {"main": module}, specials)
        return layout._replace(names=[words[0] for words in task.words]) if task.words else layout

    def classifier(self, facts: BackboneInfo, scores: int) -> tuple["Head", "Classifier"]:
        """Returns itself with the pooler resolved, and the module for this many scores."""
        default = "checkpoint" if "pooler" in facts.heads else "cls"
        head = dataclasses.replace(self, pooler=default if self.pooler == "auto" else self.pooler)
        return head, Classifier(scores, head.pooler, head.dropout)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the cross entropy of the classes."""
        return [Objective("main", make_loss("restricted", smoothing))]


class Classifier(Scores):
    """Scores classes, or with one class the K choices of an example. [B*K, T, H] -> [B, C]

    The pooled vector is [CLS] through the checkpoint's pooler, [CLS] through a trained dense layer
    with tanh, [CLS] itself, or the mean over real tokens. It is computed in float32.
    """

    classes: int
    pooler: str = "cls"
    dropout: float = 0.1

    @property
    def reads_all(self) -> bool:  # type: ignore[override]  # a ClassVar, to flax no field
        """Whether it reads every token, not only `label_pos`."""
        return self.pooler == "mean"

    @nn.nowrap
    def state(self, hidden, batch: Batch):
        """Returns the state that is read, or the mean over real tokens. -> [B*K, H]"""
        if self.pooler != "mean":
            return super().state(hidden, batch)
        tokens = batch.read
        # Soft tokens are not part of the text.
        keep = (tokens.mask & (tokens.roles != Role.SOFT))[..., None]  # [B*K, T, 1]
        total = jnp.where(keep, hidden.astype(jnp.float32), 0.0).sum(1)
        return total / jnp.maximum(keep.sum(1), 1)

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Pools and scores."""
        tokens = batch.read
        pooled = self.state(hidden, batch)  # [B*K, H]
        if self.pooler == "checkpoint":
            pooled = backbone.pool(pooled)
        # The head trains in float32, whatever the backbone computes in.
        pooled = pooled.astype(jnp.float32)
        if self.pooler == "trained":
            dense = nn.Dense(
                pooled.shape[-1], kernel_init=nn.initializers.normal(0.02), name="pooler"
            )
            pooled = jnp.tanh(dense(pooled))
        pooled = Dropout(self.dropout)(pooled, deterministic=deterministic)
        scores = score_layer(self.classes)(pooled)  # [B*K, C]
        if self.classes == 1:  # choices that an example lacks are sequences without tokens
            scores = jnp.where(tokens.mask.any(-1, keepdims=True), scores, ABSENT)
        return mask_absent(scores.reshape(batch.labels.shape[0], -1), batch.counts)
