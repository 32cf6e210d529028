"""An exported prompt in PEFT's format scores as ours does; PEFT's soft prompts start ours."""

from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from exports import make_metadata
from reference_peft import peft
from spoil import files
from tiny_run import make_backbone, make_config, predict, read_lines, serve, succeed

from jaxprompt.__main__ import main
from jaxprompt.api.prompts import Prompt
from jaxprompt.api.saving import save_prompt
from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.examples import read_examples
from jaxprompt.build.initial_params import read_soft_tokens
from jaxprompt.build.prompt_artifact import load_prompt_export, read_export
from jaxprompt.build.task import scorer_from_config
from jaxprompt.cli import export
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.peft import read_peft, types_for
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.errors import InputError
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.serving.adapters import make_peft_arguments

# PEFT calls what transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

torch = pytest.importorskip("torch")


def test_peft_scores_an_exported_prefix_as_we_do(capsys, trained, tmp_path, backbone):
    words = [f"--workdir={trained}", f"--output={tmp_path / 'out'}", f"--peft={tmp_path / 'peft'}"]
    succeed(capsys, "export", *words, "--peft-type=CARTRIDGE")
    texts = ["a new hammer was near the saw", "the old wolf with a hare"]
    rows, _ = predict(capsys, trained, *(f"--text={text}" for text in texts))
    base = transformers.BertForSequenceClassification.from_pretrained(backbone, num_labels=3)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    assert model.peft_config["default"].peft_type == "CARTRIDGE"
    tokenizer = transformers.AutoTokenizer.from_pretrained(backbone)
    with torch.no_grad():
        theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(-1)
    ours = [list(row["scores"].values()) for row in rows]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("encoder", ["lstm", "mlp"])
def test_peft_takes_what_p_tuning_computed(encoder, capsys, tmp_path, backbone, data):
    """The encoder is folded away, and what is left scores as the run did."""
    config = make_config(backbone, data, "p_tuning", prompt__encoder=encoder, train__total_steps=1)
    run = serve(capsys, tmp_path, config, data / "test.jsonl")
    words = [f"--workdir={run.workdir}", f"--peft={tmp_path / 'peft'}"]
    succeed(capsys, "export", *words)
    exported, _ = read_export(str(run.workdir / "export"))
    assert {name for name in exported if name.startswith("prompt/")} == {"prompt/slots"}
    base = transformers.BertForSequenceClassification.from_pretrained(backbone, num_labels=3)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    with torch.no_grad():
        vectors = model.get_prompt(batch_size=1)[0].numpy()
    np.testing.assert_array_equal(vectors, exported["prompt/slots"])


def test_a_folder_that_holds_other_files_is_refused_before_anything_is_computed(
    run, backbone, tmp_path, refused, capsys, monkeypatch
):
    place, folder = f"--workdir={run}", tmp_path / "peft"
    for _ in range(2):  # over its own files it may write again
        succeed(capsys, "export", place, f"--peft={folder}")
    (folder / "README.md").write_text("# Mine\n")
    before = [files(folder), files(backbone)]

    def compute(*_):
        raise AssertionError("read before the folder was checked")

    monkeypatch.setattr("jaxprompt.serving.export.pack_run", compute)
    for path in (folder, backbone):
        line = refused("export", place, f"--peft={path}")
        assert line.startswith(f"{path} contains ") and line.endswith("or give another folder")
    assert before == [files(folder), files(backbone)]


# -- a T5 whose embeddings are divided ------------------------------------------------------------

SENTINEL = {"head.name": "verbalizer", "task.template": "{text} about [mask] ."}
SENTINEL |= {"optim.lr": 0.0, "train.total_steps": 1, "prompt.start": "file"}


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return make_backbone(tmp_path_factory.mktemp("t5") / "t5", "t5")


@pytest.fixture(scope="module")
def divided(t5, data, tmp_path_factory):
    """Exports, under rescale=100, soft tokens as large as a T5's own embeddings."""
    folder = tmp_path_factory.mktemp("divided")
    rows = np.random.default_rng(0).normal(0, 9, (4, 32)).astype(np.float32)
    np.save(folder / "rows.npy", rows)
    fields = SENTINEL | {"prompt.file": folder / "rows.npy", "backbone.rescale": 100.0}
    config = folder / "config.json"
    config.write_text(make_config(t5, data, "soft", **fields).to_json())
    place = [f"--config={config}", f"--workdir={folder / 'run'}"]
    assert main(["train", *place]) == 0
    words = [f"--npy={folder / 'soft.npy'}", f"--peft={folder / 'peft'}"]
    assert main(["export", *place, *words]) == 0
    return folder


@pytest.mark.long
def test_soft_tokens_of_a_divided_t5_leave_as_they_came(divided, t5, data, refused):
    """Written for a T5 that nothing divides, and read again by one that is divided."""
    rows = np.load(divided / "rows.npy")
    np.testing.assert_array_max_ulp(np.load(divided / "soft.npy"), rows, maxulp=1)
    np.testing.assert_array_max_ulp(read_peft(divided / "peft").soft, rows, maxulp=1)
    tensors, metadata = read_export(str(divided / "run" / "export"))
    assert metadata.backbone.rescale == 100.0
    np.testing.assert_allclose(tensors["prompt/slots"], rows / 100, rtol=1e-6)
    prompt = SimpleNamespace(length=4, decoder=0, dims=SimpleNamespace(embed=32))
    for source in ("soft.npy", "peft", "run/export"):
        for rescale in (1.0, 100.0):
            again = read_soft_tokens(str(divided / source), prompt, rescale)
            np.testing.assert_allclose(again, rows / rescale, rtol=3e-7)
    # Bare soft tokens are no export.
    config = divided / "wrong.json"
    for path in (divided / "soft.npy", divided / "peft"):
        soft_config = make_config(
            t5, data, "soft", **SENTINEL | {"prompt.start": "vocab"}, prompt__init=path
        )
        config.write_text(soft_config.to_json())
        line = refused("train", f"--config={config}", f"--workdir={divided / 'none'}")
        assert f"prompt.start=file and prompt.file={path}" in line


@pytest.mark.long
def test_peft_scores_a_divided_t5_as_we_do(divided, t5, data):
    """Logits of the whole vocabulary behind the sentinel, of torch and of the export."""
    export, placement = str(divided / "run" / "export"), make_placement(1, 1)
    exported = load_prompt_export(export, backbone=BackboneConfig(), batch=4, placement=placement)
    scorer, params = exported.scorer, exported.params
    rows = read_lines(data / "test.jsonl")[:4]
    examples = [read_example(scorer.task, row, "here", need_label=False) for row in rows]
    encoded = [row for (row,) in scorer.encode(examples).rows]
    batch = scorer.one_batch([[row] for row in encoded])
    bound = scorer.model.backbone.bind({"params": params["backbone"]})
    features = bound.lm_features(scorer.model.hidden(params, batch))
    ours = np.asarray(features @ bound.lm_table()[0].T)  # [B, T, V]
    base = transformers.T5ForConditionalGeneration.from_pretrained(t5)
    model = peft.PeftModel.from_pretrained(base, divided / "peft").eval()
    for row, logits in zip(encoded, ours, strict=True):
        ids, decoder_ids = (torch.tensor(x.ids)[None] for x in (row, row.decoder))
        ids = ids[:, 4:]  # without the places of the soft tokens
        with torch.no_grad():
            inputs = dict(input_ids=ids, decoder_input_ids=decoder_ids)
            theirs = model(**inputs, attention_mask=torch.ones_like(ids)).logits[0].numpy()
            bare = base(**inputs).logits[0].numpy()
        same = logits[: len(theirs), : theirs.shape[1]]
        np.testing.assert_allclose(same, theirs, atol=1e-4, rtol=0)
        assert np.abs(theirs - bare).max() > 0.1  # the prompt matters


# -- where soft tokens stand ----------------------------------------------------------------------

PLACES = {
    ("bert", "{text}"): True,
    ("bert", "[soft] [cls] {text} is [mask]"): True,
    ("bert", "[soft] {text}"): False,  # behind the tokenizer's own [CLS]
    ("bert", "[cls] [soft] {text}"): False,
    ("bert", "[soft*2] [cls] {text} [soft*2]"): False,
    ("t5", "{text} about [mask] ."): True,
    ("t5", "[soft] {text} about [mask] ."): True,
    ("t5", "it is [soft] {text} about [mask] ."): False,
    ("t5", "{text} [soft] [mask]"): False,
    ("t5", "[soft*1] {text} [soft*3] [mask]"): False,
}


@pytest.mark.parametrize("family, template", PLACES)
def test_peft_holds_soft_tokens_in_front_alone(family, template, backbone, t5, data):
    fields = {"task.template": template, "prompt.start": "normal"}
    fields |= {"head.name": "verbalizer" if "[mask]" in template else "linear"}
    config = make_config(t5 if family == "t5" else backbone, data, "soft", **fields)
    opened, examples = open_backbone(config.backbone), read_examples(config, ["train"])
    scorer = scorer_from_config(config, opened, examples, make_placement(1, 1))
    tensors = {"prompt/slots": np.ones((4, 32), np.float32)}
    metadata = make_metadata(
        template=template,
        method="soft",
        backbone={"revision": "v2", "family": family, "dims": scorer.model.prompt.dims._asdict()},
    )
    if PLACES[family, template]:
        actual = make_peft_arguments(scorer, tensors, metadata)
        assert actual["soft"].shape == (4, 32) and actual["revision"] == "v2"
    else:
        with pytest.raises(InputError, match="PEFT puts soft tokens before.*use prompt.safe"):
            make_peft_arguments(scorer, tensors, metadata)


PREFIX = ("prompt/k", "prompt/v")
REFUSED = [
    ("bert", ("prompt/slots", *PREFIX), {}, "soft tokens and a prefix"),
    ("bert", ("prompt/slots", "prompt/rows"), {}, "trained label rows"),
    ("bert", ("prompt/slots", "backbone/embed/word/table"), {}, "tuned weights of the backbone"),
    ("bert", (), {}, "run that has no prompt"),
    ("bert", PREFIX, {"shift": 0}, "does not shift positions"),
    ("bert", PREFIX, {"first": 1}, "not in every layer"),
    ("t5", PREFIX, {}, "prompts of a T5"),
    ("t5", ("prompt/slots", "prompt/decoder_slots"), {}, "prompts of a T5"),
    ("albert", PREFIX, {}, "a prefix of an albert"),
    ("deberta", PREFIX, {}, "a prefix of a deberta"),
]


@pytest.mark.parametrize("family, names, changes, message", REFUSED)
def test_what_peft_cannot_hold_is_refused(family, names, changes, message):
    constant = {"name": "constant", "length": 4, "first": 0, "last": 2, "shift": 4}
    metadata = make_metadata(prompt=constant | changes, backbone={"family": family})
    tensors = dict.fromkeys(names, np.ones((1, 1, 1, 1)))
    with pytest.raises(InputError, match=message):
        make_peft_arguments(stub(), tensors, metadata)


@pytest.mark.parametrize(
    "family, peft_type, fits",
    [
        ("bert", "CARTRIDGE", True),
        ("bert", "PROMPT_TUNING", False),
        ("bert", "LORA", False),
        ("gpt2", "CPT", False),
    ],
)
def test_the_type_of_an_adapter(family, peft_type, fits):
    constant = {"name": "constant", "length": 4, "first": 0, "last": 2, "shift": 4}
    metadata = make_metadata(prompt=constant, backbone={"family": family})
    tensors = dict.fromkeys(PREFIX, np.ones((1, 1, 1, 1)))
    if fits:
        actual = make_peft_arguments(stub(), tensors, metadata, peft_type)
        assert actual["peft_type"] == peft_type
    else:
        with pytest.raises(InputError):
            make_peft_arguments(stub(), tensors, metadata, peft_type)


def test_a_type_is_that_of_a_folder():
    args = SimpleNamespace(peft=None, peft_type="CPT", npy=None, push=None, stablehlo=None)
    with pytest.raises(InputError, match="--peft"):
        export._check_paths(args, "folder")
    args.peft_type = "LORA"
    with pytest.raises(InputError, match="LORA"):
        export._check_paths(args, "folder")
    with pytest.raises(InputError, match="peft_type='CPT'"):
        save_prompt(Prompt({}), "soft.npy", "npy", peft_type="CPT")


def test_types_that_store_soft_tokens():
    """CPT and multi-task prompts run only on some tasks in PEFT."""
    soft = ["PROMPT_TUNING", "P_TUNING", "CPT", "MULTITASK_PROMPT_TUNING"]
    assert types_for("soft", "CAUSAL_LM") == soft
    assert types_for("soft", "SEQ_2_SEQ_LM") == [*soft[:2], soft[3]]
    assert types_for("soft", "FEATURE_EXTRACTION") == soft[:2]
    assert types_for("prefix", "SEQ_CLS") == ["PREFIX_TUNING", "CARTRIDGE"]


def stub(demos=None, reads=False):
    """Makes what is asked of a scorer before its tensors."""
    return SimpleNamespace(demos=demos, model=SimpleNamespace(prompt=SimpleNamespace(reads=reads)))


def test_what_depends_on_the_text_is_no_adapter():
    tensors, metadata = {"prompt/slots": np.ones((4, 32))}, make_metadata(method="ipt")
    with pytest.raises(InputError, match="not support demonstrations"):
        make_peft_arguments(stub(demos=object()), tensors, metadata)
    with pytest.raises(InputError, match="computed from each text"):
        make_peft_arguments(stub(reads=True), tensors, metadata)
