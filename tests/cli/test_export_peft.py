"""An exported prompt in PEFT's format scores as ours does; PEFT's soft prompts start ours."""

import json

import numpy as np
import pytest
from tiny_run import jaxprompt, make_config, read_lines, write_rows

# PEFT calls what transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")


def _train(capsys, tmp_path, backbone, data, **fields):
    c = make_config(backbone, data, **fields)
    config, workdir = tmp_path / "config.json", tmp_path / "run"
    config.write_text(c.to_json())
    given = [f"--config={config}", f"--workdir={workdir}"]
    assert jaxprompt(capsys, "train", *given)[0] == 0
    code, _, err = jaxprompt(capsys, "export", *given, f"--peft={tmp_path / 'peft'}")
    return code, err, workdir


def test_peft_scores_an_exported_prefix_as_we_do(capsys, tmp_path, backbone, data):
    from transformers import AutoTokenizer, BertForSequenceClassification

    code, _, workdir = _train(capsys, tmp_path, backbone, data)
    assert code == 0
    rows = [{"text": "a new hammer was near the saw"}, {"text": "the old wolf with a hare"}]
    inputs = write_rows(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out.jsonl"
    jaxprompt(capsys, "predict", f"--workdir={workdir}", f"--input={inputs}", f"--output={out}")
    ours = np.array([list(line["scores"].values()) for line in read_lines(out)])
    base = BertForSequenceClassification.from_pretrained(backbone, num_labels=3)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**batch).logits.softmax(-1).numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_soft_prompt_goes_to_peft_and_back(capsys, tmp_path, backbone, data):
    code, _, workdir = _train(capsys, tmp_path, backbone, data, method="soft")
    assert code == 0
    card = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (card["peft_type"], card["num_virtual_tokens"]) == ("PROMPT_TUNING", 4)
    start = {"prompt.start": "file", "prompt.file": tmp_path / "peft", "optim.lr": 0.0}
    fields = {name.replace(".", "__"): value for name, value in start.items()}
    c = make_config(backbone, data, "soft", **fields)
    config = tmp_path / "again.json"
    config.write_text(c.to_json())
    given = [f"--config={config}", f"--workdir={tmp_path / 'again'}"]
    assert jaxprompt(capsys, "train", *given)[0] == 0
    for folder in (workdir, tmp_path / "again"):
        config = folder / "config.json"
        npy = folder / "soft.npy"
        jaxprompt(capsys, "export", f"--config={config}", f"--workdir={folder}", f"--npy={npy}")
    assert np.array_equal(np.load(workdir / "soft.npy"), np.load(tmp_path / "again" / "soft.npy"))


def test_a_prefix_that_peft_cannot_hold_is_refused(capsys, tmp_path, backbone, data):
    code, err, _ = _train(capsys, tmp_path, backbone, data, prompt__shift=False)
    assert code == 2
    assert "shifts by 0" in err
    assert not (tmp_path / "peft").exists()
