"""The initial weights of pre-training: random, or a checkpoint's with the heads that it lacks.

These functions follow `build.backbone.open_backbone` and `build.backbone.load_weights`.
"""

import dataclasses
from collections.abc import Sequence

from jaxprompt.build.backbone import shape_backbone
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert import folder, random_weights
from jaxprompt.convert.load import Loaded
from jaxprompt.convert.save import saved_config
from jaxprompt.corpus.index import check_vocabulary
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError, with_article
from jaxprompt.files import read_json, user_path
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.sharding import Placement


def open_config(config: BackboneConfig, heads: Sequence[str]) -> Backbone:
    """Creates an untrained backbone from `config.init`, a transformers config.json.

    The tokenizer is that of `config.path`, "" = the folder of the config; Backbone.folder is its
    folder.

    Raises:
      InputError: if the file is not a config, transformers would reject it, or it needs something
        unsupported, or if token ids of the tokenizer exceed the embedding table.
    """
    path = user_path(config.init)
    hf = read_json(path, "the config.json of a transformers model")
    backbone = shape_backbone(config, path, hf, tuple(heads))
    try:
        random_weights.check_heads(backbone.family, heads)
        saved_config(backbone.family, hf, heads)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    where = path.parent
    if config.path:
        where = folder.resolve(config.path, config.revision or None)
    tokenizer = load_tokenizer(where)
    check_vocabulary(tokenizer, backbone.module.cfg.vocab)
    return backbone._replace(folder=where, tokenizer=tokenizer)


def draw_weights(
    backbone: Backbone, placement: Placement, seed: int, *, part: str = "backbone"
) -> tuple[Backbone, Loaded]:
    """Randomly initialises all weights of a backbone.

    `part` is the name in the tree, "backbone" or "generator": models of the same seed differ by it.
    """
    cfg = backbone.module.cfg
    drawn = random_weights.init_backbone(
        backbone.family, backbone.hf, sorted(cfg.model_heads), seed=seed, placement=placement,
        part=part, dtype=backbone.config.dtype, rescale=backbone.config.rescale,
    )  # fmt: skip
    return _fitted(backbone, drawn, placement), drawn


def with_heads(
    backbone: Backbone, loaded: Loaded, heads: Sequence[str], placement: Placement, seed: int, *,
    part: str = "backbone",
) -> tuple[Backbone, Loaded]:  # fmt: skip
    """Reduces loaded weights to the heads of an objective; missing heads are initialised randomly.

    Other heads are dropped: a head that is not trained with its trunk would no longer fit it. The
    report lists the new heads as `fresh`.
    """
    changed = random_weights.with_heads(
        loaded, backbone.family, backbone.hf, heads, seed=seed, placement=placement, part=part,
        dtype=backbone.config.dtype, rescale=backbone.config.rescale,
    )  # fmt: skip
    module = backbone.module
    cfg = dataclasses.replace(module.cfg, model_heads=frozenset(heads))
    backbone = backbone._replace(module=module.clone(cfg=cfg))
    return _fitted(backbone, changed, placement), changed


def as_electra(backbone: Backbone) -> Backbone:
    """Turns a loaded BERT into one half of an ELECTRA: same trunk, other names and heads.

    Call it after `build.backbone.load_weights` and before `with_heads`.
    """
    if backbone.family == "electra":
        return backbone
    if backbone.family != "bert":
        raise InputError(
            f"{backbone.folder} contains {with_article(backbone.family)}; replaced-token detection "
            "needs an ELECTRA or a BERT"
        )
    kept = {name: value for name, value in backbone.hf.items() if name != "architectures"}
    hf = kept | {"model_type": "electra", "embedding_size": backbone.hf["hidden_size"]}
    config = dataclasses.replace(backbone.config, family="electra")
    old = backbone.module.cfg
    shaped = shape_backbone(config, backbone.folder, hf, sorted(old.model_heads))
    cfg = dataclasses.replace(shaped.module.cfg, rows=old.rows, tied=old.tied)
    return shaped._replace(module=shaped.module.clone(cfg=cfg), tokenizer=backbone.tokenizer)


def _fitted(backbone: Backbone, loaded: Loaded, placement: Placement) -> Backbone:
    module = backbone.module
    cfg = dataclasses.replace(
        module.cfg, rows=placement.padded(module.cfg.vocab), tied=loaded.report.tied
    )
    return backbone._replace(module=module.clone(cfg=cfg))
