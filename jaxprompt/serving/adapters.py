"""Prompts of others, PEFT's folders and .npy arrays, as exports of ours; exports for PEFT."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.examples import Examples, read_task
from jaxprompt.build.inheritance import rescaled
from jaxprompt.build.prompt_artifact import encode_text, make_metadata, plain_tokens
from jaxprompt.build.task import scorer_from_config
from jaxprompt.build.tuned_backbone import tuned_names
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.artifact import import_npy
from jaxprompt.convert.peft import Adapter, read_peft
from jaxprompt.convert.prompt_metadata import BackboneMetadata, PromptMetadata
from jaxprompt.errors import InputError, brief, with_article
from jaxprompt.files import user_path
from jaxprompt.models.scorer import Scorer

# Families whose torch models read the past keys and values by which PEFT hands a prefix over.
_PREFIXES = ("bert", "roberta", "electra", "gpt2", "llama")
_SHIP = "ship prompt.safetensors, which export writes without --peft"
_TASKS = {"t5": "SEQ_2_SEQ_LM", "gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM"}


class Adopted(NamedTuple):
    """A prompt without metadata."""

    tensors: dict[str, np.ndarray]  # by flat name, as of an export
    prompt: dict[str, Any]  # the block of the method `constant` whose params they are
    head: dict[str, Any]  # the block of the head that came along, {} where none did


class _Head(NamedTuple):
    """A head that PEFT saves beside a prefix."""

    task: str  # task_type of adapter_config.json
    layers: dict[str, str]  # ours by torch's name
    block: dict[str, Any]

    def tensors(self) -> list[str]:
        """Lists its tensors as torch calls them."""
        return [f"{name}.{part}" for name in self.layers for part in ("weight", "bias")]


_LINEAR = {"name": "linear", "dropout": 0.0}
_DENSE = {"classifier.dense": "pooler", "classifier.out_proj": "out"}
_HEADS = (
    _Head("SEQ_CLS", {"classifier": "out"}, _LINEAR | {"pooler": "checkpoint"}),  # BERT
    _Head("SEQ_CLS", _DENSE, _LINEAR | {"pooler": "trained"}),  # RoBERTa
    _Head("TOKEN_CLS", {"classifier": "out"}, {"name": "tags", "dropout": 0.0}),
    _Head("QUESTION_ANS", {"qa_outputs": "out"}, {"name": "spans"}),
)


def is_adapter(path: str) -> bool:
    """Tells whether `path` is a folder of PEFT's or an .npy array."""
    where = user_path(path)
    return where.suffix == ".npy" or os.path.exists(where / "adapter_config.json")


def adopt(path: str) -> Adopted:
    """Reads a folder of PEFT's or an .npy array [S, E].

    A head is taken over from a prefix alone: beside soft tokens PEFT pools the first of them, not
    [CLS]. Raises InputError for a head of a form that is not known here.
    """
    if Path(path).suffix == ".npy":
        rows = import_npy(path)
        return Adopted({"prompt/slots": rows}, {"name": "constant", "slots": len(rows)}, {})
    adapter = read_peft(path)
    block: dict[str, Any] = {"name": "constant"}
    if adapter.soft is not None:
        if adapter.head:
            raise InputError(
                f"{path} scores the state of its first soft token, which no head does here; train "
                f"with prompt.start=file and prompt.file={path}, which takes its soft tokens"
            )
        block["slots"] = len(adapter.soft)
        return Adopted({"prompt/slots": adapter.soft}, block, {})
    assert adapter.k is not None and adapter.v is not None  # as there are no soft tokens
    layers, length = adapter.k.shape[:2]
    part = "decoder_" if adapter.stream == "decoder" else ""
    block |= {f"{part}length": length, f"{part}first": 0, f"{part}last": layers}
    block["shift_decoder" if part else "shift"] = length
    tensors = {f"prompt/{part}k": adapter.k, f"prompt/{part}v": adapter.v}
    head, own = _head_of(path, adapter)
    return Adopted(tensors | head, block, own)


def metadata_of_adopted(
    config: RunConfig, path: str, adopted: Adopted, backbone: LoadedBackbone
) -> PromptMetadata:
    """Makes the metadata that a prompt without any would have on a backbone, by a config.

    The config says task, head and layout. Raises InputError where they do not
    fit, and where the classes are not known.
    """
    opened = backbone.backbone
    if "length" in adopted.prompt and opened.module.STYLE == "seq2seq":
        # In the encoder it would give other answers than PEFT.
        raise InputError(
            f"{path} has a prefix with num_transformer_submodules=1, which PEFT gives to the "
            f"decoder of {with_article(opened.family)}, in a form that is not read; train it in "
            "PEFT with task_type=SEQ_2_SEQ_LM"
        )
    if "length" in adopted.prompt and opened.family not in _PREFIXES:
        raise InputError(
            f"{path} has a prefix, which {with_article(opened.family)} of transformers does not "
            f"read; give the backbone that it was learned on: {', '.join(_PREFIXES)}"
        )
    if "pooler" in adopted.head and config.head.to_dict() == adopted.head:
        # Of dense layers that torch names alike RoBERTa's ends with tanh, ELECTRA's with gelu.
        fitting = "roberta" if config.head.get("pooler") == "trained" else "bert"
        if opened.family != fitting:
            raise InputError(
                f"{path} has a head as {fitting} has it, and the backbone is "
                f"{with_article(opened.family)}; give a head of your own, or the backbone that it "
                "was learned on"
            )
    config = dataclasses.replace(config, prompt=OpenBlock.from_dict(adopted.prompt))
    task = read_task(config.task)
    if task.kind == "classes" and not (task.labels or task.choices):
        raise InputError("without training rows the classes are not known; give the task's labels")
    examples = Examples(task, max(1, len(task.choices)), {})
    scorer = scorer_from_config(config, opened, examples, backbone.placement)
    return make_metadata(
        scorer,
        scorer.model.prompt,
        backbone=dataclasses.replace(opened.config, family=opened.family),
        fingerprint=backbone.loaded.report.fingerprint,
        config=config,
        metrics={},
    )


def scale_slots(tensors: Mapping[str, np.ndarray], rescale: float) -> dict[str, np.ndarray]:
    """Divides plain soft tokens as the embeddings are divided among which they will stand."""
    return {
        name: rescaled(x, 1.0, rescale) if name == "prompt/slots" else x
        for name, x in tensors.items()
    }


def _head_of(path: str, adapter: Adapter) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Takes the head over that comes with a task of PEFT's. -> tensors, its block"""
    if not adapter.head:
        return {}, {}
    kind = adapter.config.get("task_type")
    known = [head for head in _HEADS if head.task == kind]
    if not known:
        raise InputError(
            f"{path} has a head of task_type={brief(kind)}, which is not read; save the adapter "
            f"with one of {', '.join(dict.fromkeys(head.task for head in _HEADS))}"
        )
    names = set(adapter.head)
    found = next((head for head in known if names == set(head.tensors())), None)
    if found is None:
        forms = " or ".join(", ".join(head.tensors()) for head in known)
        raise InputError(
            f"{path} has a head of {', '.join(sorted(names))}, which is not read; {kind} needs "
            f"{forms}"
        )
    tensors = {}
    for name, ours in found.layers.items():
        # torch's [out, in] -> [in, out]
        tensors[f"head/main/{ours}/kernel"] = np.ascontiguousarray(adapter.head[f"{name}.weight"].T)
        tensors[f"head/main/{ours}/bias"] = adapter.head[f"{name}.bias"]
    return tensors, found.block


def as_peft(
    scorer: Scorer, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata
) -> dict[str, Any]:
    """Gives what `convert.peft.write_peft` writes. -> its keyword arguments

    The head goes along where PEFT scores as we do: a prefix on BERT's own pooler. Elsewhere PEFT
    pools a soft token or has another head, and the adapter holds the prompt alone. Raises
    InputError for a prompt that PEFT cannot hold: it puts soft tokens in front of all else.
    """
    _check_single_prompt(scorer, tensors, metadata)
    base = metadata.backbone
    adapter: dict[str, Any] = {
        "base": base.id,
        "revision": base.revision,
        "task_type": _TASKS.get(base.family),
        "layers": base.dims.layers,
        "heads": base.dims.heads,
    }
    if "prompt/slots" in tensors:
        if not _stand_in_front(scorer):
            raise InputError(
                f"--peft: PEFT puts soft tokens in front of the input; in {metadata.template!r} "
                f"they stand elsewhere; {_SHIP}"
            )
        return adapter | {"soft": plain_tokens(tensors, base.rescale)}
    _check_prefix(base, metadata.prompt)
    adapter["prefix"] = tensors["prompt/k"], tensors["prompt/v"]
    if base.family == "bert" and metadata.head.get("pooler") == "checkpoint":
        kernel, bias = (tensors[f"head/main/out/{name}"] for name in ("kernel", "bias"))
        adapter["head"] = {"classifier.weight": kernel.T, "classifier.bias": bias}
    return adapter


def _check_single_prompt(
    scorer: Scorer, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata
) -> None:
    """Raises InputError where a run has more than soft tokens or a prefix, or none of them."""
    if scorer.demos is not None:
        raise InputError(
            f"--peft: the prompt is laid with demonstrations, which PEFT has no form for; {_SHIP}"
        )
    if scorer.model.prompt.reads:
        raise InputError(
            f"--peft: a prompt of {metadata.method} is computed from each text, which PEFT has no "
            f"form for; {_SHIP}"
        )
    if tuned_names(tensors):
        raise InputError(
            "--peft: the run tuned weights of the backbone, which an adapter does not hold; with "
            "--tuned=FOLDER they become the model that it stands on"
        )
    if "prompt/rows" in tensors:
        raise InputError(
            f"--peft: a prompt of {metadata.method} trains rows for the answer, which PEFT has no "
            f"form for; {_SHIP}"
        )
    others = {name for name in tensors if name.startswith("prompt/")} - {"prompt/slots"}
    if metadata.backbone.family == "t5" and others:
        raise InputError(
            "--peft: of a T5 PEFT holds soft tokens of the encoder alone; ship prompt.safetensors"
        )
    if "prompt/slots" in tensors and others:
        raise InputError(
            f"--peft: a prompt of {metadata.method} has soft tokens and a prefix, and PEFT one "
            f"of them; {_SHIP}"
        )
    if "prompt/slots" not in tensors and "prompt/k" not in tensors:
        raise InputError(f"--peft: a {metadata.method} run has no prompt; export it without --peft")


def _check_prefix(base: BackboneMetadata, constant: OpenBlock) -> None:
    """Raises InputError for a prefix in other layers, positions or models than PEFT's."""
    fields: Mapping[str, Any] = constant.fields
    span = (fields["first"], fields["last"], fields["shift"])
    if span != (0, base.dims.layers, fields["length"]):
        raise InputError(
            "--peft: PEFT's prefix stands in every layer and shifts positions by its length; this "
            f"one stands in layers {span[0] + 1}-{span[1]} and shifts by {span[2]}"
        )
    if base.family not in _PREFIXES:
        raise InputError(
            f"--peft: {with_article(base.family)} of transformers does not read the prefix of "
            f"an adapter; {_SHIP}"
        )


def _stand_in_front(scorer: Scorer) -> bool:
    """Tells whether the input begins with all soft tokens, [CLS] and hard words behind them."""
    count = scorer.model.prompt.num_slots()
    (rows,) = encode_text(scorer, "a text")
    return all(np.array_equal(row.slot[:count], np.arange(count)) for row in rows)
