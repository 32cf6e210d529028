"""A backbone, a method and heads, as pure functions of params = {"backbone", "prompt", "head"}."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection, Tokens

Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """Composes the parts; the line `backbone(batch, prompt(batch, embed))` serves every method."""

    backbone: nn.Module
    prompt: Method
    heads: Mapping[str, nn.Module]

    def init(self, key: jax.Array, backbone: Params, *, choices: int = 1) -> dict[str, Any]:
        """Draws the prompt and the heads beside a loaded backbone. -> params"""
        prompt_key, *head_keys = jax.random.split(key, 1 + len(self.heads))
        batch = _dummy_batch(choices, decodes=self.backbone.dims.decoder_layers > 0)
        hidden = jnp.zeros((choices, 2, self.backbone.dims.width))
        words = self.backbone.bind({"params": backbone}).words()
        # One program, where every operation by itself would be one.
        prompt = jax.jit(functools.partial(self.prompt.init, deterministic=True))(
            prompt_key, batch, words
        )
        heads = {}
        for k, (name, head) in zip(head_keys, self.heads.items(), strict=True):

            def init(key, weights, head=head):
                bound = self.backbone.bind({"params": weights})
                return head.init(key, hidden, batch, bound, deterministic=True).get("params", {})

            # A head on the model's own output table has no numbers: nothing is multiplied for it.
            heads[name] = init(k, backbone) if jax.eval_shape(init, k, backbone) else {}
        return {"backbone": backbone, "prompt": prompt.get("params", {}), "head": heads}

    def inject(self, params: Params, batch: Batch, *, deterministic=True, key=None) -> Injection:
        """Computes what the method adds for a batch."""
        words = self.backbone.bind({"params": params["backbone"]}).words()
        return self.prompt.apply(
            {"params": params.get("prompt", {})}, batch, jax.lax.stop_gradient(words),
            deterministic=deterministic, rngs=_rngs(key, 0),
        )  # fmt: skip

    def hidden(self, params: Params, batch: Batch, *, deterministic=True, key=None):
        """Runs the backbone with the method's injection. -> [B*K, T, H]"""
        injection = self.inject(params, batch, deterministic=deterministic, key=key)
        return self.backbone.apply(
            {"params": params["backbone"]}, batch, injection,
            deterministic=deterministic, rngs=_rngs(key, 1),
        )  # fmt: skip

    def forward(self, params: Params, batch: Batch, *, head="main", deterministic=True, key=None):
        """Scores the classes. -> [B, C]"""
        hidden = self.hidden(params, batch, deterministic=deterministic, key=key)
        return self.heads[head].apply(
            {"params": params.get("head", {}).get(head, {})}, hidden, batch,
            self.backbone.bind({"params": params["backbone"]}),
            deterministic=deterministic, rngs=_rngs(key, 2),
        )  # fmt: skip


def _rngs(key, part: int):
    return None if key is None else {"dropout": jax.random.fold_in(key, part)}


def _dummy_batch(choices: int, decodes: bool) -> Batch:
    zeros = jnp.zeros((choices, 2), jnp.int32)
    tokens = Tokens(zeros, zeros == 0, zeros - 1, zeros, zeros, zeros)
    one = jnp.zeros(1, jnp.int32)
    decoder = tokens if decodes else None
    return Batch(tokens, zeros[:, :1], one, jnp.ones(1), one, decoder, zeros[:, :1])
