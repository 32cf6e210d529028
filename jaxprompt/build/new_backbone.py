"""The initial weights of pre-training: random, or a checkpoint's with the heads that it lacks.

These functions follow `build.backbone.open_backbone` and `build.backbone.load_weights`.
"""

import dataclasses
from collections.abc import Sequence

from jaxprompt.build.backbone import backbone_from_config
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


def open_untrained(config: BackboneConfig, heads: Sequence[str]) -> Backbone:
    """Creates an untrained backbone from `config.init`, a transformers config.json.

    The tokenizer is that of `config.path`, "" = the folder of the config; Backbone.folder is its
    folder.

    Raises:
      InputError: if the file is not a config, transformers would reject it, or it needs something
        unsupported, or if token ids of the tokenizer exceed the embedding table.
    """
    path = user_path(config.init)
    hf = read_json(path, "the config.json of a transformers model")
    backbone = backbone_from_config(config, path, hf, tuple(heads))
    try:
        random_weights.check_heads(backbone.family, heads)
        saved_config(backbone.family, hf, heads)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    tokenizer_folder = path.parent
    if config.path:
        tokenizer_folder = folder.resolve(config.path, config.revision or None)
    tokenizer = load_tokenizer(tokenizer_folder)
    check_vocabulary(tokenizer, backbone.module.cfg.vocab)
    return backbone._replace(folder=tokenizer_folder, tokenizer=tokenizer)


def random_backbone(
    backbone: Backbone, placement: Placement, seed: int, *, part: str = "backbone"
) -> tuple[Backbone, Loaded]:
    """Randomly initialises all weights of a backbone.

    `part` is the name in the tree, "backbone" or "generator": models of the same seed differ by it.
    """
    loaded = random_weights.init_backbone(
        backbone.family,
        backbone.hf,
        sorted(backbone.module.cfg.model_heads),
        seed=seed,
        placement=placement,
        part=part,
        dtype=backbone.config.dtype,
        rescale=backbone.config.rescale,
    )
    return _match_loaded(backbone, loaded, placement), loaded


def replace_heads(
    backbone: Backbone,
    loaded: Loaded,
    heads: Sequence[str],
    placement: Placement,
    seed: int,
    *,
    part: str = "backbone",
) -> tuple[Backbone, Loaded]:
    """Reduces loaded weights to the heads of an objective; missing heads are initialised randomly.

    Other heads are dropped: a head that is not trained with its trunk would no longer fit it. The
    report lists the new heads as `fresh`.
    """
    new_weights = random_weights.with_heads(
        loaded,
        backbone.family,
        backbone.hf,
        heads,
        seed=seed,
        placement=placement,
        part=part,
        dtype=backbone.config.dtype,
        rescale=backbone.config.rescale,
    )
    module = backbone.module
    cfg = dataclasses.replace(module.cfg, model_heads=frozenset(heads))
    backbone = backbone._replace(module=module.clone(cfg=cfg))
    return _match_loaded(backbone, new_weights, placement), new_weights


def as_electra(backbone: Backbone) -> Backbone:
    """Turns a loaded BERT into one half of an ELECTRA: same trunk, other names and heads.

    Call it after `build.backbone.load_weights` and before `replace_heads`.
    """
    if backbone.family == "electra":
        return backbone
    if backbone.family != "bert":
        raise InputError(
            f"{backbone.folder} contains {with_article(backbone.family)}; replaced-token detection "
            "needs an ELECTRA or a BERT"
        )
    fields = {name: value for name, value in backbone.hf.items() if name != "architectures"}
    hf = fields | {"model_type": "electra", "embedding_size": backbone.hf["hidden_size"]}
    config = dataclasses.replace(backbone.config, family="electra")
    cfg = backbone.module.cfg
    electra = backbone_from_config(config, backbone.folder, hf, sorted(cfg.model_heads))
    electra_cfg = dataclasses.replace(electra.module.cfg, rows=cfg.rows, tied=cfg.tied)
    return electra._replace(
        module=electra.module.clone(cfg=electra_cfg), tokenizer=backbone.tokenizer
    )


def _match_loaded(backbone: Backbone, loaded: Loaded, placement: Placement) -> Backbone:
    module = backbone.module
    cfg = dataclasses.replace(
        module.cfg, rows=placement.padded_vocab(module.cfg.vocab), tied=loaded.report.tied
    )
    return backbone._replace(module=module.clone(cfg=cfg))
