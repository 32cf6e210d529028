"""Work that a frozen backbone makes needless: what its lower layers give is computed once."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import tree
from jaxprompt.assembly.pipeline import Scorer, Split
from jaxprompt.data.batching import EvalBatches
from jaxprompt.errors import InputError
from jaxprompt.layers.reading import take
from jaxprompt.models.model import Model
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training import feature_store
from jaxprompt.training.evaluation import ahead, place_step
from jaxprompt.types import Batch, Tokens

OFF = "or set cache.where=''"
# Parts of a backbone that stand above all its layers, by what is kept: their numbers may train.
_HEADS = ("pooler", "mlm", "rtd", "lm")
_BELOW = ("embed", "layers", "bias", "relative", "conv", "later_layers")


class FeatureCache:
    """The states that a run keeps, and the model that goes on from them.

    Where nothing is kept the model is the scorer's own, and batches stay as they are.
    """

    def __init__(self, scorer: Scorer, what: "What | None" = None):
        """Holds no split yet."""
        self.model = scorer.model if what is None else _rest(scorer.model, what)
        self._what = what
        self._stores: list[tuple[Split, feature_store.Store]] = []

    def add(self, split: Split, store: feature_store.Store) -> None:
        """Takes the states of a split."""
        self._stores.append((split, store))

    def holds(self, split: Split) -> bool:
        """Tells whether batches of this very split are given states."""
        return self._find(split) is not None

    def give(self, split: Split, batch: Batch) -> Batch:
        """Puts the states of its rows into a batch, where they are kept."""
        store = self._find(split)
        if store is None:
            return batch
        kept = store.read(_rows(batch), _mask(batch, self._what))
        if not self._what.all_tokens:
            batch = _narrow(batch)
        return batch._replace(kept=kept)

    def _find(self, split: Split) -> feature_store.Store | None:
        # By identity: == would compare the arrays of two splits.
        return next((store for own, store in self._stores if own is split), None)


class What(NamedTuple):
    """Which states are kept."""

    layer: int | None  # those that enter this layer of the input's stack; None = the output
    all_tokens: bool  # of every token; else of the positions that the head reads

    def __str__(self) -> str:
        tokens = "every token" if self.all_tokens else "the positions that the head reads"
        if self.layer is None:
            return f"the backbone's output at {tokens}"
        return f"what layers 1-{self.layer} give for {tokens}"


def plan_keeping(
    c: Any, scorer: Scorer, splits: Mapping[str, Split], weights: Any, placement: Placement,
    workdir: str,
) -> tuple[FeatureCache, Callable[[Callable[[str], None]], None]]:  # fmt: skip
    """Finds what never changes in a run, by the block `cache`. -> it, fill(say)

    `fill` computes it, or opens what an earlier run left on disk, and tells of it. Raises
    InputError where every layer depends on something that trains or is drawn, or where the states
    need more room than the limit. The test split is scored once: it is not kept.
    """
    if not c.cache.where:
        return FeatureCache(scorer), lambda say: None
    what = _choose(c, scorer, splits["train"], weights)
    kept = FeatureCache(scorer, what)
    # Texts are written by all layers, token by token.
    parts = {n: splits[n] for n in ("train", "dev") if n == "train" or not scorer.head.WRITES}
    sizes = {name: _sizes(scorer, part, what) for name, part in parts.items()}
    width, dtype = scorer.model.backbone.dims.width, jnp.dtype(c.cache.dtype)
    # From lengths alone, so that a run that needs too much is refused before anything is computed.
    room = sum(int(own.sum()) for own in sizes.values()) * width * dtype.itemsize / 2**30
    if room > c.cache.limit:
        raise InputError(
            f"keeping {what} takes {room:.3g} GiB, over cache.limit={c.cache.limit}; raise that, "
            f"{'take cache.dtype=bfloat16, ' * (dtype.itemsize == 4)}{OFF}"
        )
    folder = Path(c.cache.folder or Path(workdir) / "kept")
    on_disk = c.cache.where == "disk"
    forms = {name: (own, width, dtype) for name, own in sizes.items()}
    facts = {name: _facts(c, scorer, part, what, weights) for name, part in parts.items()}
    found = {
        n: feature_store.reopen(folder / n, facts[n], *forms[n]) if on_disk else None for n in parts
    }

    def fill(say: Callable[[str], None]) -> None:
        started = time.monotonic()
        step = place_step(placement, _make_entering(scorer.model, what, dtype))
        for name, part in parts.items():
            store = found[name]
            if store is None:
                path, form = folder / name, forms[name]
                store = (
                    feature_store.DiskStore(path, *form)
                    if on_disk
                    else feature_store.in_memory(*form)
                )
                _compute(step, store, scorer, part, what, weights)
                store = store.seal(facts[name]) if on_disk else store
            kept.add(part, store)
        place = str(folder) if on_disk else "host memory"
        old = ", ".join(name for name, store in found.items() if store is not None)
        again = f" (an earlier run's: {old})" if old else ""
        say(f"kept {what}: {room:.3g} GiB in {place}{again}, {time.monotonic() - started:.1f} s")

    return kept, fill


# -- what can be kept -----------------------------------------------------------------------------


def _choose(c: Any, scorer: Scorer, train: Split, weights: Any) -> What:
    """Finds the highest states that nothing trained and nothing drawn reaches."""
    where = f"cache.where={c.cache.where}"
    if jax.process_count() > 1:
        raise InputError(
            f"{where} is for one process, not {jax.process_count()}: each would keep all rows; "
            "set cache.where=''"
        )
    model = scorer.model
    cfg = model.backbone.cfg
    rates = ("dropout", "attention_dropout", "embed_dropout")
    drawn = ", ".join(f"{x} {getattr(cfg, x)}" for x in rates if getattr(cfg, x, 0.0))
    if drawn:
        raise InputError(
            f"{where}: the backbone drops at random ({drawn}), so states differ in every step; set "
            f"backbone.dropout=0, {OFF}"
        )
    params = jax.eval_shape(lambda: tree.merge(weights.trainable, weights.frozen))
    layer = _lowest(model, params, scorer.one_batch(train.rows[:1]))
    if layer == 0:
        raise InputError(
            f"{where}: the prompt stands in the input or in layer 1, so nothing below it stays "
            f"the same; give a prefix to upper layers (prompt.layers), {OFF}"
        )
    if layer is not None and not hasattr(model.backbone, "enter"):
        raise InputError(
            f"{where}: what a GLM writes reads its input in every layer, so none can be left out; "
            f"{OFF}"
        )
    what = What(layer, layer is not None or model.heads["main"].reads_all)
    below = lambda part: part in _BELOW if layer is not None else part not in _HEADS
    for name in weights.trainable:
        group, part, *_ = name.split("/")
        if group == "backbone" and below(part):
            raise InputError(
                f"{where}: {name} trains, and {what} depend on it; let config.trainable leave it "
                f"out, {OFF}"
            )
    return what


def _lowest(model: Model, params: Any, batch: Batch) -> int | None:
    """Finds the lowest layer of the input's stack that a method reaches; None = it adds nothing.

    A T5's encoder is all below what is added to its decoder alone.
    """
    found = []
    # Masks that are numpy arrays stay so: they are known without computing anything.
    jax.eval_shape(lambda p: found.append(model.inject(p, batch)), params)
    (injection,) = found
    slots, prefix, _ = injection.encoder
    if slots is not None:
        return 0
    if prefix is not None:
        known = isinstance(prefix.mask, np.ndarray)
        return int(prefix.mask.any(axis=(1, 2)).argmax()) if known else 0
    others = injection.decoder, injection.cross
    adds = any(part is not None for stream in others for part in stream)
    return model.backbone.dims.layers if adds else None


def _rest(model: Model, what: What) -> Model:
    """Makes the model that goes on from what is kept."""
    if what.layer is None:
        return dataclasses.replace(model, is_kept=True)
    cfg = dataclasses.replace(model.backbone.cfg, skip=what.layer)
    return dataclasses.replace(model, backbone=model.backbone.clone(cfg=cfg))


def _facts(c: Any, scorer: Scorer, split: Split, what: What, weights: Any) -> dict[str, str]:
    """Lists all that the states depend on."""
    at = scorer.layout
    return {
        "the backbone's weights": weights.report.fingerprint[:16],
        "backbone.dtype": c.backbone.dtype,
        "backbone.rescale": str(c.backbone.rescale),
        "the data": split.digest(),
        "the template": scorer.template,
        "the first positions": f"{at.shift} and {at.decoder_shift}",
        "what is kept": str(what),
        "cache.dtype": c.cache.dtype,
    }


# -- computing it ---------------------------------------------------------------------------------


def _make_entering(model: Model, what: What, dtype: Any) -> Callable[..., jax.Array]:
    """Makes (trainable, frozen, batch) -> the states to keep [B*K, T or M, H]."""

    def entering(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        params = tree.merge(trainable, frozen)
        if what.layer is None:
            states = model.hidden(params, batch)
            states = states if what.all_tokens else take(states, batch.label_pos)
        else:
            backbone = {"params": params["backbone"]}
            states = model.backbone.apply(backbone, batch, what.layer, method="enter")
        return states.astype(dtype)

    return entering


def _compute(
    step: Any, store: feature_store.Store, scorer: Scorer, split: Split, what: What, weights: Any
) -> None:
    """Fills a store in one pass, longest rows first: few shapes are compiled."""
    batches = EvalBatches(split.rows, split.labels, scorer.layout)
    look = step(weights.trainable, weights.frozen)
    found = ((batch, look(batch)[1]) for batch in batches)
    for batch, states in ahead(found, 1):
        store.write(_rows(batch), _mask(batch, what), np.asarray(states))


def _sizes(scorer: Scorer, split: Split, what: What) -> np.ndarray:
    """Counts the states of each row, K rows an example. -> int [examples * K]"""
    width = max(len(row.label_pos) for example in split.rows for row in example)
    sizes = np.full((len(split.rows), scorer.layout.num_rows), width)
    if what.all_tokens:
        sizes[:] = 0
        for own, example in zip(sizes, split.rows, strict=True):
            own[: len(example)] = [len(row.ids) for row in example]
    return sizes.reshape(-1)


def _rows(batch: Batch) -> np.ndarray:
    """Numbers the rows of a batch by example and choice, -1 = filling. -> [B*K]"""
    index, choices = batch.index[:, None], len(batch.label_pos) // len(batch.index)
    return np.where(index >= 0, index * choices + np.arange(choices), -1).reshape(-1)


def _mask(batch: Batch, what: What) -> np.ndarray:
    """Marks the places of a batch whose states are kept. -> bool [B*K, T or M]"""
    if what.all_tokens:
        return batch.encoder.mask
    return np.broadcast_to(_rows(batch)[:, None] >= 0, batch.label_pos.shape)


def _narrow(batch: Batch) -> Batch:
    """Leaves of the tokens one column, so that batches of all lengths are one program."""

    def narrow(tokens: Tokens) -> Tokens:
        first = jax.tree.map(lambda x: x[:, :1], tokens._replace(lengths=None))
        return first._replace(mask=tokens.mask.any(1, keepdims=True))

    decoder = None if batch.decoder is None else narrow(batch.decoder)
    columns = np.arange(batch.label_pos.shape[1], dtype=np.int32)
    label_pos = np.broadcast_to(columns, batch.label_pos.shape)
    return batch._replace(encoder=narrow(batch.encoder), decoder=decoder, label_pos=label_pos)
