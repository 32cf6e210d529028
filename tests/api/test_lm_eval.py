"""The model of the lm-evaluation-harness on tiny backbones, against torch; without the harness."""

import dataclasses
import functools
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from tiny_run import make_backbone

import jaxprompt as jp
from jaxprompt.api import lm_eval as adapter
from jaxprompt.api.lm_eval import HarnessModel, read_generation, rolling_windows
from jaxprompt.data.text.decoding import TextDecoder
from jaxprompt.errors import InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = ["the cat is near a dog", "this bread was very good", "a saw", "old rice with salt soup"]
FAMILIES = {"llama": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns the folder of a family, which is made when it is first asked for."""
    return functools.cache(
        lambda family: str(make_backbone(tmp_path_factory.mktemp(family) / family, family))
    )


@pytest.fixture(scope="module")
def soft(tmp_path_factory):
    """Five soft tokens in a file."""
    path = tmp_path_factory.mktemp("soft") / "soft.npy"
    np.save(path, np.random.default_rng(0).normal(0, 0.3, (5, 32)).astype(np.float32))
    return path


@pytest.fixture(scope="module", params=["llama", "soft", "t5"])
def pair(request, place, soft):
    """A model, and a function (context, continuation) -> logits of torch [T, V]."""
    family = "t5" if request.param == "t5" else "llama"
    prompt = str(soft) if request.param == "soft" else ""
    model = HarnessModel(place(family), prompt, batch_size=3)
    theirs = getattr(transformers, FAMILIES[family]).from_pretrained(place(family)).eval()
    vectors = torch.tensor(np.load(soft)) if prompt else torch.zeros(0, 32)

    def logits(context, continuation):
        ids = torch.tensor([*context, *continuation])
        with torch.no_grad():
            if family == "t5":
                inputs = {"input_ids": torch.tensor([context]), "labels": ids[len(context) :][None]}
                return theirs(**inputs).logits[0]
            inputs = torch.cat([vectors, theirs.get_input_embeddings()(ids)])
            return theirs(inputs_embeds=inputs[None]).logits[0, -len(continuation) - 1 : -1]

    return model, logits


def expected_scores(logits, context, continuation):
    scores, targets = logits(context, continuation).log_softmax(-1), torch.tensor(continuation)
    logp = scores[range(len(targets)), targets].sum().item()
    return logp, bool((scores.argmax(-1) == targets).all())


@pytest.mark.default_cases("soft")
def test_scores_and_texts_equal_those_of_torch(pair):
    model, logits = pair
    contexts = [model.tok_encode(text) for text in TEXTS]
    greedy = []
    for ids in contexts:
        written = []
        while len(written) < 4 and written[-1:] != [model.eot_token_id]:
            written.append(logits(ids, [*written, 0])[-1].argmax().item())
        greedy.append(written)
    pairs = [(ids, tail[:1]) for ids, tail in zip(contexts, greedy, strict=True)]
    pairs += [(ids, [9, 4, 7][:count]) for count, ids in enumerate(contexts, 1) if count < 4]
    actual = model._loglikelihood_tokens([("", *pair) for pair in pairs])
    expected = [expected_scores(logits, *pair) for pair in pairs]
    np.testing.assert_allclose([x for x, _ in actual], [x for x, _ in expected], rtol=1e-4)
    assert [bool(x) for _, x in actual] == [x for _, x in expected]
    assert [x for _, x in expected].count(True) >= len(contexts)

    options = {"until": [], "max_gen_toks": 4}
    texts = model.generate_until([SimpleNamespace(args=(text, options)) for text in TEXTS])
    for text, ids in zip(texts, greedy, strict=True):
        decoded = model.tokenizer.decode(ids, skip_special_tokens=True)
        assert text == decoded.split(model.tokenizer.eos_token)[0]


@pytest.mark.long
def test_a_text_is_scored_in_windows(pair):
    model, logits = pair
    text = "the cat is near a dog " * 8
    short = HarnessModel.__new__(HarnessModel)
    vars(short).update(vars(model))
    short.language_model = dataclasses.replace(model.language_model, max_length=20)
    total = short.loglikelihood_rolling([SimpleNamespace(args=(text,))])[0]
    windows = rolling_windows(short.tok_encode(text), short.prefix_token_id, 20)
    assert len(windows) > 1
    assert total == pytest.approx(sum(expected_scores(logits, *w)[0] for w in windows), rel=1e-4)


@pytest.mark.long
def test_a_text_ends_before_a_stop_string(place):
    """Also before one of several tokens, and in the middle of a token."""
    model = HarnessModel(place("llama"), batch_size=2)
    generate = lambda until: model.generate_until(
        [SimpleNamespace(args=(TEXTS[0], {"until": until, "max_gen_toks": 6}))]
    )[0]
    whole = generate([])
    assert len(whole) > 4
    for stop in (whole[1:3], whole[2:-1], whole[-1]):
        assert generate(stop) == generate([stop, "zzz"]) == whole.split(stop)[0]
    decoder = TextDecoder(model.tokenizer, model.language_model.layout.ends, (whole[1:3],))
    context, options = model.tok_encode(TEXTS[0]), {"max_new_tokens": 40}
    (early,) = model.language_model.generate([context], is_stopped=decoder.is_stopped, **options)
    (full,) = model.language_model.generate([context], **options)
    assert full[: len(early)] == early and len(early) < 20 < len(full) == 40


@pytest.mark.long
def test_an_export_is_a_prompt_with_its_backbone(place, soft, tmp_path):
    task = jp.task("text", target="target", template="{text}")
    backbone = jp.load_backbone(place("llama"))
    lengths = {"max_len": 20, "max_target": 4}
    model = jp.attach(backbone, jp.load_prompt(soft), task=task, head="text", **lengths)
    jp.save_prompt(model.prompt, tmp_path / "export")
    request = [("", [5, 6, 7], [8, 9])]
    by_file = HarnessModel(place("llama"), str(soft))
    by_export = HarnessModel(prompt=str(tmp_path / "export"))
    assert by_export._loglikelihood_tokens(request) == by_file._loglikelihood_tokens(request)
    without = HarnessModel(place("llama"))
    assert without.max_length == by_export.max_length + 5
    assert without._loglikelihood_tokens(request) != by_export._loglikelihood_tokens(request)
    other = make_backbone(tmp_path / "other", "llama", seed=1)
    with pytest.raises(InputError, match="trained on the weights .*force=True"):
        HarnessModel(str(other), str(tmp_path / "export"))


def test_windows_predict_each_token_once():
    """The example in the documentation of the harness."""
    expected = [([9], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert rolling_windows(range(10), 9, 4) == expected
    assert rolling_windows([], 9, 4) == []


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, (256, ())),
        ({"until": "\n", "max_gen_toks": 5, "do_sample": False, "temperature": 1}, (5, ("\n",))),
        (
            {"until": ["a", "b"], "max_tokens": "7", "temperature": 0.0, "top_p": 0.9},
            (7, ("a", "b")),
        ),
        ({"until": None, "max_gen_toks": 3, "max_new_tokens": 9}, (3, ())),
    ],
)
def test_generation_options(options, expected):
    assert read_generation(options) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be at least 1"),
    ],
)
def test_generation_options_that_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        read_generation(options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"device": "cuda:0"}, "backbone is missing"),  # which the harness passes by default
        ({"max_batch_size": 64}, "without max_batch_size"),
        ({"batch_size": "auto"}, "batch_size=auto"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"mesh": "2"}, "mesh='2'"),
        ({"backbone": "x", "dtyp": "float32"}, "dtype"),
        ({"backbone": "llama", "max_length": 67}, "max_length=67 must be at most 66"),
        ({"backbone": "bert"}, "needs a generative backbone"),
    ],
)
def test_arguments_that_are_refused(arguments, message, place):
    if arguments.get("backbone") in ("llama", "bert"):
        arguments = arguments | {"backbone": place(arguments["backbone"])}
    with pytest.raises(InputError, match=message):
        HarnessModel(**arguments)


def test_the_class_of_the_harness(monkeypatch):
    """It is made when it is used, of the harness's base class."""
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
    modules["lm_eval"].__file__ = "lm_eval/__init__.py"
    modules["lm_eval.api.model"].TemplateLM = type("TemplateLM", (), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(vars(adapter), "JaxpromptLM", raising=False)
    made = adapter.JaxpromptLM
    monkeypatch.delitem(vars(adapter), "JaxpromptLM")
    assert made.__mro__[1:3] == (HarnessModel, modules["lm_eval.api.model"].TemplateLM)
    with pytest.raises(AttributeError):
        adapter.Absent  # noqa: B018
