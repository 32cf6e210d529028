"""Converts adapters of PEFT and of `adapters`, and .npy arrays, to prompts; prompts to PEFT."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.examples import Examples, read_task
from jaxprompt.build.inheritance import rescale_vectors
from jaxprompt.build.prompt_artifact import encode_any, make_metadata, unscaled_soft_tokens
from jaxprompt.build.task import scorer_from_config
from jaxprompt.build.tuned_backbone import tuned_names
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.adapterhub import read_classifier, read_prefixes
from jaxprompt.convert.artifact import METADATA, import_npy
from jaxprompt.convert.peft import (
    Adapter,
    check_no_task,
    prefix_from_peft,
    read_peft,
    types_for,
)
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import InputError, brief, with_article
from jaxprompt.files import read_json, user_path
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.prompts.constant import PARTS

# Families whose torch models read past keys and values, as which PEFT passes a prefix.
_PREFIX_FAMILIES = (
    "bert", "roberta", "xlm_roberta_xl", "electra", "gpt2", "llama", "gpt_neox", "opt"
)  # fmt: skip
# Families on which `adapters` computes prefixes as we do without `shift`. In a T5 its relative bias
# takes the keys of the text as P positions later, but not the queries.
_ADAPTERHUB_FAMILIES = ("bert", "roberta", "electra", "distilbert", "gpt2", "llama", "bart")
_USE_EXPORT = "use prompt.safetensors, which export writes without --peft"
_TASK_TYPES = dict.fromkeys(("t5", "bart", "t5gemma"), "SEQ_2_SEQ_LM")
_TASK_TYPES |= dict.fromkeys(("gpt2", "llama", "gpt_neox", "opt"), "CAUSAL_LM")


class ImportedPrompt(NamedTuple):
    """A prompt without metadata."""

    tensors: dict[str, np.ndarray]  # by flat name, as in an export
    prompt: dict[str, Any]  # config block of the method `constant` with these params
    head: dict[str, Any]  # config block of the head of the adapter, {} if it has none
    library: str = ""  # "adapters": it needs `split_prefixes`


class _Head(NamedTuple):
    """A head that PEFT saves with a prefix."""

    task: str  # task_type of adapter_config.json
    layers: dict[str, str]  # torch name -> our name
    block: dict[str, Any]

    def tensors(self) -> list[str]:
        """Lists the torch names of its tensors."""
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
    """Returns whether `path` is an .npy array or an adapter folder without an export beside it."""
    local_path = user_path(path)
    has_config = os.path.exists(local_path / "adapter_config.json")
    return local_path.suffix == ".npy" or has_config and not os.path.exists(local_path / METADATA)


def import_prompt(path: str, task_id: int | None = None) -> ImportedPrompt:
    """Reads an adapter folder of PEFT or of `adapters`, or an .npy array [S, E].

    A head is only converted for a prefix: with soft tokens PEFT pools the first soft token, not
    [CLS]. `task_id` is the task of an adapter of several.

    Raises:
      InputError: for a head that is not supported.
    """
    if Path(path).suffix == ".npy":
        check_no_task(path, task_id)
        rows = import_npy(path)
        return ImportedPrompt({"prompt/slots": rows}, {"name": "constant", "slots": len(rows)}, {})
    folder = user_path(path)
    if "peft_type" not in read_json(folder / "adapter_config.json", "an adapter folder"):
        check_no_task(path, task_id)
        return _import_adapterhub(folder)
    adapter = read_peft(folder, task_id)
    block: dict[str, Any] = {"name": "constant"}
    if adapter.soft is not None:
        if adapter.head:
            raise InputError(
                f"{path} has a head that reads the state of its first soft token, which is not "
                f"supported; train a new head on its soft tokens, with prompt.start=file and "
                f"prompt.file={path}"
            )
        block["slots"] = len(adapter.soft)
        tensors = {"prompt/slots": adapter.soft}
        if adapter.decoder_soft is not None:
            block["decoder_slots"] = len(adapter.decoder_soft)
            tensors["prompt/decoder_slots"] = adapter.decoder_soft
        return ImportedPrompt(tensors, block, {})
    assert adapter.k is not None and adapter.v is not None  # without soft tokens it is a prefix
    layers, length = adapter.k.shape[:2]
    prefix = "decoder_" if adapter.stream == "decoder" else ""
    block |= {f"{prefix}length": length, f"{prefix}first": 0, f"{prefix}last": layers}
    block["shift_decoder" if prefix else "shift"] = length
    tensors = {f"prompt/{prefix}k": adapter.k, f"prompt/{prefix}v": adapter.v}
    head, head_config = _convert_head(path, adapter)
    return ImportedPrompt(tensors | head, block, head_config)


def _import_adapterhub(folder: Path) -> ImportedPrompt:
    """Reads a folder of `adapters`: prefixes, and a head for classes if it has one of ours."""
    tensors = {f"prompt/{name}": prefix for name, prefix in read_prefixes(folder).items()}
    pooler, head_tensors = read_classifier(folder)
    names = {name.partition(".")[0] for name in head_tensors}
    tensors |= _head_tensors(head_tensors, {name: name for name in names})
    head = _LINEAR | {"pooler": pooler} if pooler else {}
    return ImportedPrompt(tensors, {"name": "constant"}, head, "adapters")


def split_prefixes(path: str, imported: ImportedPrompt, opened: Backbone) -> ImportedPrompt:
    """Splits prefixes of `adapters` by the layers and heads of a backbone, which they do not name.

    Raises:
      InputError: if they are not those of this backbone.
    """
    if imported.library != "adapters":
        return imported
    if opened.family not in _ADAPTERHUB_FAMILIES:
        raise InputError(
            f"{path} has a prefix of adapters, which is not supported on "
            f"{with_article(opened.family)}; supported: {', '.join(_ADAPTERHUB_FAMILIES)}"
        )
    streams = {"self_prefix": "encoder"}
    if opened.module.STYLE == "seq2seq":
        streams = {"self_prefix": "decoder", "encoder_prefix": "encoder", "cross_prefix": "cross"}
    dims, block, tensors = opened.module.dims, dict(imported.prompt), dict(imported.tensors)
    for name in [name for name in tensors if name.startswith("prompt/")]:
        prefix, stream = tensors.pop(name), streams.get(name.removeprefix("prompt/"))
        if stream is None:
            raise InputError(
                f"{path} has {name.removeprefix('prompt/')}, and the backbone is "
                f"{with_article(opened.family)}; give the one that it was trained on"
            )
        layers = dims.layers if stream == "encoder" else dims.decoder_layers
        field = PARTS[stream]
        k, v = prefix_from_peft(prefix, layers, dims.heads, dims.head_dim)
        tensors |= {f"prompt/{field}k": k, f"prompt/{field}v": v}
        block |= {f"{field}length": len(prefix), f"{field}first": 0, f"{field}last": layers}
    head = imported.head
    if opened.family in _TASK_TYPES:  # the heads of decoders read another state than ours
        head = {}
        tensors = {name: x for name, x in tensors.items() if not name.startswith("head/")}
    return imported._replace(tensors=tensors, prompt=block, head=head)


def make_imported_metadata(
    config: RunConfig, path: str, imported: ImportedPrompt, backbone: LoadedBackbone
) -> PromptMetadata:
    """Makes the metadata of a prompt that has none.

    Args:
      config: gives the task, the head and the layout.
      path: where the prompt was read, for messages.
      imported: the prompt.
      backbone: the backbone of the prompt.

    Raises:
      InputError: if these do not fit, or if the classes are not known.
    """
    opened = backbone.backbone
    if not imported.library:
        _check_peft_family(path, imported, opened, config)
    config = dataclasses.replace(config, prompt=OpenBlock.from_dict(imported.prompt))
    task = read_task(config.task)
    if task.kind == "classes" and not (task.labels or task.choices):
        raise InputError("the classes are not known without training rows; set task.labels")
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


def _check_peft_family(
    path: str, imported: ImportedPrompt, opened: Backbone, config: RunConfig
) -> None:
    """Raises InputError for a prefix or a head that PEFT has on other backbones."""
    if "length" in imported.prompt and opened.module.STYLE == "seq2seq":
        # In the encoder it would give other predictions than in PEFT.
        raise InputError(
            f"{path} has a prefix with num_transformer_submodules=1, which PEFT uses in the "
            f"decoder of {with_article(opened.family)}, and which is not supported; train it in "
            "PEFT with task_type=SEQ_2_SEQ_LM"
        )
    if "length" in imported.prompt and opened.family not in _PREFIX_FAMILIES:
        raise InputError(
            f"{path} has a prefix, which {with_article(opened.family)} of transformers does not "
            f"support; give the backbone that it was trained on: {', '.join(_PREFIX_FAMILIES)}"
        )
    if "pooler" in imported.head and config.head.to_dict() == imported.head:
        # Torch names both heads alike, but RoBERTa's uses tanh and ELECTRA's gelu.
        fitting = "roberta" if config.head.get("pooler") == "trained" else "bert"
        if opened.family != fitting:
            raise InputError(
                f"{path} has a head of {with_article(fitting)}, and the backbone is "
                f"{with_article(opened.family)}; give another head, or the backbone that it was "
                "trained on"
            )


def scale_slots(tensors: Mapping[str, np.ndarray], rescale: float) -> dict[str, np.ndarray]:
    """Divides plain soft tokens by the factor that the word embeddings are divided by."""
    return {
        name: rescale_vectors(x, 1.0, rescale) if name.endswith("slots") else x
        for name, x in tensors.items()
    }


def _convert_head(path: str, adapter: Adapter) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Converts the head of a PEFT adapter. Returns its tensors and its config block."""
    if not adapter.head:
        return {}, {}
    task_type, names = adapter.config.get("task_type"), set(adapter.head)
    match = next((x for x in _HEADS if x.task == task_type and names == set(x.tensors())), None)
    if match is None:
        forms = "; ".join(f"{head.task} with {', '.join(head.tensors())}" for head in _HEADS)
        raise InputError(
            f"{path} has a head of task_type={brief(task_type)} with {', '.join(sorted(names))}, "
            f"which is not supported; supported: {forms}"
        )
    return _head_tensors(adapter.head, match.layers), match.block


def _head_tensors(
    torch_tensors: Mapping[str, np.ndarray], layers: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Converts linear layers of torch; `layers` are their names in torch and in our head."""
    tensors = {}
    for name, our_name in layers.items():
        # torch's [out, in] -> [in, out]
        kernel = np.ascontiguousarray(torch_tensors[f"{name}.weight"].T)
        tensors[f"head/main/{our_name}/kernel"] = kernel
        tensors[f"head/main/{our_name}/bias"] = torch_tensors[f"{name}.bias"]
    return tensors


def make_peft_arguments(
    scorer: Scorer,
    tensors: Mapping[str, np.ndarray],
    metadata: PromptMetadata,
    peft_type: str | None = None,
) -> dict[str, Any]:
    """Returns the keyword arguments of `convert.peft.write_peft`.

    The head is included if PEFT computes the same scores: for a prefix with BERT's pooler.
    Otherwise PEFT pools a soft token or has another head, and the adapter has only the prompt.

    Raises:
      InputError: for a prompt that PEFT does not support, or not as `peft_type`. PEFT puts soft
        tokens before the input.
    """
    _check_supported(scorer, tensors, metadata)
    base = metadata.backbone
    task_type = _TASK_TYPES.get(base.family)
    method = "soft" if "prompt/slots" in tensors else "prefix"
    if peft_type not in (None, *(types := types_for(method, task_type or "SEQ_CLS"))):
        raise InputError(
            f"--peft-type={brief(peft_type)} does not fit this prompt on "
            f"{with_article(base.family)}; use one of {', '.join(types)}"
        )
    adapter: dict[str, Any] = {
        "base": base.id,
        "revision": base.revision,
        "task_type": task_type,
        "peft_type": peft_type,
        "layers": base.dims.layers,
        "heads": base.dims.heads,
    }
    if "prompt/slots" in tensors:
        if not _are_first(scorer):
            raise InputError(
                f"--peft: PEFT puts soft tokens before the input, and the template "
                f"{metadata.template!r} has them elsewhere; {_USE_EXPORT}"
            )
        return adapter | {"soft": unscaled_soft_tokens(tensors, base.rescale)}
    adapter["prefix"] = tensors["prompt/k"], tensors["prompt/v"]
    if base.family == "bert" and metadata.head.get("pooler") == "checkpoint":
        kernel, bias = (tensors[f"head/main/out/{name}"] for name in ("kernel", "bias"))
        adapter["head"] = {"classifier.weight": kernel.T, "classifier.bias": bias}
    return adapter


def _check_supported(
    scorer: Scorer, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata
) -> None:
    """Raises InputError for a prompt that is not only soft tokens or only a prefix as in PEFT."""
    if tuned_names(tensors):
        raise InputError(
            "--peft: the run tuned weights of the backbone, which an adapter does not contain; "
            "also give --tuned=FOLDER, which writes the tuned backbone"
        )
    base, prompt = metadata.backbone, metadata.prompt
    has_soft, has_prefix = "prompt/slots" in tensors, "prompt/k" in tensors
    is_deep = any(x.startswith("prompt/") and x != "prompt/slots" for x in tensors)
    layers = prompt.get("first"), prompt.get("last")
    problems = {
        "demonstrations": scorer.demos is not None,
        "a prompt that is computed from each text": scorer.model.prompt.reads,
        "trained label rows": "prompt/rows" in tensors,
        f"the prompts of {with_article(base.family.upper())}, except soft tokens of its encoder": (
            _TASK_TYPES.get(base.family) == "SEQ_2_SEQ_LM" and is_deep
        ),
        "soft tokens and a prefix in one adapter": has_soft and is_deep,
        "a run that has no prompt": not has_soft and not has_prefix,
        "a prefix that is not in every layer": has_prefix and layers != (0, base.dims.layers),
        "a prefix that does not shift positions by its length": (
            has_prefix and prompt.get("shift") != prompt.get("length")
        ),
        f"a prefix of {with_article(base.family)}": (
            has_prefix and base.family not in _PREFIX_FAMILIES
        ),
    }
    for problem, has_problem in problems.items():
        if has_problem:
            raise InputError(f"--peft: PEFT does not support {problem}; {_USE_EXPORT}")


def _are_first(scorer: Scorer) -> bool:
    """Returns whether the input starts with all soft tokens, before [CLS] and hard words."""
    count = scorer.model.prompt.num_slots()
    (rows,) = encode_any(scorer)
    return all(np.array_equal(row.slot[:count], np.arange(count)) for row in rows)
