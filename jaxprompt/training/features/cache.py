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
from jaxprompt.data.batches.stacking import host_share
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.identity import scorer_fingerprints
from jaxprompt.errors import InputError
from jaxprompt.layers.reading import select_positions
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel import processes
from jaxprompt.parallel.row_exchange import RowExchange
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.evaluation import compile_step, dispatch_ahead
from jaxprompt.training.features import store as feature_store
from jaxprompt.training.features.choice import OFF, FeatureSpec, choose_features, remaining_model
from jaxprompt.training.pace import ProgressReporter
from jaxprompt.types import Batch, Tokens

Log = Callable[[str], None]


@dataclasses.dataclass(eq=False)
class CachedSplit:
    """A split with cached states, shared by all runs that use it.

    Of several processes each caches the rows with row % process_count == process_index.
    """

    name: str
    scorer: Scorer
    split: Split
    spec: FeatureSpec
    setup: Mapping[str, str]  # everything that the states depend on
    sizes: np.ndarray  # the states of each row of the split
    store: feature_store.Store | None = None  # of this process, once it is filled

    def local_sizes(self) -> np.ndarray:
        """Returns the number of states of each row, 0 for rows of other processes."""
        is_local = np.arange(len(self.sizes)) % jax.process_count() == jax.process_index()
        return np.where(is_local, self.sizes, 0)


class FeatureCache:
    """The cached states of a run, and the model that continues from them.

    If nothing is cached, the model is that of the scorer, and batches are unchanged.
    """

    def __init__(
        self,
        scorer: Scorer,
        spec: FeatureSpec | None = None,
        splits: Sequence[CachedSplit] = (),
        exchange: RowExchange | None = None,
    ):
        """Takes the cached splits, and `exchange` if several processes cache them."""
        self.model = scorer.model if spec is None else remaining_model(scorer.model, spec)
        self.splits = splits
        self._scorer, self._exchange = scorer, exchange

    def has(self, split: Split) -> bool:
        """Returns whether the states of this split are cached."""
        return self._find(split) is not None

    def batches(self, split: Split) -> Iterator[Batch]:
        """Yields the batches of a split, with their states if they are cached."""
        layout = self._scorer.layout
        layout = layout.single_host() if self.has(split) else layout
        return (self.add_states(split, b) for b in EvalBatches(split.rows, split.labels, layout))

    def add_states(self, split: Split, batch: Batch) -> Batch:
        """Adds the cached states of its rows to a batch, if there are any.

        The batch is global: every process contributes its rows, and gets its share of the batch.
        """
        cached = self._find(split)
        if cached is None:
            return batch
        rows, mask, store = _rows(batch), _mask(batch, cached.spec), cached.store
        assert store is not None  # `fill` comes first
        states: np.ndarray | jax.Array
        if self._exchange is None:
            states = store.read(rows, mask)
        else:

            def local_states(positions: np.ndarray) -> np.ndarray:
                is_row = positions >= 0
                row_ids = np.where(is_row, rows[positions], -1)
                return store.read(row_ids, mask[positions] & is_row[:, None])

            states = self._exchange.join(
                np.where(rows >= 0, rows % jax.process_count(), -1), local_states
            )
            batch = host_share(batch, self._scorer.layout)
        if not cached.spec.all_tokens:
            batch = _narrow(batch)
        return batch._replace(cached=states)

    def _find(self, split: Split) -> CachedSplit | None:
        # By identity: == would compare the arrays of two splits.
        return next((cached for cached in self.splits if cached.split is split), None)


class FeatureCachePlan:
    """Plans which states the runs of a config cache (block `cache`), once per split.

    With `several` runs each split has a folder on disk, a single run uses cache.folder.
    """

    def __init__(
        self, config: RunConfig, placement: Placement, workdir: Any, *, several: bool = False
    ):
        self._config, self._placement, self._several = config, placement, several
        self._folder = Path(config.cache.folder or Path(workdir) / "kept")
        self.is_enabled = bool(config.cache.location)
        self._on_disk = config.cache.location == "disk"
        self._splits: dict[tuple, CachedSplit] = {}
        exchanges = self.is_enabled and jax.process_count() > 1
        self._exchange = RowExchange(placement) if exchanges else None

    def add(self, scorer: Scorer, splits: Mapping[str, Split], weights: Any) -> FeatureCache:
        """Plans what a run caches; equal splits of several runs are cached once.

        `weights` are those of the run, see `initial_params`; of trainable parameters only the names
        are used. The test split is cached only for several runs; one run scores it only once.
        """
        config = self._config
        if not self.is_enabled:
            return FeatureCache(scorer)
        spec = choose_features(config, scorer, splits["train"], weights)
        # Generation uses all layers for every token.
        caches_test = self._several and config.train.test and "test" in splits
        scored = ["dev", "test"] if caches_test else ["dev"]
        names = ["train", *([] if scorer.generates else scored)]
        layout, cached_splits = scorer.layout, []
        for name in names:
            split = splits[name]
            layout_key = layout.num_rows, layout.shift, layout.decoder_shift, scorer.template
            key = name, id(split), spec, *layout_key
            if key not in self._splits:
                setup = _cache_setup(config, scorer, split, spec, weights)
                sizes = _sizes(scorer, split, spec)
                self._splits[key] = CachedSplit(name, scorer, split, spec, setup, sizes)
            cached_splits.append(self._splits[key])
        return FeatureCache(scorer, spec, cached_splits, self._exchange)

    def check(self) -> None:
        """Raises InputError if the states need more memory than the limit.

        Uses only lengths, so the error is raised before anything is computed.
        """
        limit, splits = self._config.cache.limit, list(self._splits.values())
        gib = self._gib(splits)
        if gib > limit:
            raise InputError(
                f"caching {_format_specs(splits)} takes {gib:.3g} GiB{_per_process()}, more than "
                f"cache.limit={limit}; raise the limit, set cache.dtype=bfloat16, {OFF}"
            )

    def open(self, splits: Sequence[CachedSplit]) -> None:
        """Opens states that an earlier run cached on disk, if every process finds its part.

        Raises the same InputError on every process for a cache that is damaged or belongs to a
        different setup.
        """
        if not self._on_disk:
            return

        def reopen() -> None:
            for cached in splits:
                state_type = cached.local_sizes(), *self._state_type(cached)
                cached.store = feature_store.open_states(
                    self._path(cached), cached.setup, *state_type
                )

        processes.run_on_all(reopen)
        local_filled = json.dumps([cached.store is not None for cached in splits])
        filled = [json.loads(text) for text in processes.gather_texts(local_filled)]
        for cached, is_filled in zip(splits, zip(*filled, strict=True), strict=True):
            cached.store = cached.store if all(is_filled) else None

    def fill(self, splits: Sequence[CachedSplit], weights: Any, log: Log) -> None:
        """Computes missing states and logs it. `weights` are those of any of the runs.

        All processes call this with the same parts.
        """
        if not splits:
            return
        start_time = time.monotonic()
        new = [cached for cached in splits if cached.store is None]
        # All stores are created first, so that a full disk does not leave other processes waiting.
        stores = processes.run_on_all(lambda: [self._new_store(cached) for cached in new])
        steps: dict[FeatureSpec, Any] = {}
        total = sum(cached.split.size for cached in new)
        progress = ProgressReporter(log, f"computing {_format_specs(new)}:", total, "examples")
        for cached, store in zip(new, stores, strict=True):
            if cached.spec not in steps:
                feature_step = _make_feature_step(
                    cached.scorer.model, cached.spec, store.states.dtype
                )
                steps[cached.spec] = compile_step(self._placement, feature_step)
            _compute(steps[cached.spec], store, cached, weights, progress)
            if isinstance(store, feature_store.DiskStore):
                cached.store = store.seal(cached.setup)
            else:
                cached.store = store
        reused = len(splits) - len(new)
        log(
            f"cached {_format_specs(splits)}: {self._gib(splits):.3g} GiB in "
            f"{self._folder if self._on_disk else 'host memory'}{_per_process()}"
            f"{f' ({reused} reused from an earlier run)' if reused else ''}, "
            f"{time.monotonic() - start_time:.1f} s"
        )

    def _state_type(self, cached: CachedSplit) -> tuple[int, np.dtype]:
        """Returns the width and dtype of a state."""
        return cached.scorer.model.backbone.dims.width, jnp.dtype(self._config.cache.dtype)

    def _gib(self, splits: Sequence[CachedSplit]) -> float:
        """Returns the largest cache size of a process, in GiB."""
        count, total = jax.process_count(), 0
        for cached in splits:
            width, dtype = self._state_type(cached)
            num_states = max(int(cached.sizes[process::count].sum()) for process in range(count))
            total += num_states * width * dtype.itemsize
        return total / 2**30

    def _path(self, cached: CachedSplit) -> Path:
        """Returns the path of a split's files."""
        folder = self._folder
        if self._several:
            text = json.dumps(dict(cached.setup), sort_keys=True)
            folder = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
        return feature_store.states_path(
            folder, cached.name, jax.process_index(), jax.process_count()
        )

    def _new_store(self, cached: CachedSplit) -> feature_store.Store:
        args = cached.local_sizes(), *self._state_type(cached)
        if not self._on_disk:
            return feature_store.memory_store(*args)
        return feature_store.DiskStore(self._path(cached), *args)


def plan_feature_cache(
    config: RunConfig,
    scorer: Scorer,
    splits: Mapping[str, Split],
    weights: Any,
    placement: Placement,
    workdir: str,
) -> tuple[FeatureCache, Callable[[Log], None]]:
    """Plans the feature cache of one run. Returns the cache and `fill(say)`.

    `fill` computes the states, or reuses those of an earlier run on disk, and logs it. Raises
    InputError if nothing can be cached, if the limit is exceeded, and for a folder with states of
    a different setup.
    """
    plan = FeatureCachePlan(config, placement, workdir)
    feature_cache = plan.add(scorer, splits, weights)
    plan.check()
    plan.open(feature_cache.splits)
    return feature_cache, lambda say: plan.fill(feature_cache.splits, weights, say)


def _format_specs(splits: Sequence[CachedSplit]) -> str:
    specs = " and ".join(dict.fromkeys(str(cached.spec) for cached in splits))
    return f"{specs} of {len(splits)} splits"


def _per_process() -> str:
    count = jax.process_count()
    return f" on each of {count} processes" if count > 1 else ""


def _cache_setup(
    config: RunConfig, scorer: Scorer, split: Split, spec: FeatureSpec, weights: Any
) -> dict[str, str]:
    """Returns everything that the states depend on."""
    layout = scorer.layout
    return {
        "the backbone's weights": weights.report.fingerprint[:16],
        "the backbone's layers": scorer_fingerprints(scorer)["layers"],
        "backbone.dtype": config.backbone.dtype,
        "backbone.rescale": str(config.backbone.rescale),
        "the data": split.digest(),
        "the template": scorer.template,
        "the first positions": f"{layout.shift} and {layout.decoder_shift}",
        "what is kept": str(spec),
        "cache.dtype": config.cache.dtype,
    }


# -- computing it ---------------------------------------------------------------------------------


def _make_feature_step(model: Model, spec: FeatureSpec, dtype: Any) -> Callable[..., jax.Array]:
    """Returns (trainable, frozen, batch) -> states to cache [B*K, T or M, H]."""

    def feature_step(trainable: tree.Flat, frozen: tree.Flat, batch: Batch):
        params = tree.merge(trainable, frozen)
        if spec.layer is None:
            states = model.hidden(params, batch)
            states = states if spec.all_tokens else select_positions(states, batch.label_pos)
        else:
            backbone = {"params": params["backbone"]}
            states = model.backbone.apply(backbone, batch, spec.layer, method="enter")
        return states.astype(dtype)

    return feature_step


def _compute(
    step: Any,
    store: feature_store.Store,
    cached: CachedSplit,
    weights: Any,
    progress: ProgressReporter,
) -> None:
    """Fills a store in one pass, longest rows first, so that few shapes are compiled."""
    layout, split = cached.scorer.layout, cached.split
    # Every process iterates over whole batches, and stores only the states of its rows.
    batches = EvalBatches(split.rows, split.labels, layout.single_host())
    # The states do not depend on trainable parameters.
    compute_states = step({}, weights.frozen)
    results = ((batch, compute_states(host_share(batch, layout))[1]) for batch in batches)
    for batch, states in dispatch_ahead(results, 1):
        rows = _rows(batch)
        is_local = (rows >= 0) & (rows % jax.process_count() == jax.process_index())
        mask = _mask(batch, cached.spec) & is_local[:, None]
        store.write(np.where(is_local, rows, -1), mask, np.asarray(states))
        progress.add(int((batch.index >= 0).sum()))


def _sizes(scorer: Scorer, split: Split, spec: FeatureSpec) -> np.ndarray:
    """Returns the number of states of each row, int [examples * K]."""
    width = max(len(row.label_pos) for example in split.rows for row in example)
    sizes = np.full((len(split.rows), scorer.layout.num_rows), width)
    if spec.all_tokens:
        sizes[:] = 0
        for row_sizes, example in zip(sizes, split.rows, strict=True):
            row_sizes[: len(example)] = [len(row.ids) for row in example]
    return sizes.reshape(-1)


def _rows(batch: Batch) -> np.ndarray:
    """Returns the row numbers of a batch by example and choice, [B*K]; -1 = padding."""
    index, choices = batch.index[:, None], len(batch.label_pos) // len(batch.index)
    return np.where(index >= 0, index * choices + np.arange(choices), -1).reshape(-1)


def _mask(batch: Batch, spec: FeatureSpec) -> np.ndarray:
    """Returns the mask of positions whose states are cached, bool [B*K, T or M]."""
    if spec.all_tokens:
        return batch.encoder.mask
    return np.broadcast_to(_rows(batch)[:, None] >= 0, batch.label_pos.shape)


def _narrow(batch: Batch) -> Batch:
    """Keeps one column of the tokens, so that batches of all lengths share one program."""

    def narrow_tokens(tokens: Tokens) -> Tokens:
        first = jax.tree.map(lambda x: x[:, :1], tokens._replace(lengths=None))
        return first._replace(mask=tokens.mask.any(1, keepdims=True))

    decoder = None if batch.decoder is None else narrow_tokens(batch.decoder)
    columns = np.arange(batch.label_pos.shape[1], dtype=np.int32)
    label_pos = np.broadcast_to(columns, batch.label_pos.shape)
    return batch._replace(
        encoder=narrow_tokens(batch.encoder), decoder=decoder, label_pos=label_pos
    )
