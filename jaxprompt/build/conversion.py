"""Converts a backbone of any supported format to a folder that transformers loads."""

import hashlib
from pathlib import Path

from jaxprompt.backbones import make_backbone
from jaxprompt.build.backbone import find_family
from jaxprompt.convert.folder import read_config, resolve
from jaxprompt.convert.load import DTYPES, LoadReport, load_backbone
from jaxprompt.convert.save import check_loadable, save_backbone
from jaxprompt.errors import check_known


def convert_backbone(
    path: str, output: str | Path, *, revision: str = "", dtype: str = "float32"
) -> LoadReport:
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
    source_path = resolve(path, revision or None)
    hf = read_config(source_path)
    family = find_family(source_path, hf)
    check_loadable(family, f"use {path} without conversion")
    params, report = load_backbone(source_path, family, hf, dtype=dtype)
    # Raises an error if the config needs weights that the checkpoint does not have.
    make_backbone(family, hf, report.heads)
    source = f"{path}@{revision}" if revision else path
    metadata: dict[str, str | list[str]] = {"source": source, "fingerprint": report.fingerprint}
    if report.unused:
        metadata["unused"] = list(report.unused)
    # The id of the conversion: only the same conversion may replace its folder.
    run_id = hashlib.sha256(f"convert {source} {dtype}".encode()).hexdigest()[:16]
    save_backbone(
        output, family, hf, params, tokenizer=source_path, card=metadata, run=run_id, dtype=dtype
    )
    return report
