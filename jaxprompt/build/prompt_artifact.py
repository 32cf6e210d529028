"""A trained prompt on its way out of a run and back in: tensors and a card."""

import dataclasses
import datetime
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.build.backbone import LoadedBackbone, load_weights, open_backbone
from jaxprompt.build.cards import check_card, plugins_of
from jaxprompt.build.demonstrations import card_of, demos_of_card, with_encoder
from jaxprompt.build.scorer import build_scorer
from jaxprompt.build.tuned_backbone import without_delta
from jaxprompt.config.run import BackboneConfig, GenerateConfig, RunConfig
from jaxprompt.convert.artifact import check_fingerprint, package_versions, read_artifact
from jaxprompt.convert.hub import SCHEME, fetch_prompt
from jaxprompt.data.tasks.registry import task_from_json
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.identity import check_family, check_identity, identity_of
from jaxprompt.errors import InputError
from jaxprompt.models.folding import fold, unfold
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.sharding import Placement, put
from jaxprompt.prompts import BASE, Method, Take, make_prompt
from jaxprompt.types import Dims

# What the blocks of a card hold that are read here.
_NEEDED = {
    "backbone": ("id", "revision", "fingerprint", "sentinel", "rescale"),
    "prompt": ("name",),
    "head": ("name",),
    "layout": (
        "max_len",
        "max_target",
        "multiple",
        "side",
        "choices",
        "form",
        "answer",
        "eos",
    ),
    "generate": ("max_new", "beams", "length_penalty", "early_stopping"),
    "task": tuple(field.name for field in dataclasses.fields(Task)),
}

_ROWS = ("slots", "decoder_slots")  # arrays of soft tokens


class Exported(NamedTuple):
    """A prompt ready to score."""

    scorer: Scorer
    params: dict[str, Any]  # nested, on the device
    card: dict[str, Any]


def pack(
    scorer: Scorer,
    trainable: tree.Flat,
    frozen: tree.Flat,
    *,
    backbone: BackboneConfig,
    fingerprint: str,
    config: RunConfig,
    metrics: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Folds the prompt and describes it. -> (tensors by flat name, card)

    Trained weights of the backbone, where there are any, go along. The rest as in `describe`.
    """
    params = tree.merge(trainable, frozen)
    # Any example will do: what is folded depends on no text.
    batch = scorer.one_batch(encode_text(scorer, ""))
    prompt, arrays = fold(scorer.model, params, batch)
    own = tree.flatten({"prompt": prompt.exported(arrays)})
    # What another export holds is not exported once more, unless it was trained on.
    tensors = {n: x for n, x in own.items() if n in trainable or not BASE.fullmatch(n)}
    tensors |= {
        name: np.asarray(leaf, np.float32)
        for name, leaf in tree.flatten(params).items()
        if name.startswith("head/") or (name in trainable and name.startswith("backbone/"))
    }
    card = describe(
        scorer, prompt, backbone=backbone, fingerprint=fingerprint, config=config, metrics=metrics,
        origin=origin,
    )  # fmt: skip
    return tensors, card


def describe(
    scorer: Scorer, prompt: Method, *, backbone: BackboneConfig, fingerprint: str,
    config: RunConfig, metrics: Mapping[str, Any], origin: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Makes the card of a prompt. `prompt` is the method that its numbers are params of.

    `config` is the run's, `backbone` its block with the family found. `origin` tells of
    pre-training: {"pretrained": ...} of its own, {"init": ...} of the export that it started from,
    or nothing.
    """
    layout = scorer.layout
    plugins = plugins_of(prompt, scorer.head, backbone.family)
    return {
        "method": config.prompt.name,
        "hyper": config.prompt.to_dict(),
        "prompt": prompt.block(),
        "head": scorer.head.block(),
        "backbone": {
            "id": backbone.path,
            "revision": backbone.revision,
            "family": backbone.family,
            "sentinel": backbone.sentinel,
            "rescale": backbone.rescale,
            "quantize": backbone.quantize,
            "fingerprint": fingerprint,
            "dims": scorer.model.prompt.dims._asdict(),
            **identity_of(scorer),
        },
        "task": dataclasses.asdict(scorer.task),
        "template": scorer.template,
        "label_words": scorer.verbalizer.words if scorer.verbalizer else None,
        "layout": {
            "max_len": layout.max_len,
            "max_target": config.data.max_target,
            "multiple": layout.multiple,
            "side": layout.side,
            "choices": layout.num_rows,
            "form": config.task.form,
            "answer": config.task.answer,
            "eos": config.task.eos,
        },
        "generate": config.generate.to_dict(),
        "metrics": dict(metrics),
        "seed": config.seed,
        "versions": package_versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **({} if scorer.demos is None else {"demos": card_of(scorer.demos)}),
        **({"plugins": plugins} if plugins else {}),
        **origin,
    }


def read_export(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the tensors and the card of an export, a folder or hub:owner/name.

    Raises InputError for one that is not whole.
    """
    tensors, card = read_artifact(fetch_prompt(path) if path.startswith(SCHEME) else path)
    for block, names in _NEEDED.items():
        held = card.get(block)
        lost = [name for name in names if not isinstance(held, dict) or name not in held]
        if lost:
            raise InputError(f"{path}: the card lacks {block}.{lost[0]}; export the prompt again")
    check_card(path, card)
    card["backbone"].setdefault("quantize", "none")  # before there were codes
    return tensors, card


def unpack(
    path: str, *, backbone: BackboneConfig, batch: int, placement: Placement,
    force: bool = False, sentence_encoder: str = "", pretrained: str = "",
) -> Exported:  # fmt: skip
    """Reads an exported prompt and puts it on its backbone.

    An empty path of `backbone` takes the one that the card names, and so do an
    empty `sentence_encoder` and `pretrained`, the export that this one depends on. Raises
    InputError where the backbone's weights are others than the prompt was learned on, unless
    `force`.
    """
    tensors, card = read_export(path)
    card = with_encoder(card, sentence_encoder)
    opened = open_backbone(backbone_of_card(card, backbone))
    scorer = scorer_of_card(opened, card, batch, force=force)
    whole = LoadedBackbone(*load_weights(opened, placement), placement)
    check_fingerprint(card, whole.loaded.report.fingerprint, force=force)
    tensors = with_base(path, tensors, card, scorer, pretrained)
    return Exported(scorer.with_backbone(whole.backbone), join(path, tensors, scorer, whole), card)


def backbone_of_card(card: Mapping[str, Any], config: BackboneConfig) -> BackboneConfig:
    """Fills a backbone's config block with what a card says; it has its own path where given."""
    known = card["backbone"]
    named = {name: known[name] for name in ("sentinel", "rescale", "quantize")}
    if not config.path:
        named |= {"path": known["id"], "revision": known["revision"]}
    return dataclasses.replace(config, **named)


def generation_of_card(card: Mapping[str, Any]) -> GenerateConfig:
    """Returns how texts are written with the prompt of a card."""
    return GenerateConfig.from_dict(card["generate"], "generate.")


def scorer_of_card(
    opened: Backbone, card: Mapping[str, Any], batch: int, *, force: bool = False
) -> Scorer:
    """Builds the scorer that a card describes.

    Raises InputError for a backbone of another family, and for another tokenizer or other layers
    than it was learned with, unless `force`.
    """
    check_family(card, opened.family)
    task = task_from_json(card["task"])
    scorer = build_scorer(
        opened, task, prompt=card["prompt"], head=card["head"], template=card["template"],
        batch=batch, demos=demos_of_card(card, task), **card["layout"],
    )  # fmt: skip
    if not force:
        cure = "load that backbone, or pass --force (force=True)"
        check_identity(card["backbone"], identity_of(scorer), "the prompt was learned with", cure)
    return scorer


def numbers_of(
    path: str, tensors: Mapping[str, np.ndarray], card: Mapping[str, Any]
) -> tuple[Method, dict[str, Any]]:
    """Gives what others start from of an export that was read. -> method, its numbers, nested

    Raises InputError where the export that it depends on is another now.
    """
    method = make_prompt(**card["prompt"], dims=Dims(**card["backbone"]["dims"]))
    own = {name: x for name, x in tensors.items() if name.startswith("prompt/")}
    numbers = tree.unflatten(own).get("prompt", {})
    return method, method.with_base(numbers, _base_reader(path, card))


def _base_reader(path: str, card: Mapping[str, Any], moved: str = "") -> Take:
    """Makes what reads the exports that a card names, one of which may have moved."""
    origins = card.get("init") or {}
    known = {own["path"]: own for own in (origins, *origins.get("more", ())) if "path" in own}

    def take(named: str) -> tuple[Method, dict[str, Any]]:
        # Its digest is compared below, wherever it was moved to.
        where = moved or named
        if named not in known:
            raise InputError(
                f"{path} depends on {named}, and its card does not say which export that was; "
                "export the prompt again"
            )
        try:
            tensors, found = read_export(where)
        except InputError as error:
            raise InputError(
                f"{path} depends on {where}: {error}; say by pretrained where it is"
            ) from error
        if known[named]["sha256"] != found["sha256"]:
            raise InputError(
                f"{path} depends on {where}, which holds another export now; restore it, or say by "
                "pretrained where it is"
            )
        return numbers_of(where, tensors, found)

    return take


def with_base(
    path: str, tensors: Mapping[str, np.ndarray], card: Mapping[str, Any], scorer: Scorer,
    moved: str = "",
) -> dict[str, np.ndarray]:  # fmt: skip
    """Adds the numbers of the export that this one depends on, which may have moved.

    Raises InputError where that is not there, or is another than when the prompt was trained, and
    where it depends on none and `moved` is given.
    """
    method = scorer.model.prompt
    if moved and not method.inherits():
        raise InputError(f"{path} depends on no other export; leave out pretrained={moved!r}")
    own = {name: x for name, x in tensors.items() if name.startswith("prompt/")}
    prompt = tree.unflatten(own).get("prompt", {})
    whole = method.with_base(prompt, _base_reader(path, card, moved))
    return {**tensors, **tree.flatten({"prompt": whole})}


def join(
    path: str, tensors: Mapping[str, np.ndarray], scorer: Scorer, whole: LoadedBackbone
) -> dict[str, Any]:
    """Puts the tensors of a prompt beside the backbone's. -> params, nested, on the device

    `path` names the prompt in messages. Raises InputError where a tensor is missing, unknown or of
    another shape.
    """
    scorer, loaded, placement = scorer.with_backbone(whole.backbone), whole.loaded, whole.placement
    flat = tree.flatten({"backbone": loaded.params})
    tensors = without_delta(path, tensors, flat, scorer.model.backbone.dims.vocab)
    init = functools.partial(scorer.model.init, choices=scorer.layout.num_rows)
    # Shapes alone: nothing is drawn that the tensors would replace.
    shapes = jax.eval_shape(init, jax.random.key(0), loaded.params)
    wanted = tree.flatten({name: shapes[name] for name in ("prompt", "head")}) | {
        name: leaf for name, leaf in flat.items() if name in tensors
    }
    lost = wanted.keys() - tensors.keys()
    if any(x.startswith("head/") for x in lost) and not any(x.startswith("head/") for x in tensors):
        raise InputError(
            f"{path} has no numbers of a head, and head {scorer.head.name} must be trained; give "
            "head=jp.verbalizer(), which reads label words, or train a prompt"
        )
    for name in sorted(wanted.keys() ^ tensors.keys()):
        state = "lacks" if name in wanted else "holds the unknown"
        raise InputError(f"{path} {state} tensor {name!r}; export the prompt again")
    for name, leaf in wanted.items():
        if leaf.shape != tensors[name].shape:
            shape = list(tensors[name].shape)
            raise InputError(
                f"{path}: {name} is {shape}, the backbone needs {list(leaf.shape)}; give the "
                "backbone that it was learned on, or another prompt"
            )
    own = put(tensors, placement.parameters(tensors))
    return tree.unflatten(flat | own)


def soft_tokens(tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Gives the soft tokens of an export, those of the decoder last. -> [S, E], None = it has none

    They stand among embeddings that `backbone.rescale` divides.
    """
    rows = {name: tensors[f"prompt/{name}"] for name in _ROWS if f"prompt/{name}" in tensors}
    return unfold(rows)["table"] if rows else None


def plain_tokens(tensors: Mapping[str, np.ndarray], card: Mapping[str, Any]) -> np.ndarray | None:
    """Gives the same as the unmodified backbone takes them: multiplied by `backbone.rescale`."""
    rows = soft_tokens(tensors)
    return None if rows is None else rows * np.float32(card["backbone"]["rescale"])


def encode_text(scorer: Scorer, text: str) -> list[list[Encoded]]:
    """Encodes one example whose fields and choices are all `text`."""
    return scorer.encoder.encode_all([scorer.task.example(text, (text,) * scorer.layout.num_rows)])
