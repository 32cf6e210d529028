"""Feature cache: the outputs of lower frozen layers are computed once."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import tree
from jaxprompt.config.run import RunConfig
from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.batches.stacking import share_of
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.identity import identity_of
from jaxprompt.errors import InputError
from jaxprompt.layers.reading import select_positions
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel import processes
from jaxprompt.parallel.row_exchange import RowExchange
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.evaluation import ahead, place_step
from jaxprompt.training.features import store as feature_store
from jaxprompt.training.features.choice import OFF, What, choose, rest
from jaxprompt.training.pace import Pace
from jaxprompt.types import Batch, Tokens

Say = Callable[[str], None]


@dataclasses.dataclass(eq=False)
class KeptSplit:
    """A split with cached states, shared by all runs that use it.

    Of several processes each caches the rows with row % process_count == process_index.
    """

    name: str
    scorer: Scorer
    split: Split
    what: What
    facts: Mapping[str, str]  # all that the states depend on
    sizes: np.ndarray  # the states of each row of the split
    store: feature_store.Store | None = None  # this process's, once it is filled

    def most(self) -> int:
        """Returns the largest number of states that a process caches."""
        count = jax.process_count()
        return max(int(self.sizes[process::count].sum()) for process in range(count))

    def own_sizes(self) -> np.ndarray:
        """Returns the number of states of each row, 0 for rows of other processes."""
        is_own = np.arange(len(self.sizes)) % jax.process_count() == jax.process_index()
        return np.where(is_own, self.sizes, 0)


class FeatureCache:
    """The cached states of a run, and the model that continues from them.

    If nothing is cached, the model is that of the scorer, and batches are unchanged.
    """

    def __init__(
        self, scorer: Scorer, what: What | None = None, parts: Sequence[KeptSplit] = (),
        exchange: RowExchange | None = None,
    ):  # fmt: skip
        """Takes the cached splits, and `exchange` if several processes cache them."""
        self.model = scorer.model if what is None else rest(scorer.model, what)
        self.parts = parts
        self._scorer, self._exchange = scorer, exchange

    def holds(self, split: Split) -> bool:
        """Returns whether the states of this split are cached."""
        return self._find(split) is not None

    def read(self, split: Split) -> Iterator[Batch]:
        """Yields the batches of a split, with their states if they are cached."""
        layout = self._scorer.layout
        layout = layout.whole() if self.holds(split) else layout
        return (self.give(split, b) for b in EvalBatches(split.rows, split.labels, layout))

    def give(self, split: Split, batch: Batch) -> Batch:
        """Adds the cached states of its rows to a batch, if there are any.

        The batch is global: every process contributes its rows, and gets its share of the batch.
        """
        part = self._find(split)
        if part is None:
            return batch
        rows, mask, store = _rows(batch), _mask(batch, part.what), part.store
        if store is None:
            raise ValueError(f"the states of split {part.name} are read before they are computed")
        kept: np.ndarray | jax.Array
        if self._exchange is None:
            kept = store.read(rows, mask)
        else:

            def own(chosen: np.ndarray) -> np.ndarray:
                is_row = chosen >= 0
                numbers = np.where(is_row, rows[chosen], -1)
                return store.read(numbers, mask[chosen] & is_row[:, None])

            kept = self._exchange.join(np.where(rows >= 0, rows % jax.process_count(), -1), own)
            batch = share_of(batch, self._scorer.layout)
        if not part.what.all_tokens:
            batch = _narrow(batch)
        return batch._replace(cached=kept)

    def _find(self, split: Split) -> KeptSplit | None:
        # By identity: == would compare the arrays of two splits.
        return next((part for part in self.parts if part.split is split), None)


class KeepingPlan:
    """Plans which states the runs of a config cache (block `cache`), once per split.

    With `several` runs each split has a folder on disk, a single run uses cache.folder.
    """

    def __init__(
        self, config: RunConfig, placement: Placement, workdir: Any, *, several: bool = False
    ):
        self._config, self._placement, self._several = config, placement, several
        self._folder = Path(config.cache.folder or Path(workdir) / "kept")
        self.keeps, self._on_disk = bool(config.cache.location), config.cache.location == "disk"
        self._parts: dict[tuple, KeptSplit] = {}
        is_one = jax.process_count() == 1
        self._exchange = RowExchange(placement) if self.keeps and not is_one else None

    def add(self, scorer: Scorer, splits: Mapping[str, Split], weights: Any) -> FeatureCache:
        """Plans what a run caches; equal splits of several runs are cached once.

        `weights` are those of the run, see `initial_params`; of trainable parameters only the names
        are used. The test split is cached only for several runs; one run scores it only once.
        """
        config = self._config
        if not self.keeps:
            return FeatureCache(scorer)
        what = choose(config, scorer, splits["train"], weights)
        # Texts are written by all layers, token by token.
        scored = ["dev", *["test"] * (self._several and config.train.test and "test" in splits)]
        names = ["train", *([] if scorer.head.WRITES else scored)]
        at, parts = scorer.layout, []
        for name in names:
            split = splits[name]
            laid = at.num_rows, at.shift, at.decoder_shift, scorer.template
            key = name, id(split), what, *laid
            if key not in self._parts:
                facts, sizes = (
                    _facts(config, scorer, split, what, weights),
                    _sizes(scorer, split, what),
                )
                self._parts[key] = KeptSplit(name, scorer, split, what, facts, sizes)
            parts.append(self._parts[key])
        return FeatureCache(scorer, what, parts, self._exchange)

    def check(self) -> None:
        """Raises InputError if the states need more memory than the limit.

        Uses only lengths, so the error is raised before anything is computed.
        """
        config, parts = self._config, list(self._parts.values())
        room = self._room(parts)
        if room > config.cache.limit:
            shown = f"{_whats(parts)} of {len(parts)} splits" if self._several else _whats(parts)
            half = "set cache.dtype=bfloat16, " * (config.cache.dtype == "float32")
            raise InputError(
                f"caching {shown} takes {room:.3g} GiB{_each()}, more than "
                f"cache.limit={config.cache.limit}; raise the limit, {half}{OFF}"
            )

    def open(self, parts: Sequence[KeptSplit]) -> None:
        """Opens states that an earlier run cached on disk, if every process finds its part.

        Raises the same InputError on every process for a cache that is damaged or belongs to a
        different setup.
        """
        if not self._on_disk:
            return

        def reopen() -> None:
            for part in parts:
                form = part.own_sizes(), *self._form(part)
                part.store = feature_store.reopen(self._path(part), part.facts, *form)

        processes.run_on_all(reopen)
        found = [
            json.loads(x) for x in processes.gather_texts(json.dumps([_filled(p) for p in parts]))
        ]
        for part, each in zip(parts, zip(*found, strict=True), strict=True):
            part.store = part.store if all(each) else None

    def fill(self, parts: Sequence[KeptSplit], weights: Any, say: Say) -> None:
        """Computes missing states and logs it. `weights` are those of any of the runs.

        All processes call this with the same parts.
        """
        if not parts:
            return
        started, old = time.monotonic(), [part.name for part in parts if _filled(part)]
        new = [part for part in parts if not _filled(part)]
        # Of all of them before the first is computed: where the disk is full no process waits.
        stores = processes.run_on_all(lambda: [self._make(part) for part in new])
        steps: dict[What, Any] = {}
        total = sum(part.split.size for part in new)
        pace = Pace(say, f"computing {_whats(new)}:", total, "examples")
        for part, store in zip(new, stores, strict=True):
            if part.what not in steps:
                entering = _make_entering(part.scorer.model, part.what, store.states.dtype)
                steps[part.what] = place_step(self._placement, entering)
            _compute(steps[part.what], store, part, weights, pace)
            if isinstance(store, feature_store.DiskStore):
                part.store = store.seal(part.facts)
            else:
                part.store = store
        place = str(self._folder) if self._on_disk else "host memory"
        count = f" of {len(parts)} splits" if self._several else ""
        known = f"{len(old)} splits" if self._several else ", ".join(old)
        again = f" (reused from an earlier run: {known})" if old else ""
        room = f"{self._room(parts):.3g} GiB in {place}{_each()}"
        say(f"cached {_whats(parts)}{count}: {room}{again}, {time.monotonic() - started:.1f} s")
        others = {n for part in new for n in feature_store.of_others(self._path(part))}
        if self._on_disk and others:
            say(
                f"  {self._folder} also has states cached by another number of processes, which "
                f"are not used: {', '.join(sorted(others))}"
            )

    def _form(self, part: KeptSplit) -> tuple[int, np.dtype]:
        """Returns the width and dtype of a state."""
        return part.scorer.model.backbone.dims.width, jnp.dtype(self._config.cache.dtype)

    def _room(self, parts: Sequence[KeptSplit]) -> float:
        """Returns the largest cache size of a process, in GiB."""
        total = 0
        for part in parts:
            width, dtype = self._form(part)
            total += part.most() * width * dtype.itemsize
        return total / 2**30

    def _path(self, part: KeptSplit) -> Path:
        """Returns the path of a split's files."""
        folder = self._folder
        if self._several:
            text = json.dumps(dict(part.facts), sort_keys=True)
            folder = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
        return feature_store.path_of(folder, part.name, jax.process_index(), jax.process_count())

    def _make(self, part: KeptSplit) -> feature_store.Store:
        form = part.own_sizes(), *self._form(part)
        if not self._on_disk:
            return feature_store.in_memory(*form)
        return feature_store.DiskStore(self._path(part), *form)


def plan_keeping(
    config: RunConfig,
    scorer: Scorer,
    splits: Mapping[str, Split],
    weights: Any,
    placement: Placement,
    workdir: str,
) -> tuple[FeatureCache, Callable[[Say], None]]:
    """Plans the feature cache of one run. Returns the cache and `fill(say)`.

    `fill` computes the states, or reuses those of an earlier run on disk, and logs it. Raises
    InputError if nothing can be cached, if the limit is exceeded, and for a folder with states of
    a different setup.
    """
    plan = KeepingPlan(config, placement, workdir)
    kept = plan.add(scorer, splits, weights)
    plan.check()
    plan.open(kept.parts)
    return kept, lambda say: plan.fill(kept.parts, weights, say)


def _filled(part: KeptSplit) -> bool:
    return part.store is not None


def _whats(parts: Sequence[KeptSplit]) -> str:
    return " and ".join(dict.fromkeys(str(part.what) for part in parts))


def _each() -> str:
    count = jax.process_count()
    return f" on each of {count} processes" if count > 1 else ""


def _facts(
    config: RunConfig, scorer: Scorer, split: Split, what: What, weights: Any
) -> dict[str, str]:
    """Returns everything that the states depend on."""
    at = scorer.layout
    return {
        "the backbone's weights": weights.report.fingerprint[:16],
        "the backbone's layers": identity_of(scorer)["layers"],
        "backbone.dtype": config.backbone.dtype,
        "backbone.rescale": str(config.backbone.rescale),
        "the data": split.digest(),
        "the template": scorer.template,
        "the first positions": f"{at.shift} and {at.decoder_shift}",
        "what is kept": str(what),
        "cache.dtype": config.cache.dtype,
    }


# -- computing it ---------------------------------------------------------------------------------


def _make_entering(model: Model, what: What, dtype: Any) -> Callable[..., jax.Array]:
    """Returns (trainable, frozen, batch) -> states to cache [B*K, T or M, H]."""

    def entering(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        params = tree.merge(trainable, frozen)
        if what.layer is None:
            states = model.hidden(params, batch)
            states = states if what.all_tokens else select_positions(states, batch.label_pos)
        else:
            backbone = {"params": params["backbone"]}
            states = model.backbone.apply(backbone, batch, what.layer, method="enter")
        return states.astype(dtype)

    return entering


def _compute(
    step: Any, store: feature_store.Store, part: KeptSplit, weights: Any, pace: Pace
) -> None:
    """Fills a store in one pass, longest rows first, so that few shapes are compiled."""
    layout, split = part.scorer.layout, part.split
    # Whole on every process, which gets the states of all rows and takes its own.
    batches = EvalBatches(split.rows, split.labels, layout.whole())
    # Nothing that trains has a part in what is kept.
    look = step({}, weights.frozen)
    found = ((batch, look(share_of(batch, layout))[1]) for batch in batches)
    for batch, states in ahead(found, 1):
        rows = _rows(batch)
        is_own = (rows >= 0) & (rows % jax.process_count() == jax.process_index())
        mask = _mask(batch, part.what) & is_own[:, None]
        store.write(np.where(is_own, rows, -1), mask, np.asarray(states))
        pace.add(int((batch.index >= 0).sum()))


def _sizes(scorer: Scorer, split: Split, what: What) -> np.ndarray:
    """Returns the number of states of each row, int [examples * K]."""
    width = max(len(row.label_pos) for example in split.rows for row in example)
    sizes = np.full((len(split.rows), scorer.layout.num_rows), width)
    if what.all_tokens:
        sizes[:] = 0
        for own, example in zip(sizes, split.rows, strict=True):
            own[: len(example)] = [len(row.ids) for row in example]
    return sizes.reshape(-1)


def _rows(batch: Batch) -> np.ndarray:
    """Returns the row numbers of a batch by example and choice, [B*K]; -1 = padding."""
    index, choices = batch.index[:, None], len(batch.label_pos) // len(batch.index)
    return np.where(index >= 0, index * choices + np.arange(choices), -1).reshape(-1)


def _mask(batch: Batch, what: What) -> np.ndarray:
    """Returns the mask of positions whose states are cached, bool [B*K, T or M]."""
    if what.all_tokens:
        return batch.encoder.mask
    return np.broadcast_to(_rows(batch)[:, None] >= 0, batch.label_pos.shape)


def _narrow(batch: Batch) -> Batch:
    """Keeps one column of the tokens, so that batches of all lengths share one program."""

    def narrow(tokens: Tokens) -> Tokens:
        first = jax.tree.map(lambda x: x[:, :1], tokens._replace(lengths=None))
        return first._replace(mask=tokens.mask.any(1, keepdims=True))

    decoder = None if batch.decoder is None else narrow(batch.decoder)
    columns = np.arange(batch.label_pos.shape[1], dtype=np.int32)
    label_pos = np.broadcast_to(columns, batch.label_pos.shape)
    return batch._replace(encoder=narrow(batch.encoder), decoder=decoder, label_pos=label_pos)
