"""Converts a backbone of any supported format to a folder that transformers loads."""

import hashlib
from pathlib import Path

from jaxprompt.backbones import families, make_backbone
from jaxprompt.build.backbone import family_of
from jaxprompt.convert.folder import read_config, resolve
from jaxprompt.convert.load import DTYPES, Report, load_backbone
from jaxprompt.convert.save import check_loadable, save_backbone
from jaxprompt.errors import InputError, brief, check_known


def convert_backbone(
    path: str, output: str | Path, *, revision: str = "", dtype: str = "float32"
) -> Report:
    """Converts a backbone.

    Args:
      path: a folder, a Hub id, a GGUF file or pkg:PACKAGE/FOLDER.
      output: the folder to write; a folder that the same conversion wrote is replaced.
      revision: the Hub revision.
      dtype: the dtype of the written weights, "float32" or "bfloat16".

    Returns:
      A report on the weights; those listed as `unused` are not written.

    Raises:
      InputError: if the weights cannot be read, or `output` contains anything else.
    """
    check_known("--dtype", dtype, DTYPES)
    where = resolve(path, revision or None)
    hf = read_config(where)
    kind = hf.get("model_type", "")
    family = family_of(kind) if isinstance(kind, str) else ""
    known = ", ".join(families())
    if not kind:
        raise InputError(f"{where}: the config has no model_type; add one of {known}")
    if family not in families():
        raise InputError(
            f"{where} contains a model of type {brief(kind)}, which is not supported; known: "
            f"{known}"
        )
    check_loadable(family, f"use {path} without conversion")
    params, report = load_backbone(where, family, hf, dtype=dtype)
    # For what its family refuses: a config that asks for what is not there.
    make_backbone(family, hf, report.heads)
    source = f"{path}@{revision}" if revision else path
    card: dict[str, str | list[str]] = {"source": source, "fingerprint": report.fingerprint}
    if report.unused:
        card["unused"] = list(report.unused)
    # Named by what it converts: the same conversion may replace its folder, another may not.
    run = hashlib.sha256(f"convert {source} {dtype}".encode()).hexdigest()[:16]
    save_backbone(output, family, hf, params, tokenizer=where, card=card, run=run, dtype=dtype)
    return report
