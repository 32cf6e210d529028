"""PPT's cells: what starts from a pre-trained prompt asks and answers as its pre-training did."""

import dataclasses
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from exports import make_metadata
from tiny import CONFIGS, MODEL_HEADS

from configs.parts import ppt as cells
from configs.ppt import has_cell, learning_rates
from jaxprompt.backbones import make_backbone
from jaxprompt.build.examples import Examples, apply_form, read_task
from jaxprompt.build.inheritance import _layout_notes
from jaxprompt.build.task import scorer_from_config
from jaxprompt.config.load import load_config
from jaxprompt.corpus.ppt import get_pattern, make_forms
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.sharding import Target
from jaxprompt.types import Role

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"t5": "t5", "mt5": "t5", "bert": "bert", "roberta": "roberta", "gpt2": "gpt2"}
KINDS = {"t5": "t5", "gpt2": "causal"}
STARTED = ("ppt", "hybrid_ppt", "unified_ppt")
OPTIONS = ("Away it went", "It was a cat", "Nowhere at all", "In the house")
CHARACTERS = "矛盾中立相似差不好一般赞二三四五六七八九十答案是为？。、；：，问题这很它在哪里外面"


def chinese_bert():
    """A BERT's tokenizer of single characters, as all that are trained on Chinese."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS]
    return BertTokenizer(vocab={word: i for i, word in enumerate(words)})


def chinese_t5():
    """A SentencePiece tokenizer like mT5's: a word behind a space is another token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [w for task in ("nsp", "unified", "cls") for w in get_pattern(task, "zh").words]
    vocab_words = dict.fromkeys([*CHARACTERS, *words, *(f"▁{w}" for w in words), "▁"])
    vocab = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((w, -float(len(w) < 2)) for w in vocab_words),
    ]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    sentinels = [f"<extra_id_{i}>" for i in range(3)]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=sentinels,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(request):
    """Makes (name of a tokenizer, whether for Chinese) -> it."""
    by_family = {("bert", True): chinese_bert(), ("mt5", True): chinese_t5()}

    def give(name, is_chinese):
        if name == "gpt2":
            return request.getfixturevalue(name)
        if (name, is_chinese) not in by_family:
            folder = {"bert": "bert-uncased"}.get(name, name)
            shared = request.getfixturevalue("shared")
            by_family[name, is_chinese] = load_tokenizer(shared / "tokenizers" / folder)
        return by_family[name, is_chinese]

    return give


def example_of(task):
    """Makes an example with as many choices as a task has names for."""
    options = OPTIONS[: len(task.labels)] if task.choices else ()
    return Example(dict.fromkeys(task.fields, "a"), task.options or options)


def open_cell(task, method, name, tokenizer, patterns=""):
    """Builds the scorer of a cell. -> config, scorer"""
    kind = KINDS.get(FAMILIES[name], "masked")
    overrides = (("ppt.patterns", patterns),) if patterns else ()
    config = load_config(f"{ROOT}/configs/ppt/cells.py:{task},{method},{kind}", overrides)
    family = FAMILIES[name]
    places = dict.fromkeys(("max_position_embeddings", "n_positions"), 1024)
    module = make_backbone(
        family, CONFIGS[family] | {"vocab_size": len(tokenizer)} | places,
        MODEL_HEADS.get(family, ("mlm",)),
    )  # fmt: skip
    formed_task = apply_form(config, read_task(config.task))
    example = example_of(formed_task)
    backbone = Backbone(config.backbone, Path("x"), family, {}, module, tokenizer)
    one = types.SimpleNamespace(batch_part=lambda: (0, 1), target=Target("cpu"))
    return config, scorer_from_config(
        config,
        backbone,
        Examples(formed_task, max(len(example.choices), 1), {"train": [example]}),
        one,
    )


def forms_of(config, scorer, options=(0,)):
    """Lays the pre-training task out whose prompt a cell starts from."""
    name, module = config.prompt.get("init").rpartition("/")[2], scorer.model.backbone
    style, slots = module.STYLE, scorer.model.prompt.num_slots()
    start = module.cfg.start if style == "seq2seq" else 0
    return name, make_forms(
        get_pattern(name, config.ppt.patterns), scorer.tokenizer, style, num_slots=slots,
        max_len=config.data.max_len, options=options, start=start,
        num_types=module.cfg.types, eos=False, sentinel=config.backbone.sentinel,
    )  # fmt: skip


def is_chinese(task):
    return cells.TASKS[task].patterns == "zh"


CELLS = [
    (task, method, name)
    for task in cells.TASKS
    for method in STARTED
    for name in (("mt5", "bert") if is_chinese(task) else ("t5", "bert", "roberta", "gpt2"))
    if has_cell(method, task)
]


@pytest.mark.default_cases("sst2-*", "cb-*", "race_high-*")
@pytest.mark.parametrize(("task", "method", "name"), CELLS)
def test_answers_are_tokens_of_pre_training(tokenizers, task, method, name):
    styles = ("en_end",) if name == "gpt2" else ("en", "en_paper")
    for patterns in ("zh",) if is_chinese(task) else styles:
        config, scorer = open_cell(task, method, name, tokenizers(name, is_chinese(task)), patterns)
        selects = method == "unified_ppt" or not cells.TASKS[task].words
        _, forms = forms_of(config, scorer, options=(4,) if selects else (0,))
        answers = {
            word: ids[ids >= 0].tolist()
            for (word,), ids in zip(forms.verbalizer.words, forms.verbalizer.ids[:, 0], strict=True)
        }
        verbalizer = scorer.verbalizer
        for (word,), ids in zip(verbalizer.words, verbalizer.ids[:, 0], strict=True):
            assert ids[ids >= 0].tolist() == answers[word]
        if selects:  # the names of as many options, in the order of the options' classes
            assert {word for (word,) in verbalizer.words} == set(
                list(answers)[: len(verbalizer.words)]
            )
            (row,) = scorer.encoder.encode(example_of(scorer.task))
            fixed = row.ids[row.roles == Role.HARD].tolist()
            for (word,) in verbalizer.words:
                ids = answers[word]
                assert any(fixed[i : i + len(ids)] == ids for i in range(len(fixed)))


TEXTS = {"first": "The cat sat .", "second": "It slept all day .", "text": "A fine film, it was!"}
PLAIN = [t for t, cell in cells.TASKS.items() if cell.words and not cell.topics]


@pytest.mark.parametrize(
    ("name", "patterns"),
    [(name, style) for name in ("t5", "bert", "roberta") for style in ("en", "en_paper")]
    + [("gpt2", "en_end")],
)
@pytest.mark.parametrize("task", [task for task in PLAIN if not is_chinese(task)])
def test_rows_are_those_of_pre_training(tokenizers, name, task, patterns):
    """Token for token, so that ppt.patterns reaches what is asked downstream."""
    config, scorer = open_cell(task, "ppt", name, tokenizers(name, False), patterns)
    group, forms = forms_of(config, scorer)
    texts = {"cls": ["text"], "nsp": ["first", "second"]}[group]
    pieces = encode_texts(scorer.tokenizer, [f" {TEXTS[text]}" for text in texts])
    filled = forms.forms[0].fill(dict(zip(texts, map(np.array, pieces), strict=True)))
    fields = dict.fromkeys(scorer.task.fields, "")
    for field, text in zip(cells.TASKS[task].texts, texts, strict=True):
        fields[field] = TEXTS[text]
    (row,) = scorer.encoder.encode(Example(fields))
    np.testing.assert_array_equal(row.ids, filled.ids)
    np.testing.assert_array_equal(row.slot, filled.slot)


def test_chinese_rows_are_those_of_pre_training(tokenizers):
    """As many masks stand in a row as in pre-training, where some words have two characters."""
    for task, text in (
        ("chnsenticorp", "它在哪里。[MASK][MASK]。"), ("lcqmc", "它在哪里[MASK][MASK]。它在哪里"),
        ("ccpm", "它在哪里？一、外面。二、它。答案是[MASK]。"),
    ):  # fmt: skip
        for method in ("ppt", "pt"):
            _, scorer = open_cell(task, method, "bert", tokenizers("bert", True))
            example = Example(dict.fromkeys(scorer.task.fields, "它在哪里"), ("外面", "它"))
            (row,) = scorer.encoder.encode(example)
            shown = scorer.tokenizer.convert_ids_to_tokens(row.ids[row.slot < 0].tolist())
            assert "".join(shown) == f"[CLS]{text}[SEP]"


HARD = {  # appendix D, and the query of a reading task
    ("sst2", "en"): "{sentence}. It was [mask].",
    ("sst5", "en_paper"): "{text}. It was [mask].",
    ("cb", "en"): "Question: {hypothesis}? [mask]. {premise}",
    ("boolq", "en_paper"): "Question: {question}? [mask]. {passage}",
    ("race_middle", "en"): "We ask {article}; {question|whole}?{choices} The answer is [mask].",
    ("chnsenticorp", "zh"): "{text}。这很[mask]。",
    ("lcqmc", "zh"): "问题：{sentence1}？[mask]。 {sentence2}",
    ("ccpm", "zh"): "问题：{translation}？{choices}答案是：[mask]。",
    ("sst2", "en_end"): "{sentence}. It was [mask]",
    ("boolq", "en_end"): "Question: {question}? {passage}. [mask]",
    ("ccpm", "zh_end"): "问题：{translation}？{choices}答案是：[mask]",
}


@pytest.mark.parametrize("method", ["hybrid_pt", "hybrid_ppt", "full"])
@pytest.mark.parametrize(("cell", "template"), HARD.items())
def test_hard_prompts_are_those_of_appendix_d(cell, template, method):
    task, patterns = cell
    path = f"{ROOT}/configs/ppt/cells.py:{task},{method},t5"
    config = load_config(path, (("ppt.patterns", patterns),))
    formed_task = apply_form(config, read_task(config.task))
    assert formed_task.template == f" {template}"
    assert (
        formed_task.option == get_pattern("nss" if formed_task.choices else "cls", patterns).option
    )


@pytest.mark.parametrize("task", ["yahoo_answers_topics", "tnews"])
@pytest.mark.parametrize("method", ["ppt", "hybrid_ppt"])
def test_topics_start_from_no_prompt_but_the_unified_one(task, method):
    with pytest.raises(InputError, match="has topics as label words, .*unified_ppt"):
        load_config(f"{ROOT}/configs/ppt/cells.py:{task},{method},t5", ())
    config = load_config(f"{ROOT}/configs/ppt/cells.py:{task},hybrid_pt,t5", ())
    assert "[mask]" in apply_form(config, read_task(config.task)).template
    config = load_config(f"{ROOT}/configs/ppt/cells.py:{task},hybrid_pt,causal", ())
    assert config.task.template.endswith("[mask]")


def test_learning_rates_of_full_fine_tuning():
    """Appendix C.1, table 2; of other backbones none is published."""
    rates = {
        "google/t5-v1_1-small": (2e-4, 5e-4, 1e-3), "models/mt5-base": (2e-4, 5e-4, 1e-3),
        "google/t5-v1_1-large": (5e-5, 1e-4, 2e-4), "google/t5-v1_1-xl": (3e-5, 5e-5, 1e-4),
        "google/mt5-xxl": (3e-6, 5e-6, 1e-5), "bert-large": cells.RATES["full"],
        "runs/mlm/backbone": cells.RATES["full"],
    }  # fmt: skip
    assert {path: learning_rates("full", path) for path in rates} == rates
    assert learning_rates("ppt", "google/mt5-xxl") == (5e-3, 1e-2, 2e-2, 5e-2)
    assert load_config(f"{ROOT}/configs/ppt/t5_large.py:cb,full", ()).optim.lr == 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task.form": "nsp"}, r"needs 2 texts, but task sst2 has 1 \(sentence\); list 2 in"),
        (
            {"task.form": "cls", "task.template": "{sentence} [mask]"},
            "whose layout is in ppt.patterns",
        ),
        ({"task.form": "unified", "ppt.hard": "True"}, "not available for unified, only for nsp"),
        ({"task.form": "cloze", "ppt.hard": "True"}, "but task.form=cloze has none; set task.form"),
        ({"task.form": "cls", "head.name": "linear"}, "head.name=linear does not use"),
        ({"task.form": "cls", "task.name": "dream", "task.words": ""}, "task dream has choices"),
    ],
)
def test_forms_that_do_not_fit(fields, message):
    config = load_config(f"{ROOT}/configs/ppt/cells.py:sst2,pt,t5", tuple(fields.items()))
    with pytest.raises(InputError, match=message):
        apply_form(config, read_task(config.task))


def test_what_is_asked_otherwise_than_in_pre_training_is_told():
    """With an end-of-text token behind it the prompt stands where it was not learned."""
    metadata = make_metadata(layout={"eos": False}, pretrained={"task": "nsp", "patterns": "en"})
    config = load_config("base", [("task.form", "nsp"), ("ppt.patterns", "en_paper")])
    notes = partial(_layout_notes, has_decoder=False)
    assert notes(config, metadata) == [
        "  it was pre-trained with ppt.patterns=en, but this run has en_paper",
        "  it was pre-trained with task.eos=False, but this run has True",
    ]
    same = load_config("base", [("task.form", "nsp"), ("task.eos", "False")])
    assert same.ppt.patterns == "en" and notes(same, metadata) == []
    assert notes(config, make_metadata(layout={"eos": False})) == []  # it was not pre-trained
    assert (
        notes(config, dataclasses.replace(metadata, pretrained={"task": "topics"})) == []
    )  # nor by a task of PPT
    other, as_cloze = (load_config("base", [("task.form", form)]) for form in ("cls", "cloze"))
    eos = "  it was pre-trained with task.eos=False, but this run has True"
    form = "  it was pre-trained with ppt.task=nsp, but this run has task.form="
    assert notes(other, metadata) == [f"{form}cls", eos]
    assert notes(as_cloze, metadata) == [f"{form}cloze"]
    assert _layout_notes(as_cloze, metadata, has_decoder=True) == [f"{form}cloze", eos]
