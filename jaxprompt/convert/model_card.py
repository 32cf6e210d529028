"""Model cards (README.md) of prompts, PEFT folders and saved backbones."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert import artifact, peft
from jaxprompt.convert.folder import is_hub_id
from jaxprompt.convert.prompt_metadata import BackboneMetadata, PromptMetadata
from jaxprompt.data.tasks.task import BINARY_METRICS, Task
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.errors import InputError, escape
from jaxprompt.files import check_foreign_files, make_folder, read_json, user_path, write_atomic

README = "README.md"
# Characters with a meaning in Markdown; an underscore within a word has none.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&#$]|(?<![^\W_])_|_(?![^\W_])")
_TAGS = ["prompt-tuning", "jaxprompt"]
# They identify our model cards; the second form is that of earlier versions.
_TAG_LINES = ("tags:\n- prompt-tuning\n- jaxprompt\n", "tags: [prompt-tuning, jaxprompt]\n")
_PEFT_CLASSES = {
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}
# The Hub's name of the task, by the kind of answers.
_PIPELINES = {
    "classes": "text-classification", "texts": "text-generation", "spans": "question-answering",
    "tags": "token-classification", "numbers": "text-classification",
}  # fmt: skip


def write_model_card(folder: str | Path, metadata: PromptMetadata, name: str = "") -> Path:
    """Writes the README.md of an export; `name` is its place, "hub:owner/name" or a folder."""
    place = name or str(folder)
    code = [
        "import jaxprompt as jp",
        "",
        f"backbone = jp.load_backbone({_backbone_args(metadata.backbone)})",
        f"model = jp.attach(backbone, jp.load_prompt({place!r}))",
        f"print(jp.predict(model, [{_sample_input(metadata.task)!r}]))",
    ]
    return _write(folder, metadata, "jaxprompt", code)


def check_model_card(folder: str | Path) -> None:
    """Raises InputError if the README.md of a folder is not the model card of an export."""
    path = Path(folder) / README
    if path.exists() and not _is_ours(path):
        raise InputError(
            f"{path} was not written by an export, and an upload would overwrite it; move it, or "
            "use another folder"
        )


def check_peft_folder(folder: str | Path, output: str | Path, beside: str | None = None) -> None:
    """Raises InputError if a PEFT folder contains files that this export does not write.

    An adapter that PEFT itself wrote has the same files; the README.md tells them apart.

    Args:
      folder: the PEFT folder.
      output: the folder of the prompt, which may be the same.
      beside: another file of the same export, which may be in the same folder from an earlier
        export.
    """
    folder = Path(folder)
    expected = set()
    if Path(output).resolve() == folder.resolve():
        expected |= {artifact.TENSORS, artifact.METADATA}
    if beside and Path(beside).parent.resolve() == folder.resolve():
        expected.add(Path(beside).name)
    if _is_ours(folder / README):
        expected |= {README, *peft.FILES}
    check_foreign_files(folder, expected, "export of an adapter")


def _is_ours(readme: Path) -> bool:
    try:
        text = readme.read_text("utf-8", errors="replace")
    except OSError:
        return False
    return any(tags in text for tags in _TAG_LINES)


def write_peft_card(folder: str | Path, metadata: PromptMetadata, outputs: int = 0) -> Path:
    """Writes the README.md of a PEFT folder, with the labels if it has a head.

    The code in it creates the base model, which needs the number of labels: `outputs` of the head
    if the task does not name them.
    """
    task_type = read_json(Path(folder) / "adapter_config.json", "a PEFT folder")["task_type"]
    peft_class, labels = _PEFT_CLASSES[task_type], metadata.task.labels
    label_args = ""
    if task_type == "SEQ_CLS":
        id2label = dict(enumerate(labels))
        label_args = f", id2label={id2label!r}" if labels else f", num_labels={outputs}"
    backbone = metadata.backbone
    if not (backbone.id.startswith("pkg:") or backbone.id.endswith(".gguf")):
        call = f"{peft_class}.from_pretrained({str(folder)!r}{label_args})"
        code = [f"from peft import {peft_class}", "", f"model = {call}"]
        return _write(folder, metadata, "peft", code)
    # transformers cannot load packages and GGUF files, so they are converted to a folder first.
    base_class = peft_class.replace("Peft", "").replace("ForFeatureExtraction", "")
    source = [f"--backbone={backbone.id}"]
    source += [f"--revision={backbone.revision}"] if backbone.revision else []
    command = shlex.join(["python", "-m", "jaxprompt", "convert", *source, "--output=base"])
    code = [
        f"# {' '.join(command.splitlines())}",
        "from peft import PeftModel",
        f"from transformers import {base_class}",
        "",
        f'base = {base_class}.from_pretrained("base"{label_args})',
        f"model = PeftModel.from_pretrained(base, {str(folder)!r})",
    ]
    return _write(folder, metadata, "peft", code)


def _is_on_hub(name: str) -> bool:
    """Returns whether the id of a backbone is a Hub id, not a folder, file or package."""
    return is_hub_id(name) and not (is_gguf(name) or os.path.exists(user_path(name)))


def _backbone_args(backbone: BackboneMetadata) -> str:
    """Returns the arguments of `load_backbone`: the id, and all that differ from the defaults."""
    default = BackboneConfig()
    names = ("revision", "rescale", "quantize")
    values = ((name, getattr(backbone, name)) for name in names)
    keywords = (f", {name}={x!r}" for name, x in values if x != getattr(default, name))
    return repr(backbone.id) + "".join(keywords)


def _sample_input(task: Task) -> str | dict[str, str | list[str]]:
    """Returns a sample input with the columns of a task; a string if there is only one column."""
    if len(task.fields) < 2 and not task.choices:
        return "a text"
    columns = task.input_columns
    row: dict[str, str | list[str]] = {x: "a text" for x in columns if x not in task.derive}
    # A derived field is computed from a column with few values.
    row |= {column: next(iter(texts)) for column, texts in task.derive.values()}
    if len(task.choices) == 1:
        return row | {task.choices[0]: ["a choice", "another one"]}
    return row | {name: f"choice {i}" for i, name in enumerate(task.choices, 1)}


def _write(path: str | Path, metadata: PromptMetadata, library: str, code: list[str]) -> Path:
    from huggingface_hub import EvalResult

    task, backbone = metadata.task, metadata.backbone
    pipeline = _PIPELINES[task.kind]
    scores = [
        EvalResult(pipeline, task.hub or task.name, task.name, name, value, dataset_split=split)
        for split, values in metadata.metrics.items()
        # null without a test split
        for name, value in (values or {}).items()
        if isinstance(value, int | float)
    ]
    title = f"A {metadata.method} prompt for {task.name}"
    lines = [
        f"# {escape_markdown(title)}", "",
        f"It was trained for the model {_code(backbone.id)}, weights "
        f"`{backbone.fingerprint[:12]}`, with seed {metadata.seed}. Its template is "
        f"{_code(metadata.template)}.", "",
    ]  # fmt: skip
    if library == "peft" and backbone.quantize != "none":
        lines += [
            f"It was trained on the weights with {backbone.quantize} quantisation, and PEFT uses "
            "the unquantised weights: scores differ slightly.", "",
        ]  # fmt: skip
    if task.labels:
        lines += [f"Labels: {', '.join(map(escape_markdown, task.labels))}.", ""]
    if task.metric in BINARY_METRICS and task.positive:
        lines += [f"The positive class of `{task.metric}` is {escape_markdown(task.positive)}.", ""]
    if scores:
        table = [f"| {x.dataset_split} | {x.metric_type} | {x.metric_value:.4f} |" for x in scores]
        lines += ["| split | metric | value |", "|---|---|---|", *table, ""]
    lines += ["```python", *code, "```", ""]
    # No language and no license: the first is not known, and the second is the author's choice.
    card = _render(
        lines,
        # The Hub refuses a card whose base model is not a Hub id.
        base_model=backbone.id if _is_on_hub(backbone.id) else None,
        datasets=[task.hub] if task.hub else None,
        eval_results=scores or None,
        library_name=library,
        model_name=title,
        pipeline_tag=pipeline,
        tags=_TAGS,
    )
    readme = make_folder(path) / README
    write_atomic(readme, card)
    return readme


def render_backbone_card(title: str, architecture: str, card: Mapping[str, Any]) -> str:
    """Renders the model card of a saved backbone: its origin and its scores.

    Args:
      title: the heading.
      architecture: the class of transformers.
      card: plain JSON; mappings become tables, lists become items. It names the task that the
        backbone was tuned for, the source that it was converted from, or the corpus.
    """
    verbs = {"task": "tuned", "source": "converted", "corpus": "pre-trained"}
    verb = next(verb for field, verb in verbs.items() if field in card)
    lines = [f"# {escape_markdown(title)}", ""]
    lines += [f"`{architecture}`, {verb} with jaxprompt.", ""]
    scalars = {name: value for name, value in card.items() if not isinstance(value, Mapping | list)}
    lines += _table(scalars)
    for name, value in card.items():
        if isinstance(value, list):
            lines += [
                f"## {escape_markdown(name)}",
                "",
                *(f"- {_cell(part)}" for part in value),
                "",
            ]
        elif isinstance(value, Mapping):
            lines += [f"## {escape_markdown(name)}", "", *_table(value)]
    return _render(lines, library_name="transformers", tags=["jaxprompt"])


def _render(lines: Sequence[str], **fields: Any) -> str:
    """Returns a model card: the YAML that the Hub reads, and lines of Markdown."""
    from huggingface_hub import ModelCard, ModelCardData

    text = f"---\n{ModelCardData(**fields).to_yaml()}\n---\n\n" + "\n".join(lines)
    return str(ModelCard(text))  # which parses the YAML again


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in _leaves(values)]
    return ["| | |", "|---|---|", *rows, ""] if rows else []


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else escape_markdown(str(value))


def escape_markdown(text: str) -> str:
    """Returns text as one line of Markdown, in which no character has a meaning of its own."""
    return _MARKUP.sub(r"\\\g<0>", escape(" ".join(text.split())))


def _code(text: str) -> str:
    """Returns text as code in a line of Markdown."""
    text = escape(" ".join(text.splitlines()))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
