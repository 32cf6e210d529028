"""Every config file builds at tiny width, and base.py has every field that there is."""

import functools
import inspect
from itertools import cycle, groupby

import jax
import pytest
from tiny_run import ROOT, WORDS, entities_of, make_backbone, with_part, write_rows

from jaxprompt import rng
from jaxprompt.build.backbone import load_weights
from jaxprompt.build.check import check_config
from jaxprompt.build.examples import read_examples
from jaxprompt.build.initial_params import init_params
from jaxprompt.build.notes import ineffective_field_notes
from jaxprompt.build.optimizer import build_optimizer, make_milestones
from jaxprompt.build.placement import build_placement
from jaxprompt.build.task import (
    build_objectives,
    open_checked_backbone,
    scorer_from_config,
    train_batches,
)
from jaxprompt.config.block import declared_leaves
from jaxprompt.config.files import load_module
from jaxprompt.config.load import load_config
from jaxprompt.config.open_blocks import OPEN, block_names, declared_fields
from jaxprompt.config.reference import write_page
from jaxprompt.config.run import RunConfig
from jaxprompt.data.tasks.registry import custom_task, get_task, task_names
from jaxprompt.errors import InputError
from jaxprompt.runs.restore import is_zero_shot
from jaxprompt.training import steps
from jaxprompt.training.optim import decay_mask
from jaxprompt.training.state import make_state

CONFIGS = ROOT / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*.py") if path.stem != "__init__")
PAPERS = ("dart", "dpt", "ipt", "p_tuning", "ppt", "ptuning_v2")  # in random order
RUNNABLE = [path for path in FILES if path.parent.name != "parts"]


def name_of(path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


def arguments(path) -> list[str]:
    """Lists the arguments that a config's own sweep gives, "" = none."""
    module = load_module(str(path))
    runs = module.sweep() if hasattr(module, "sweep") else []
    return ["", *dict.fromkeys(run["config"] for run in runs if run.get("config"))]


RUNS = [(path, argument) for path in RUNNABLE for argument in arguments(path)]
# Of each file the first arguments; the others differ in a word.
LOADS = [
    pytest.param(
        path, argument, id=f"{name_of(path)}-{argument}", marks=[pytest.mark.long] * (n > 5)
    )
    for path in RUNNABLE
    for n, argument in enumerate(arguments(path))
]


def load(path, argument=""):
    return load_config(f"{path}:{argument}" if argument else str(path))


@pytest.mark.parametrize("path, argument", LOADS)
def test_it_is_a_config_and_its_json_the_same(path, argument, tmp_path):
    config = load(path, argument)
    if not config.backbone.path:  # some name none: it is given by hand
        config = config.replace({"backbone.path": "somewhere"})
    check_config(config)
    is_random = path.parent.name in PAPERS and path.stem != "annotator" or "as_peft" in argument
    groups = {"metamath": 20}  # PEFT's BUCKET_FACTOR
    assert config.data.group == (1 if is_random else groups.get(path.stem, 8))
    assert ineffective_field_notes(config) == []
    saved = tmp_path / "config.json"
    saved.write_text(config.to_json())
    again = load_config(str(saved))
    check_config(again)
    assert again == config


@pytest.fixture
def rows_of(tmp_path):
    """Writes a few rows of a known task. -> their folder"""

    def write(name: str):
        texts = {
            "metamath": [{"query": f"a {x}", "response": f"it is #### {x}"} for x in WORDS[:6]],
            "sums": [{"sum": f"a {x}", "result": x} for x in WORDS[:6]],
        }
        if rows := texts.get(name):
            for split in ("train", "dev", "test"):
                write_rows(tmp_path / f"{split}.jsonl", rows)
            return tmp_path
        if name == "custom":  # the facts of LAMA
            task = custom_task(fields=["sub_label"], label="obj_label", labels=WORDS[:3])
            (tmp_path / "words.txt").write_text("\n".join(WORDS))
        else:
            task = get_task(name)
        # Texts differ: an example is not shown as its own demonstration.
        rows = [
            {field: f"the old cat was near it {word}" for field in task.fields}
            | entities_of(task)
            | {task.label: label}
            for label, word in zip([*task.labels] * 2, cycle(WORDS), strict=False)
        ]
        for column, texts in task.derive.values():
            rows = [row | {column: next(iter(texts))} for row in rows]
        for split in ("train", "dev", "test"):
            write_rows(tmp_path / f"{split}.jsonl", rows)
        return tmp_path

    return write


def differs(path, argument) -> bool:
    """Tells whether a run has a method and head of its own, or differs in numbers and the task."""
    if path.parent.name == "adapt":
        return False  # pre-training builds in its own way
    if path.parent.name == "ppt":
        return path.stem in ("t5_small", "prompt_tuning")
    if path.stem == "lm_bff":
        return argument.startswith(("sst2", "trec", "mnli"))
    if path.stem == "lama":
        return argument != "masked"  # which is the default
    if path.stem == "relations":  # the number of examples changes no program
        return not argument or ",8," in argument
    if path.parent.name == "ipt":  # a length, a share or a fold changes no program
        if path.stem == "knowledge":
            return argument == "sst2,random,prefix,hard"
        return path.stem in ("end_to_end", "topics") and argument[:2] not in ("bo", "cb", "mu")
    if path.parent.name == "ptuning_v2":  # others have rows of tags or more layers
        return path.stem in ("superglue", "verbalizer") and argument[:2] not in ("mu", "re")
    if path.stem == "metamath":
        return argument != "prefix_text"  # which is the default
    if path.stem == "sums":
        return argument in ("", "soft-vocab")
    if path.parent.name == "dpt":
        return argument in ("", *OTHERS) or argument.startswith("sst2,low")
    return path.stem != "accuracy" or argument.startswith("sst2")


OTHERS = ("sst2,full,released", "ag_news,low,dpt,large")  # which no sweep has
TABLE_2 = ("rte,ppt,prompt", "rte,full,prompt")  # baselines that its sweep has not
RUNS += [(CONFIGS / "ipt/end_to_end.py", argument) for argument in TABLE_2]
SPANS = ("quoref", "quoref,low,sigma,large", "quoref,full,bert")
RUNS += [(CONFIGS / "dpt/tasks.py", argument) for argument in (*OTHERS, *SPANS)]
# Label words of several subwords each, beside the fluency objective.
RUNS += [(CONFIGS / "dart/relations.py", "sem_eval_2010_task_8,8,fixed_labels")]
RUNS += [(CONFIGS / "dart/relations.py", "sem_eval_2010_task_8,8,frozen")]
BUILDS = [
    pytest.param(path, name, id=f"{name_of(path)}-{name}", marks=[pytest.mark.long] * (i > 0))
    for _, group in groupby(sorted(RUNS), key=lambda run: run[0])
    for i, (path, name) in enumerate(run for run in group if differs(*run))
]


@pytest.fixture(scope="session")
def backbones(backbone, tmp_path_factory):
    """Makes a backbone of a family once; the matrices of "blocks" consist of blocks of codes."""
    root = tmp_path_factory.mktemp("backbones")

    @functools.cache
    def make(family):
        if family == "bert":
            return str(backbone)
        if family == "llama":  # with room for a template that is spelled by letters
            return str(make_backbone(root / family, family, max_position_embeddings=160))
        if family == "blocks":
            return str(make_backbone(root / family, hidden_size=64, intermediate_size=64))
        return str(make_backbone(root / family, family))

    return make


@pytest.mark.long_cases("accuracy-sst2-full", "p_tuning/lama-")
@pytest.mark.parametrize("path, argument", BUILDS)
def test_it_builds_at_tiny_width(path, argument, backbones, rows_of):
    config = load(path, argument)
    long = path.parent.name == "p_tuning" or path.parent.name == "ptuning_v2"
    config = config.replace({"data.max_len": 56 if long else 24, "data.protocol": ""})
    if "t5" in config.backbone.path:  # longer names of fields: more room, and fewer soft tokens
        config = config.replace(
            {"backbone.path": backbones("t5"), "data.max_len": 160, "prompt.length": 4}
        )
    elif "electra" in config.backbone.path:  # whose tokenizer spells the classes
        config = config.replace({"backbone.path": backbones("discriminator"), "data.max_len": 66})
    elif config.head.name == "text":
        fields = {"data.max_len": 120, "data.max_target": 16, "prompt.length": 4}
        config = config.replace({"backbone.path": backbones("llama")} | fields)
    elif config.backbone.quantize != "none":
        config = config.replace({"backbone.path": backbones("blocks")})
    else:
        config = config.replace({"backbone.path": backbones("bert")})
    if config.head.get("stride", 0) >= config.data.max_len:
        config = config.replace({"head.stride": 8})
    if config.demos.per_class or config.demos.total:
        words = tuple(WORDS[: len(get_task(config.task.name).labels)])  # one subword each
        config = config.replace(
            {"data.max_len": 64, "demos.encoder": backbones("bert"), "task.words": words}
        )
    if path.parent.name in ("ipt", "ptuning_v2"):  # exports are of the paper's backbone
        tiny = {"length": 4, "pretrained": "", "init": ""}
        config = config.replace(
            {f"prompt.{n}": x for n, x in tiny.items() if n in config.prompt.fields}
        )
    if config.head.name == "text":
        config = config.replace({"data.source": str(rows_of(path.stem))})
        if path.stem == "sums" and config.prompt.get("text"):  # numbers that the tiny one has not
            config = config.replace({"prompt.text": "a a an an is the this"})
    elif config.task.name == "custom" and not config.task.vocabulary:
        config = config.replace({"data.source": str(rows_of("topics"))})
    elif config.task.name != "topics":
        config = config.replace({"data.source": str(rows_of(config.task.name))})
    if config.task.vocabulary:
        config = config.replace({"task.vocabulary": f"{config.data.source}/words.txt"})
    if path.stem == "relations":  # words that the tiny one has, and few examples
        if "text" in config.prompt.fields:
            config = config.replace({"prompt.text": "a a an an is the this"})
        config = config.replace({"optim.schedule.warmup_steps": 1})
        # Words of many masks.
        config = config.replace({"data.max_len": 64 if "fixed_labels" in argument else 24})
    check_config(config)
    config = config.replace({"mesh.data": 1, "mesh.model": 1})
    placement = build_placement(config)
    opened = open_checked_backbone(config, placement)
    examples = read_examples(config)
    scorer = scorer_from_config(config, opened, examples, placement)
    train = scorer.encode(examples.splits["train"][:40], targets=True)
    batches = train_batches(config, scorer, train)
    plan = make_milestones(config.train, batches.steps_per_epoch, config.data.batch)
    assert plan.total > 0
    opened, loaded = load_weights(opened, placement)
    scorer = scorer.with_backbone(opened)
    weights = init_params(config, scorer, loaded, train, placement)
    tx = build_optimizer(config, weights.trainable, plan, batches.steps_per_epoch)
    objectives = build_objectives(config, scorer.model)
    step = steps.make_train_step(scorer.model, tx, objectives)
    state = make_state(weights.trainable, tx, rng.key_for(config.seed, "dropout"))
    new, measured = jax.eval_shape(step, state, weights.frozen, next(batches))
    batches.close()
    assert measured["loss"].shape == () and new.trainable.keys() == weights.trainable.keys()


@pytest.mark.parametrize("row", ["in_context", "zero_shot"])
def test_rows_of_lm_bff_that_train_nothing(row):
    config = load(CONFIGS / "dart/lm_bff.py", f"sst2,{row}")
    check_config(config)
    assert is_zero_shot(config) and config.data.protocol.name == "kshot"
    assert (config.demos.total, config.data.max_len) == (
        (32, 512) if row == "in_context" else (0, 128)
    )


@pytest.mark.parametrize(
    "task, word", [("sst2", "sentiment"), ("sst5", "label"), ("trec", "category")]
)
def test_the_released_template_of_dpt_has_the_word_of_each_task(task, word):
    """METHODS.md 6.1: the script has that of SST-2, its comments those of the others."""
    config = load(CONFIGS / "dpt/tasks.py", f"{task},full,released")
    (field,) = get_task(task).fields
    assert config.task.template == f"{{{field}}} [sep] {word} : _ [classes]"
    # Its BCELoss is a mean, of scores with a bias, at copies of "negative ," and the like.
    assert config.head.fields.items() >= {"loss": "mean", "bias": True, "copies": True}.items()
    assert config.head.get("separator") == " "
    assert all(word.endswith(" ,") for word in config.task.words)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("end_to_end:rte,randm", "the system 'randm' is unknown; nearest: random"),
        ("end_to_end:rte,ppt,prefix", "the system on prefix 'ppt' is unknown"),
        ("end_to_end:rte,cnn,prompt,5", "4 parts; use TASK,SYSTEM,PLACE$"),
        ("prompt_length:rte,task,prompt,7", "the length '7' is unknown"),
        ("utilization:boolq,cnn,prompt,4", "the percent '4' is unknown"),
        ("few_shot:rte,random,prefix,4", "the fold '4' is unknown"),
        ("knowledge:rte,random", "the task 'rte' is unknown; known: ag_news, imdb, sst2"),
        ("encoder_sizes:rte,cnn,prompt,big", "the hidden 'big' is unknown"),
        ("topics:cnn,prompt,rte", "the task 'rte' is unknown"),
    ],
)
def test_arguments_that_configs_of_ipt_do_not_know(name, message):
    stem, _, argument = name.partition(":")
    with pytest.raises(InputError, match=message):
        load(CONFIGS / f"ipt/{stem}.py", argument)


def test_a_topic_classifier_fits_the_runs_that_start_from_it():
    """What an export must have in common with them: where it stands, encoder, sizes."""
    for place in ("prompt", "prefix"):
        for encoder in ("cnn", "lstm", "mlp"):
            topics = load(CONFIGS / "ipt/topics.py", f"{encoder},{place}").prompt
            prompt = load(CONFIGS / "ipt/end_to_end.py", f"rte,{encoder},{place}").prompt
            for field in ("on", "encoder", "hidden", "length", "scale"):
                assert topics.fields[field] == prompt.fields[field], field
            # Section 4.2: rows train with topics alone.
            assert prompt.get("fixed") and not topics.get("fixed")
            assert prompt.get("pretrained") == f"topics/{encoder}-{place}"
            assert topics.get("pretrained") == ""


def parts():
    for path in sorted((CONFIGS / "parts").glob("[a-z]*.py")):
        module = load_module(str(path))
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and function.__module__ == module.__name__:
                yield pytest.param(path.stem, function, id=f"{path.stem}-{name}")


@pytest.mark.parametrize("kind, part", list(parts()))
def test_every_part_fits_the_base(kind, part):
    config = with_part(load(CONFIGS / "base.py"), part)
    columns = {"text": "target", "tags": "tags", "regression": "number"}
    answers = (columns | dict.fromkeys(("spans", "multi_spans"), "answers")).get(config.head.name)
    if answers is not None and kind == "heads":  # what the other tasks of base.py have not
        task = {"task.name": "custom", "task.fields": ("words",), f"task.{answers}": "column"}
        config = config.replace(task)
    config = config.replace({"backbone.path": config.backbone.path or "somewhere"})
    check_config(config)
    if kind == "tasks":
        assert config.task.name in task_names()


def test_every_field_is_explained():
    fields = dict(declared_leaves(RunConfig))
    for block in OPEN:
        for name in block_names(block):
            fields |= {
                f"{block} {name} {x}": field for x, field in declared_fields(block, name).items()
            }
    assert len(fields) > 200 and not [name for name, field in fields.items() if not field.note]


def test_the_page_of_fields_is_that_of_the_code():
    page = (CONFIGS.parent / "docs/config.md").read_text()
    assert page == write_page(), "run: python -m jaxprompt.config.reference > docs/config.md"


def test_dart_decays_all_but_biases():
    """As appendix A of Zhang et al. 2022 has it: norms too."""
    decays = decay_mask(load(CONFIGS / "dart/few_shot.py", "sst2").optim.no_decay)
    paths = ["backbone/layers/mlp/in/kernel", "backbone/layers/mlp/norm/scale", "prompt/table"]
    assert all(decays(dict.fromkeys(paths)).values())
    assert not any(decays({"backbone/layers/mlp/in/bias": None, "head/bias": None}).values())
