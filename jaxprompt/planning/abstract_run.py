"""Builds a run from shapes alone: no weights, no data, no accelerator."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import linen as nn

from jaxprompt.build.backbone import backbone_from_config, open_backbone
from jaxprompt.build.check import check_config
from jaxprompt.build.examples import Examples, apply_form, read_task
from jaxprompt.build.layers import separates_layers
from jaxprompt.build.method import get_head
from jaxprompt.build.scorer import check_fit
from jaxprompt.build.task import build_objectives, cache_shared_prefix, scorer_from_config
from jaxprompt.config.run import BackboneConfig, RunConfig
from jaxprompt.convert.folder import is_hub_id
from jaxprompt.data.tasks.readers.reading import with_labels
from jaxprompt.data.tasks.tags import iob2_labels
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.demos import COUNTS
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.data.text.specials import INFILLING
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, nearest
from jaxprompt.layers import kernels
from jaxprompt.layers.cache import copies_layers
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.devices import Device
from jaxprompt.parallel.sharding import Target, make_placement
from jaxprompt.planning.published import published_checkpoints
from jaxprompt.runs import ppt
from jaxprompt.types import Batch, Objective

CHOICES = 4  # assumed per example, if it depends on the data
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
_MASKS = 100


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractRun:
    """The run of a config, with shapes instead of arrays."""

    config: RunConfig
    backbone: Backbone
    scorer: Scorer
    model: Model  # that is trained
    objectives: Sequence[Objective]
    batch: Batch  # numpy, every row with the maximum length
    eval_batch: Batch
    copies_layers: bool  # whether text generation copies the layers on the device
    widens_bfloat16: bool  # whether the device has no bfloat16 and uses float32 instead
    notes: tuple[str, ...]  # the source of the shapes, and assumptions


class WordTokenizer:
    """Replaces a tokenizer that is not on this machine: every word is one subword."""

    name_or_path = "one piece a word"
    is_fast = True  # it gives offsets
    unk_token_id = bos_token_id = None
    pad_token_id, eos_token_id, cls_token_id, sep_token_id, mask_token_id = range(5)

    def __init__(self, sentinel: str):
        """Initialises the vocabulary with the sentinels of the config."""
        names = [*(sentinel.format(i) for i in range(_MASKS)), *INFILLING]
        self._ids = {name: 5 + i for i, name in enumerate(names)}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list]]:
        """Assigns ids to words in the order of their occurrence. Returns ids and offsets."""

        def word_id(word: str) -> int:
            return self._ids.setdefault(word, 5 + len(self._ids))

        words = [list(re.finditer(r"\S+", text)) for text in texts]
        return {
            "input_ids": [[word_id(word.group()) for word in text] for text in words],
            "offset_mapping": [[word.span() for word in text] for text in words],
        }

    def get_vocab(self) -> dict[str, int]:
        """Returns the sentinels and the words seen so far."""
        return self._ids

    def num_special_tokens_to_add(self, pair: bool) -> int:
        """Returns 3: [CLS] and two [SEP], as for pairs in BERT."""
        return 3


def open_run(config: RunConfig, device: Device | None = None) -> AbstractRun:
    """Builds the run of a config, with every row as long as data.max_len allows.

    Args:
      config: the config.
      device: the device to plan for, which may have a fused attention kernel.

    Raises:
      InputError: as training does, except for errors in data and files.
    """
    _check_supported(config)
    backbone, notes = open_or_published(config.backbone)
    check_fit(
        backbone,
        prompt=config.prompt,
        head=config.head,
        max_len=config.data.max_len,
    )
    if device is not None and uses_fused_kernel(backbone.module, device, config.data.max_len):
        backbone = with_attention(backbone, "fused")
        notes += ("attention is a fused kernel on these devices, which does not store the scores",)
    has_file = any((backbone.folder / name).exists() for name in _TOKENIZERS)
    if not has_file and not is_gguf(backbone.folder):
        tokenizer = WordTokenizer(
            config.backbone.sentinel
        )  # it has the tokenizer methods of a plan
        backbone = backbone._replace(tokenizer=cast(Tokenizer, tokenizer))
        if get_head(config).READS_WORDS:
            notes += ("no tokenizer on this machine: one subword per label word is assumed",)
    if config.mesh.slices > 1:
        config = config.replace({"mesh.slices": 1})  # simulated devices are one slice
        notes += ("network times are those within a slice; between slices the network is slower",)
    placement = make_placement(devices=jax.devices()[:1])
    if device is not None:  # which sets the lengths of batches
        target = Target(device.platform, device.capability)
        placement = dataclasses.replace(placement, compiled_for=target)
    # Every row has the maximum length without demonstrations, too.
    config = config.replace({f"demos.{name}": 0 for name in COUNTS})
    more_notes: tuple[str, ...] = ()
    if config.ppt.task:
        scorer = ppt.make_scorer(config, backbone, placement)
        example = Example(dict.fromkeys(scorer.task.fields, _text(config)))
        model, objectives = ppt.make_objectives(config, scorer.model)
    else:
        task, example, more_notes = _longest_example(config)
        examples = Examples(task, max(1, len(example.choices)), {"train": [example]})
        scorer = scorer_from_config(config, backbone, examples, placement)
        scorer = cache_shared_prefix(config, scorer)
        model, objectives = scorer.model, build_objectives(config, scorer.model)
    widens_bfloat16 = device is not None and not device.bfloat16
    if device is not None and widens_bfloat16 and config.backbone.dtype == "bfloat16":
        more_notes += (
            f"{device.name} has no bfloat16: float32 speed, with copies that XLA may make",
        )
    batches = (
        _longest_batch(scorer, example, config.data.batch, targets=True, packed=config.data.packed),
        _longest_batch(scorer, example, config.data.eval_batch, targets=scorer.scores_targets),
    )
    return AbstractRun(
        config,
        backbone,
        scorer,
        model,
        objectives,
        *batches,
        _copies_layers(config, backbone, device),
        widens_bfloat16,
        notes + more_notes,
    )


def _copies_layers(config: RunConfig, backbone: Backbone, device: Device | None) -> bool:
    """Returns whether text generation copies the layers on the device."""
    target = Target("cpu") if device is None else Target(device.platform, device.capability)
    placement = dataclasses.replace(make_placement(devices=jax.devices()[:1]), compiled_for=target)
    return copies_layers(target.platform) and not separates_layers(
        backbone, placement, writes=True, trainable=config.trainable
    )


def _check_supported(config: RunConfig) -> None:
    """Raises InputError for a config that is invalid, or that plan does not support."""
    check_config(config)
    if config.objective.name:
        raise InputError(
            f"objective.name={config.objective.name} pre-trains a backbone, which plan does not "
            "support; see launch/small_*.sh for settings, or give a config of train or pretrain"
        )
    if config.shared.tasks:
        raise InputError(
            "plan does not support shared.tasks; empty it, and plan the task with the longest "
            "texts, which needs the most memory, with its fields"
        )
    if config.ppt.task:
        ppt.check_trainable_prompt(config)


def _longest_batch(
    scorer: Scorer, example: Example, size: int, *, targets: bool, packed: bool = False
) -> Batch:
    """Returns a batch of `size` copies of the longest example, with the largest shapes."""
    split = scorer.encode([example], targets=targets)
    batch = scorer.one_batch(split.rows[:1] * size, split.labels[:1].repeat(size, 0))
    if not packed:
        return batch
    tokens = batch.encoder  # the mask of documents takes memory
    return batch._replace(encoder=tokens._replace(segments=np.ones_like(tokens.ids)))


def open_or_published(config: BackboneConfig) -> tuple[Backbone, tuple[str, ...]]:
    """Opens a backbone on this machine, or else uses the published shapes of its hub id."""
    name = config.path
    checkpoint = published_checkpoints().get(name)
    # Files on this machine take precedence: their config may differ.
    if checkpoint is None or os.path.isdir(name) or _is_cached(name, config.revision or None):
        try:
            return open_backbone(config), (f"backbone {name}, from the files on this machine",)
        except InputError as error:
            if "pkg:" in name or os.path.exists(name) or not name:
                raise
            reason = str(error).rstrip(".")
            if is_hub_id(name) and not _is_cached(name, config.revision or None):
                reason = f"backbone {name} is not on this machine, and a plan downloads nothing"
            raise InputError(
                f"{reason}; use files or a model with published shapes, "
                f"{nearest(name, published_checkpoints())}"
            ) from error
    backbone = backbone_from_config(config, Path(name), checkpoint.hf, checkpoint.heads)
    return backbone, (f"backbone {name}, not on this machine: planned with its published shape",)


def uses_fused_kernel(module: nn.Module, device: Device, length: int) -> bool:
    """Returns whether training on a device uses its fused attention kernel at a length."""
    cfg, target = module.cfg, Target(device.platform, device.capability)
    has_dropout, size = cfg.attention_dropout > 0, module.dims.head_dim
    return kernels.has_fused_kernel(cfg, size, target, length, has_dropout=has_dropout)


def can_request_fused(run: AbstractRun, device: Device) -> bool:
    """Returns whether a device has a fused attention kernel that must be requested."""
    config, module = run.config, run.backbone.module
    if config.backbone.attention != "auto" or uses_fused_kernel(
        module, device, config.data.max_len
    ):
        return False
    return uses_fused_kernel(
        with_attention(run.backbone, "fused").module, device, config.data.max_len
    )


def with_attention(backbone: Backbone, kernel: str) -> Backbone:
    """Returns a copy of a backbone with another attention kernel."""
    cfg = dataclasses.replace(backbone.module.cfg, attention=kernel)
    return backbone._replace(module=backbone.module.clone(cfg=cfg))


@functools.cache
def _is_cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(name, file, revision=revision) for file in _WEIGHTS)
    return any(isinstance(path, str) for path in paths)


def _text(config: RunConfig) -> str:
    return "a " * config.data.max_len


def _longest_example(config: RunConfig) -> tuple[Task, Example, tuple[str, ...]]:
    """Returns the longest possible example of a config's task."""
    task, text = read_task(config.task), _text(config)
    notes: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    if task.kind == "tags" and not task.labels:
        task = dataclasses.replace(task, labels=task.values or iob2_labels("X"))
        notes += (f"{len(task.labels)} tags are assumed; task.labels names their types",)
    if (
        example := get_head(config).longest_example(task, text, config.data.max_target)
    ) is not None:
        return task, example, notes
    if task.choices:
        count = len(task.choices) if len(task.choices) > 1 else CHOICES
        choices = ("a",) * count
        if len(task.choices) == 1:
            notes += (f"{count} choices per example are assumed",)
    elif not task.labels:
        # The positive class is a label in the data, and nothing is scored here.
        task = dataclasses.replace(task, positive="")
        task = with_labels(task, [{task.label: "0"}, {task.label: "1"}])
        notes += ("2 classes are assumed; task.labels names them",)
    task = apply_form(config, task)
    layouts = (config.task.template, task.template, task.causal, task.text, task.plain)
    parts = [part for layout in layouts for part in parse(layout).parts]
    untruncated = {part.text for part in parts if "whole" in part.modifiers}
    example = task.example(text, task.options or choices)
    fields = example.fields | dict.fromkeys(
        untruncated & set(task.fields), "a"
    )  # the others are truncated
    return task, example._replace(fields=fields, label=0), notes
