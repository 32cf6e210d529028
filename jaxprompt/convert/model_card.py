"""The README.md beside a prompt: what it is for, how good it is, and the lines that use it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprompt.convert import artifact, peft
from jaxprompt.data.tasks.task import BINARY_METRICS
from jaxprompt.errors import InputError
from jaxprompt.files import check_others, make_folder, read_json, user_path, write_atomic

README = "README.md"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TAGS = "tags: [prompt-tuning, jaxprompt]"  # the line that tells a card of ours
_AUTO = {
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


def write_model_card(folder: str | Path, card: Mapping[str, Any], name: str = "") -> Path:
    """Writes the README.md of an export. `name` is its place, "hub:owner/name" or a folder."""
    place = name or str(folder)
    code = [
        "import jaxprompt as jp",
        "",
        f"backbone = jp.load_backbone({_backbone_of(card['backbone'])})",
        f"model = jp.attach(backbone, jp.load_prompt({place!r}))",
        f"print(jp.predict(model, [{_row_of(card['task'])!r}]))",
    ]
    return _write(folder, card, "jaxprompt", code)


def check_card(folder: str | Path) -> None:
    """Raises InputError where the README.md of a folder is not one of an export."""
    path = Path(folder) / README
    if path.exists() and not _is_ours(path):
        raise InputError(
            f"{path} was not written by an export, and a push writes its own there; move it, or "
            "give another folder"
        )


def check_peft_folder(folder: str | Path, output: str | Path, beside: str | None = None) -> None:
    """Raises InputError where a PEFT folder would stand among what this export does not write.

    `output` is the folder of the prompt, `beside` another file that the same export writes; both
    may be the PEFT folder's, and stand there from the last time.

    An adapter of PEFT's own has the same files: the README.md beside it tells whose it is.
    """
    folder = Path(folder)
    known = set()
    if Path(output).resolve() == folder.resolve():
        known |= {artifact.TENSORS, artifact.CARD}
    if beside and Path(beside).parent.resolve() == folder.resolve():
        known.add(Path(beside).name)
    if _is_ours(folder / README):
        known |= {README, *peft.FILES}
    check_others(folder, known, "export of an adapter")


def _is_ours(readme: Path) -> bool:
    try:
        return _TAGS in readme.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return False


def write_peft_card(folder: str | Path, card: Mapping[str, Any], outputs: int = 0) -> Path:
    """Writes the README.md of a PEFT folder, with the labels where it has a head.

    PEFT makes the base model anew and is told how many labels it has: `outputs` of the head, where
    the task names none.
    """
    task_type = read_json(Path(folder) / "adapter_config.json", "a PEFT folder")["task_type"]
    auto, labels = _AUTO[task_type], card["task"]["labels"]
    given = f", id2label={dict(enumerate(labels))!r}" if labels else f", num_labels={outputs}"
    given = given if task_type == "SEQ_CLS" else ""
    known = card["backbone"]["id"]
    if not (known.startswith("pkg:") or known.endswith(".gguf")):
        call = f"{auto}.from_pretrained({str(folder)!r}{given})"
        return _write(folder, card, "peft", [f"from peft import {auto}", "", f"model = {call}"])
    # What transformers does not find by this name has to be a folder first.
    plain = auto.replace("Peft", "").replace("ForFeatureExtraction", "")
    of_hub = f" --revision={revision}" if (revision := card["backbone"].get("revision")) else ""
    code = [
        f"# python -m jaxprompt convert --backbone={known}{of_hub} --output=base",
        "from peft import PeftModel", f"from transformers import {plain}", "",
        f'base = {plain}.from_pretrained("base"{given})',
        f"model = PeftModel.from_pretrained(base, {str(folder)!r})",
    ]  # fmt: skip
    return _write(folder, card, "peft", code)


def is_hub_id(name: str) -> bool:
    """Tells whether the id of a backbone is a name on the hub: no folder, file or package."""
    is_other = name.startswith("pkg:") or name.endswith(".gguf") or os.path.exists(user_path(name))
    return _HUB_ID.fullmatch(name) is not None and not is_other


def _backbone_of(known: Mapping[str, Any]) -> str:
    """Writes the arguments of `load_backbone`: the id, and what is not as by default."""
    usual = {"revision": "", "rescale": 1.0, "quantize": "none"}
    more = (f", {n}={known[n]!r}" for n, x in usual.items() if (known.get(n) or x) != x)
    return repr(known["id"]) + "".join(more)


def _row_of(task: Mapping[str, Any]) -> str | dict[str, Any]:
    """Makes up a row that has the columns of a task; of one column it is its text."""
    fields, choices = task.get("fields", ()), task.get("choices", ())
    if len(fields) < 2 and not choices:
        return "a text"
    derived = task.get("derive", {})
    row: dict[str, Any] = {field: "a text" for field in fields if field not in derived}
    # Such a field has a column of few values.
    row |= {column: next(iter(texts)) for column, texts in derived.values()}
    if len(choices) == 1:
        return row | {choices[0]: ["a choice", "another one"]}
    return row | {name: f"choice {i}" for i, name in enumerate(choices, 1)}


def _write(folder: str | Path, card: Mapping[str, Any], library: str, code: list[str]) -> Path:
    task, known = card["task"], card["backbone"]
    scores = [
        f"| {split} | {name} | {value:.4f} |"
        for split, values in card["metrics"].items()
        # A run without a test split has null there.
        for name, value in (values or {}).items()
        if isinstance(value, int | float)
    ]
    # The hub refuses a card whose base model is no name of its own.
    base = [f"base_model: {known['id']}"] if is_hub_id(known["id"]) else []
    lines = [
        "---", *base, f"library_name: {library}",
        _TAGS, "---", "",
        f"# A {card['method']} prompt for {task['name']}", "",
        f"It was learned for the model `{known['id']}`, weights "
        f"`{known['fingerprint'][:12]}`, with seed {card['seed']}. Its template is "
        f"`{card['template']}`.", "",
    ]  # fmt: skip
    if library == "peft" and known.get("quantize", "none") != "none":
        lines += [
            f"It was learned on {known['quantize']} codes of these weights, and PEFT multiplies "
            "the weights themselves: scores differ a little.", "",
        ]  # fmt: skip
    if task["labels"]:
        lines += [f"Labels: {', '.join(task['labels'])}.", ""]
    if task.get("metric") in BINARY_METRICS and task.get("positive"):
        lines += [f"The positive class of `{task['metric']}` is {task['positive']}.", ""]
    if scores:
        lines += ["| split | metric | value |", "|---|---|---|", *scores, ""]
    lines += ["```python", *code, "```", ""]
    path = make_folder(folder) / README
    write_atomic(path, "\n".join(lines))
    return path
