"""A backbone, a method and heads, as pure functions of params = {"backbone", "prompt", "head"}."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.layers.embed import mask_absent_slots
from jaxprompt.layers.prefix import append_to_mask
from jaxprompt.layers.quantized import quantized_shapes
from jaxprompt.layers.reading import separate_arrays
from jaxprompt.parallel.compilation import cached_factory
from jaxprompt.parallel.sharding import Placement
from jaxprompt.prompts import Method
from jaxprompt.tree import Params, flatten
from jaxprompt.types import Array, Batch, Injection, Prefix, SharedPrefix, Tokens

KeyValues = tuple[Array, Array]  # keys and values of a shared prefix, [L, B|1, P, N, D] each
LAST_LAYER = ("needed", "all")


class EqualByKey(abc.ABC):
    """Equal objects compile to the same program; their key includes the arrays of heads by value.

    A dataclass would hash and compare these arrays, and mappings, which have no hash.
    """

    @abc.abstractmethod
    def _key(self) -> tuple[Any, ...]:
        """Returns what determines the program."""

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key() == other._key()


@dataclasses.dataclass(frozen=True, eq=False)
class Model(EqualByKey):
    """Combines the parts; the line `backbone(batch, prompt(batch, embed))` serves every method."""

    backbone: nn.Module
    prompt: Method
    heads: Mapping[str, nn.Module]
    is_cached: bool = False  # Batch.cached are the backbone's outputs, so it is not run
    last_layer: str = "needed"  # positions computed in the last layer: those that heads read | all
    shared_prefix: SharedPrefix | None = (
        None  # what every row begins with; rows of batches are without it
    )
    varies: bool = True  # batches differ in length

    def init(
        self,
        key: jax.Array,
        backbone: Params,
        *,
        choices: int = 1,
        placement: Placement | None = None,
    ) -> dict[str, Any]:
        """Randomly initialises the prompt and the heads for a loaded backbone. -> params

        `placement` is where the backbone is; the initialised parameters are then on every device.
        """
        sharding = None if placement is None else placement.replicated
        return {"backbone": backbone, **_compile_init(self, choices, sharding)(key, backbone)}

    def _key(self) -> tuple[Any, ...]:
        heads = frozenset((name, *separate_arrays(head)) for name, head in self.heads.items())
        settings = self.is_cached, self.last_layer, self.shared_prefix, self.varies
        return (self.backbone, self.prompt, heads, *settings)

    def _init_params(self, key: jax.Array, backbone: Params, choices: int) -> dict[str, Any]:
        prompt_key, *head_keys = jax.random.split(key, 1 + len(self.heads))
        batch = _dummy_batch(choices, decodes=self.backbone.dims.decoder_layers > 0)
        hidden = jnp.zeros((choices, 2, self.backbone.dims.width))
        bound = self.backbone.bind({"params": backbone})
        # Heads are initialised with the injection, since some score by its rows.
        injection, prompt = self.prompt.init_with_output(
            prompt_key, batch, bound.words(), deterministic=True
        )
        heads = {
            name: head.init(k, hidden, batch, injection, bound, deterministic=True).get(
                "params", {}
            )
            for k, (name, head) in zip(head_keys, self.heads.items(), strict=True)
        }
        return {"prompt": prompt.get("params", {}), "head": heads}

    def inject(self, params: Params, batch: Batch, *, deterministic=True, key=None) -> Injection:
        """Computes the injection of the method for a batch."""
        words = self.backbone.bind({"params": params["backbone"]}).words()
        injection = self.prompt.apply(
            # The method does not train the word embeddings, even if the backbone trains.
            {"params": params.get("prompt", {})},
            batch,
            jax.lax.stop_gradient(words),
            deterministic=deterministic,
            rngs=_rngs(key, 0),
        )
        return cast(
            Injection, injection
        )  # flax has one type for `apply` with and without `mutable`

    def add_shared_prefix(
        self,
        params: Params,
        injection: Injection,
        *,
        shared_kv: KeyValues | None = None,
        deterministic=True,
        key=None,
    ) -> Injection:
        """Runs the shared prefix of all rows once, and adds its keys and values to the injection.

        Dropout is sampled once for all rows. `shared_kv` is the result of `run_shared_prefix` with
        these parameters: then the prefix is not run again.
        """
        if self.shared_prefix is None:
            return injection
        slots, prefix, _ = injection.encoder
        rows = max(1 if slots is None else len(slots), 1 if prefix is None else prefix.k.shape[1])
        if shared_kv is not None:
            # Constant when compiling, as if the prefix ran in the same program.
            present = np.ones((rows, len(self.shared_prefix.ids)), bool)
            mask = append_to_mask(prefix, shared_kv[0].shape[0], present)
            return injection._replace(
                encoder=injection.encoder._replace(prefix=Prefix(*shared_kv, mask))
            )
        ids, slot, types, roles = (
            jnp.broadcast_to(jnp.array(x, jnp.int32), (rows, len(x))) for x in self.shared_prefix
        )
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        positions = positions + self.prompt.position_shift()
        tokens = Tokens(ids, ids == ids, slot, positions, types, roles)
        prefix_states = self.backbone.apply(
            {"params": params["backbone"]},
            tokens,
            injection,
            deterministic=deterministic,
            rngs=_rngs(key, 4),
            method="encode_shared_prefix",
        )
        prefix = cast(Prefix, prefix_states)  # as in `inject`
        return injection._replace(encoder=injection.encoder._replace(prefix=prefix))

    def run_shared_prefix(self, params: Params) -> KeyValues | None:
        """Runs the shared prefix of all rows, without dropout, for all batches.

        Returns its keys and values, after those of the method's prefix, for `shared_kv`; None if
        rows share nothing.
        """
        if self.shared_prefix is None or self.is_cached:
            return None
        # A method that reads the batch has no shared prefix, so any batch will do.
        batch = _dummy_batch(1, decodes=False)
        prefix = self.add_shared_prefix(params, self.inject(params, batch)).encoder.prefix
        return None if prefix is None else (prefix.k, prefix.v)

    def hidden(self, params: Params, batch: Batch, *, deterministic=True, key=None):
        """Runs the backbone with the method's injection. -> [B*K, T, H]"""
        return self._run(params, batch, deterministic, key, reads_all=True)[0]

    def forward(
        self,
        params: Params,
        batch: Batch,
        *,
        head="main",
        deterministic=True,
        key=None,
        shared_kv: KeyValues | None = None,
    ):
        """Scores the classes. -> [B, C]"""
        reads_all = self.last_layer == "all" or self.heads[head].reads_all
        hidden, batch, injection = self._run(
            params, batch, deterministic, key, reads_all, shared_kv
        )
        return self.heads[head].apply(
            {"params": params.get("head", {}).get(head, {})},
            hidden,
            batch,
            injection,
            self.backbone.bind({"params": params["backbone"]}),
            deterministic=deterministic,
            rngs=_rngs(key, 2),
        )

    def _run(
        self,
        params: Params,
        batch: Batch,
        deterministic: bool,
        key,
        reads_all: bool,
        shared_kv=None,
    ):
        """Runs the backbone. -> its states [B*K, T, H], the batch for heads, the injection

        If few positions are read, the states are theirs, [B*K, M, H], and `label_pos` is an index
        of these.
        """
        injection = self.inject(params, batch, deterministic=deterministic, key=key)
        if self.is_cached:
            assert batch.cached is not None
            return batch.cached.astype(self.backbone.cfg.dtype), batch, injection
        batch = without_absent_slots(batch, injection)
        injection = self.add_shared_prefix(
            params, injection, shared_kv=shared_kv, deterministic=deterministic, key=key
        )
        cfg = self.backbone.cfg
        drops = not deterministic and (cfg.dropout or cfg.attention_dropout) > 0
        reads = None if reads_all else positions_read(batch, drops=drops and self.varies)
        hidden = self.backbone.apply(
            {"params": params["backbone"]},
            batch,
            injection,
            deterministic=deterministic,
            output_positions=reads,
            rngs=_rngs(key, 1),
        )
        return hidden, batch if reads is None else renumber_reads(batch), injection


@cached_factory
def _compile_init(model: Model, choices: int, sharding: jax.sharding.Sharding | None):
    # One program for all operations and all seeds.
    return jax.jit(functools.partial(model._init_params, choices=choices), out_shardings=sharding)


def positions_read(batch: Batch, *, drops: bool = False) -> Array | None:
    """Returns the positions that heads read, int [B*K, M], or None if there are many.

    With `drops`, only one position counts as few, whatever the length: the last layer samples its
    dropout by the index of a computed state, which padding must not change.
    """
    count = batch.label_pos.shape[1]
    # Gathering more than half of them takes about as much time as it saves.
    is_few = count == 1 if drops else 2 * count <= batch.read.ids.shape[1]
    return batch.label_pos if is_few else None


def renumber_reads(batch: Batch) -> Batch:
    """Renumbers the positions that heads read to those of the states with `reads`."""
    columns = jnp.arange(batch.label_pos.shape[1], dtype=batch.label_pos.dtype)
    return batch._replace(label_pos=jnp.broadcast_to(columns, batch.label_pos.shape))


def without_absent_slots(batch: Batch, injection: Injection) -> Batch:
    """Masks the positions of slot vectors that an injection leaves out."""
    encoder = mask_absent_slots(batch.encoder, injection.encoder.slots_mask)
    decoder = batch.decoder
    if decoder is not None:
        decoder = mask_absent_slots(decoder, injection.decoder.slots_mask)
    return batch._replace(encoder=encoder, decoder=decoder)


def backbone_shapes(backbone: nn.Module, storage: str = "none") -> dict[str, Any]:
    """Returns the shapes of a backbone's parameters by flat name; nothing is computed.

    A `storage` of layers/quantized gives the shapes after quantisation.
    """
    batch = _dummy_batch(1, decodes=backbone.dims.decoder_layers > 0)

    def init(key: jax.Array) -> Params:
        return backbone.init(key, batch, method="init_all")["params"]

    shapes = flatten({"backbone": jax.eval_shape(init, jax.random.key(0))})
    return shapes if storage == "none" else quantized_shapes(shapes, storage)


def _rngs(key, part: int):
    if key is None:
        return None
    return {"dropout": jax.random.fold_in(key, part), "draw": jax.random.fold_in(key, 3)}


def _dummy_batch(choices: int, decodes: bool) -> Batch:
    zeros = np.zeros((choices, 2), np.int32)
    tokens = Tokens(zeros, zeros == 0, zeros - 1, zeros, zeros, zeros)  # no masks, no slots
    one, weight = np.zeros(1, np.int32), np.ones(1, np.float32)
    decoder = tokens if decodes else None
    return Batch(tokens, zeros[:, :1], one, weight, one, decoder, zeros[:, :1], prompt=one)
