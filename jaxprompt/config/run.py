"""Declares every config field: defaults, checks, --help and docs/config.md come from here.

A block is a frozen dataclass, and `RunConfig` composes the blocks. Imports nothing heavy.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from jaxprompt.config import kinds
from jaxprompt.config.block import Block, OpenBlock, Option, choice, nested, open_block
from jaxprompt.errors import InputError

_DTYPES = ("float32", "bfloat16")
_TASKS = kinds.ImportedWords("corpus.ppt", "TASKS")


@dataclass(frozen=True)
class BackboneConfig(Block):
    """The frozen model."""

    path: str = kinds.path("", "save_pretrained folder, .gguf file, hub id, or pkg:PACKAGE/FOLDER")
    revision: str = kinds.text("", "revision of a hub id")
    init: str = kinds.path(
        "", "adapt: a config.json to initialise randomly; `path` gives the tokenizer"
    )
    family: str = kinds.word(
        "", kinds.ImportedWords("backbones", "families"), "empty = from model_type in config.json"
    )
    dtype: str = kinds.word("float32", _DTYPES, "dtype of the frozen weights and the activations")
    quantize: str = kinds.word(
        "none",
        ("none", "int8", "int4", "fp8"),
        "8- or 4-bit quantisation of the frozen matrices: a scale per output, or (int4, GGUF "
        "files) a scale and a minimum per 32 weights; fp8: products in 8-bit floats, on GPUs with "
        "units for it",
    )
    stack: str = kinds.word(
        "auto",
        kinds.ImportedWords("layers.stack", "STACKS"),
        "scan: compile one layer for all; unroll: compile every layer, with frozen layers as "
        "separate arrays; auto: unroll on GPUs if training is long enough, and for generation on "
        "GPUs and CPUs",
    )
    remat: str = kinds.word(
        "none",
        kinds.ImportedWords("layers.stack", "REMATS"),
        "what the backward pass recomputes. none: nothing; mlp: the wide activations of "
        "feed-forward blocks; dots: all but matrix products and attention; full: whole layers",
    )
    attention: str = kinds.word(
        "auto",
        kinds.ImportedWords("layers.kernels", "KERNELS"),
        "auto: the device's fused kernel where it supports the inputs; fused: also for "
        "short texts on TPUs, elsewhere attention scores are recomputed in the backward "
        "pass; einsum: two matrix products",
    )
    last_layer: str = kinds.word(
        "needed",
        kinds.ImportedWords("models.model", "LAST_LAYER"),
        "positions computed in the last layer. needed: those that the head reads; all: all of them",
    )
    cache_shared_prefix: bool = kinds.flag(
        True,
        "GPT-2, OPT, Llama, GPT-NeoX: compute the prefix that all inputs share, e.g. soft tokens, "
        "once per step and not once per input, with one dropout mask",
    )
    dropout: float | None = kinds.share(
        None,
        "of hidden states. None = the rates in config.json; 0 also turns off that of attention, "
        "unless attention_dropout is set",
    )
    attention_dropout: float | None = kinds.share(
        None,
        "of attention probabilities. None = the rate in config.json, or 0 if dropout=0; "
        "0 lets training use the fused kernel",
    )
    sentinel: str = kinds.text("<extra_id_{}>", "T5: name of the n-th sentinel in the vocabulary")
    rescale: float = kinds.number(
        1.0, "T5: divisor of the residual stream, for 16-bit floats", "above 0"
    )

    @property
    def may_drop(self) -> bool:
        """Whether the backbone may have dropout; None is the rate in config.json."""
        return self.dropout != 0 or bool(self.attention_dropout)


@dataclass(frozen=True)
class MeshConfig(Block):
    """The device mesh; -1 = all remaining devices."""

    data: int = kinds.whole(-1, "data axis: parts of a batch")
    model: int = kinds.whole(
        1,
        "model axis: parts of the attention heads, feed-forward width and vocabulary; 0 = the "
        "smallest with which the run fits the memory of the devices, 1 on CPUs",
    )
    fsdp: bool = kinds.flag(False, "shard frozen weights over `data`, too")
    slices: int = kinds.size(1, "number of TPU slices or GPU hosts; only `data` may span several")


@dataclass(frozen=True)
class TaskConfig(Block):
    """Inputs, labels and metric."""

    name: str = kinds.text(
        "topics", "a known task, or custom: your own file, described by the fields below"
    )
    chat: bool = kinds.flag(
        False, "the template up to [mask] becomes the user's turn in the tokenizer's chat template"
    )
    template: str = kinds.text(
        "", "empty = the task's default; form unified or nss: only the text before the options"
    )
    words: tuple[str, ...] = kinds.texts(
        (),
        "label words per class, alternatives of one class separated by |; () = the task's default",
    )
    spaced: str = kinds.word(
        "", ("true", "false"), "encode label words with a leading space; empty = the task's default"
    )
    option: str = kinds.text(
        "", "how {choices} writes an option, e.g. {name}. {text}.; empty = the task's default"
    )
    fields: tuple[str, ...] = kinds.texts(
        (), "custom: text columns; form nsp, cls: the texts to ask about, () = the task's default"
    )
    label: str = kinds.text("label", "custom: column of the label")
    labels: tuple[str, ...] = kinds.texts(
        (),
        "custom, and tags: class names in order, or tag types; () = collected from the "
        "training examples",
    )
    vocabulary: str = kinds.path(
        "",
        "custom: file with one word per line; words of one token are the classes, and "
        "examples with other labels are left out",
    )
    choices: tuple[str, ...] = kinds.texts(
        (), "custom: columns of the choices, or one column that holds a list"
    )
    metric: str = kinds.word(
        "", kinds.ImportedWords("scoring.metrics", "all_metrics"), "empty = the task's default"
    )
    positive: str = kinds.text(
        "", "positive class of f1, f1a and answer_f1; empty = the second class"
    )
    target: str = kinds.text("", "custom: column of the text to generate, for head.name=text")
    messages: tuple[str, ...] = kinds.texts(
        (),
        "custom: column of conversations, for head.name=text, whose assistant turns are learned; "
        "or columns of the prompt's and the completion's messages, of which the latter are learned",
    )
    answer_pattern: str = kinds.text(
        "",
        "metrics of generated texts compare only the answers in them. number: the last number, as "
        "in GSM8K; boxed: the last \\boxed{}, as in MATH; or a regular expression, whose last "
        "match counts, or the first of its groups that matches",
    )
    answers: str = kinds.text(
        "", "custom: column of the answers found in the last field, for head.name=spans"
    )
    number: str = kinds.text(
        "", "custom: column of the number to predict, for head.name=regression"
    )
    limits: tuple[float, ...] = kinds.several(
        kinds.number(None, "custom: smallest and largest possible number", limit="")
    )
    tags: str = kinds.text("", "custom: column with one tag per word, for head.name=tags")
    scheme: str = kinds.word(
        "",
        kinds.ImportedWords("data.tasks.tags", "SCHEMES"),
        "tagging scheme; empty = detected from the training examples; none: each tag covers "
        "one word",
    )
    predicate: str = kinds.text(
        "",
        "custom: column with the index, from 0, of the word whose roles `tags` holds; or "
        "with a list of indices, and then `tags` holds a list of tags for each",
    )
    entities: tuple[str, ...] = kinds.texts(
        (), "custom: location of each entity in the first field; the labels are relations"
    )
    offsets: str = kinds.word(
        "tags",
        kinds.ImportedWords("data.tasks.readers.entities", "OFFSETS"),
        "format of task.entities. tags: <e1>|</e1>; characters, words: a column of [start, "
        "end], or two columns as start|end; last_word: the same, end included; text: a "
        "column of the entity's text",
    )
    markers: tuple[str, ...] = kinds.texts(
        (),
        "words before and after each entity where a template says |marked; () = @ @ # #; "
        "with task.predicate: around the predicate, () = none",
    )
    negative: str = kinds.text(
        "", "custom: the class that means no relation, which micro_f1 leaves out"
    )
    question: tuple[str, ...] = kinds.texts(
        (),
        "custom: columns that identify a question, whose examples are its possible answers; "
        "for f1a and answer_f1",
    )
    candidate: str = kinds.text("", "custom: the field that holds such an answer")
    candidates: tuple[str, ...] = kinds.texts(
        (),
        "custom: column of the candidates, and column of the right ones; each candidate "
        "becomes an example, with the candidate in the field task.candidate",
    )
    placeholder: str = kinds.text(
        "", "custom: text that stands for the candidate in the other columns"
    )
    form: str = kinds.word(
        "cloze",
        kinds.ImportedWords("config.run", "forms"),
        "cloze: label words at a mask; text: T5's text-to-text format; nsp, nss, unified, "
        "cls: format of that pre-training task in ppt.patterns; nss and unified answer with "
        "the name of an option",
    )
    answer: str = kinds.text(
        "",
        'T5: target text; empty = "[mask] {label}" (cloze), "{label} [sep]" (text); GLM: '
        '"{label}", which fills its blank',
    )
    eos: bool = kinds.flag(True, "T5: the input ends with </s>")


@dataclass(frozen=True)
class FilesConfig(Block):
    """Data files; they take precedence over `source`."""

    train: str = kinds.path("", "training examples")
    dev: str = kinds.path("", "dev examples, which select the best prompt")
    test: str = kinds.path("", "test examples, which are scored once")

    def paths(self) -> dict[str, str]:
        """Returns the paths that are set, by split."""
        paths = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: path for name, path in paths.items() if path}


_ON_SHORTAGE = kinds.ImportedWords("data.sampling.fewshot", "ON_SHORTAGE")


@dataclass(frozen=True)
class Protocol(Option):
    """All training examples, and the task's dev split."""


@dataclass(frozen=True)
class KShot(Protocol):
    """A fixed number of examples per class."""

    name: ClassVar[str] = "kshot"
    k: int = kinds.count(16, "training examples per class")
    dev_k: int = kinds.count(0, "dev examples per class; 0 = k")
    on_shortage: str = kinds.word(
        "raise",
        _ON_SHORTAGE,
        "if a class has too few examples. raise: error; use_fewer: train gets up to k, "
        "dev the rest",
    )


@dataclass(frozen=True)
class Balanced(Protocol):
    """A fixed number of examples in total, balanced over the classes (PPT)."""

    name: ClassVar[str] = "balanced"
    n: int = kinds.size(32, "training examples in total, and as many for dev")


@dataclass(frozen=True)
class Fraction(Protocol):
    """A share of each class."""

    name: ClassVar[str] = "fraction"
    ratio: float = kinds.number(
        0.1, "share of each class; values from 2 on are examples per class", "above 0"
    )
    holdout: float = kinds.share(
        0.0, "share of each class that becomes dev; 0 = the task's dev split"
    )


@dataclass(frozen=True)
class KFold(Protocol):
    """Cross-validation: the training examples are split into folds, one of which is dev."""

    name: ClassVar[str] = "kfold"
    folds: int = kinds.size(4, "number of folds")
    fold: int = kinds.count(0, "the fold used as dev")
    k: int = kinds.count(16, "examples per class over all folds; 0 = all")
    on_shortage: str = kinds.word(
        "raise",
        _ON_SHORTAGE,
        "if a class has too few examples. raise: error; use_fewer: divide what there is",
    )


@dataclass(frozen=True)
class HoldOut(Protocol):
    """A fixed number of training examples becomes dev."""

    name: ClassVar[str] = "holdout"
    size: int = kinds.size(500, "training examples that become dev, in proportion to the classes")


@dataclass(frozen=True)
class Listed(Protocol):
    """The examples that a file lists."""

    name: ClassVar[str] = "listed"
    rows: str = kinds.path("", "JSONL file with the example numbers of each seed")


@dataclass(frozen=True)
class DataConfig(Block):
    """Which examples are used, and how they are batched."""

    source: str = kinds.path(
        "", "folder, hub, hub:owner/name[:subset], tfds:name, package; empty = the task's default"
    )
    files: FilesConfig = nested(FilesConfig)
    test_split: str = kinds.word(
        "test",
        ("test", "dev"),
        "split of the data set that is scored as test; dev only if data.protocol samples "
        "dev from train",
    )
    only: str = kinds.text("", "COLUMN=VALUE: keep only examples with this value, in every split")
    cache_dir: str = kinds.path("", "cache folder of hub and TFDS downloads")
    protocol: Protocol = choice(
        Protocol,
        KShot,
        Balanced,
        Fraction,
        KFold,
        HoldOut,
        Listed,
        note="how train and dev are sampled; empty = all examples",
    )
    seed: int = kinds.whole(0, "data seed: which examples the protocol samples", kinds.SEED)
    batch: int = kinds.size(32, "examples per step, over all hosts")
    eval_batch: int = kinds.size(64, "examples per batch in evaluation")
    max_len: int = kinds.size(128, "maximum tokens of an input, soft tokens included")
    max_target: int = kinds.size(64, "maximum tokens of a target text, end token included")
    multiple: int = kinds.count(
        0,
        "pad batches to a multiple of this length; 0 = of 8 on a CPU, and elsewhere to 32, 40, 48, "
        "64, 80, ... tokens, at most 3 lengths per doubling",
    )
    group: int = kinds.size(
        8,
        "sort the examples of this many batches by length, which saves padding; at most a quarter "
        "of an epoch; 1 = off",
    )
    packed: bool = kinds.flag(
        False,
        "head.name=text: put several training examples into each row of up to max_len tokens; "
        "attention stays within an example and the prompt. data.batch counts rows",
    )
    padding_side: str = kinds.word("right", ("right", "left"), "padding side")


@dataclass(frozen=True)
class DemosConfig(Block):
    """In-context demonstrations: labelled training examples shown with each example."""

    per_class: int = kinds.count(
        0, "demonstrations per class, after the example (GPT-2: before it); 0 = none"
    )
    total: int = kinds.count(
        0,
        "or demonstrations of all classes in random order, before the example, as many as "
        "fit; 0 = none",
    )
    exact: int = kinds.count(
        0, "or exactly this many of all classes, none of them truncated; 0 = none"
    )
    samples: int = kinds.size(
        1,
        "sets of demonstrations per example; training treats each as an example, evaluation "
        "averages scores",
    )
    similar: float = kinds.number(
        1.0, "sample from this share of each class, the most similar examples", "in (0, 1]"
    )
    encoder: str = kinds.path("", "similar below 1: a BERT whose mean-pooled states are compared")
    max_demo_tokens: int = kinds.count(
        0, "maximum tokens of each text of a demonstration; 0 = what fits"
    )
    max_example_tokens: int = kinds.count(
        0, "maximum tokens of each text of the example itself; 0 = what fits"
    )


@dataclass(frozen=True)
class CorpusConfig(Block):
    """Running text, for `adapt`, `annotate` and `pretrain`."""

    path: str = kinds.path(
        "", "folder, file or glob of .txt, JSONL or Parquet; hub:owner/name, tfds:name"
    )
    field: str = kinds.text("text", "JSONL, Parquet, hub, TFDS: column of the document")
    split: str = kinds.text("train", "hub, TFDS: split to read")
    documents: str = kinds.word(
        "file",
        kinds.ImportedWords("corpus.read", "DOCUMENTS"),
        ".txt: a document is a whole file, a line, or a block between blank lines",
    )
    paragraphs: str = kinds.word(
        "line",
        kinds.ImportedWords("corpus.split", "PARAGRAPHS"),
        "a paragraph ends at the end of a line, or at a blank line",
    )
    units: str = kinds.word(
        "paragraph", kinds.ImportedWords("corpus.split", "UNITS"), "units that a text is split into"
    )
    language: str = kinds.text("en", "language, for splitting sentences")
    max_document: int = kinds.size(2**24, "maximum bytes of a document; a longer one is an error")
    on_error: str = kinds.word(
        "raise",
        kinds.ImportedWords("corpus.read", "ON_ERROR"),
        "what to do with a document that cannot be read",
    )
    store: str = kinds.path("", "folder of the indexed text; empty = in the workdir")
    processes: int = kinds.count(0, "processes that index the text; 0 = one per core, at most 6")
    held_out: float = kinds.share(0.01, "share of the documents used as dev, sampled by data.seed")
    dev_rows: int = kinds.size(512, "maximum number of dev sequences that are scored")


@dataclass(frozen=True)
class PretrainingObjective(Option):
    """A pre-training objective on sequences of data.max_len tokens; this one is none."""


@dataclass(frozen=True)
class OnText(PretrainingObjective):
    """Base class of the objectives on running text."""

    packed: bool = kinds.flag(True, "pack several documents into each sequence")
    separate_documents: bool = kinds.flag(False, "packed: attention stays within a document")
    examples: int = kinds.count(10, "held-out sequences written out with the model's predictions")


@dataclass(frozen=True)
class MaskedLM(OnText):
    """Masked language modelling."""

    name: ClassVar[str] = "mlm"
    rate: float = kinds.share(0.15, "share of the tokens to predict")
    whole_words: bool = kinds.flag(False, "select all subwords of a word or none")


@dataclass(frozen=True)
class ReplacedTokens(MaskedLM):
    """Replaced-token detection."""

    name: ClassVar[str] = "rtd"
    weight: float = kinds.number(50.0, "weight of the discriminator's loss")
    generator: float = kinds.number(
        0.25, "width of the generator, relative to the discriminator", "above 0"
    )
    generator_layers: float = kinds.number(
        1.0, "layers of the generator, relative to the discriminator", "above 0"
    )
    generator_path: str = kinds.path(
        "", "masked LM that initialises the generator; empty = randomly initialised, with that size"
    )


@dataclass(frozen=True)
class CausalLM(OnText):
    """Causal language modelling."""

    name: ClassVar[str] = "clm"


@dataclass(frozen=True)
class PrefixLM(OnText):
    """Prefix language modelling."""

    name: ClassVar[str] = "prefix_lm"
    share: float = kinds.share(
        0.0, "share of a sequence that is the prefix, in (0, 1); 0 = random for each sequence"
    )


@dataclass(frozen=True)
class SpanCorruption(OnText):
    """Span corruption."""

    name: ClassVar[str] = "span_corruption"
    rate: float = kinds.share(0.15, "share of the tokens to mask")
    span: float = kinds.number(3.0, "mean length of a span", "above 0")


@dataclass(frozen=True)
class PPTConfig(Block):
    """Pre-training of a prompt (`pretrain`); head, task.answer and task.eos set the format."""

    task: str = kinds.word("", _TASKS, "pre-training task")
    patterns: str = kinds.word(
        "en",
        kinds.ImportedWords("corpus.ppt", "PATTERNS"),
        "en: as released; en_paper: as published; zh: Chinese; en_end, zh_end: [mask] comes "
        "last; also used by task.form",
    )
    hard: bool = kinds.flag(False, "task.form=nsp, nss, cls: add a hard prompt to the soft one")
    min_options: int = kinds.size(2, "unified: minimum number of options of an example")
    max_options: int = kinds.size(16, "unified: maximum number of options of an example")
    matched: bool = kinds.flag(
        True, "nsp, nss, unified: negatives are as long as the true neighbour of a text"
    )
    annotations: str = kinds.path(
        "", "cls: folder with the label of each unit of the text, written by `annotate`"
    )
    thresholds: tuple[float, ...] = kinds.several(
        kinds.share(0.0, "cls: probability that a label must exceed, per class; () = as released")
    )


@dataclass(frozen=True)
class Schedule(Option):
    """A factor on the learning rate as a function of the step; this one is constantly 1."""

    name: ClassVar[str] = "constant"


@dataclass(frozen=True)
class Linear(Schedule):
    """Linear decay to 0 at the last step."""

    name: ClassVar[str] = "linear"


@dataclass(frozen=True)
class Exponential(Schedule):
    """Exponential decay by a factor per epoch."""

    name: ClassVar[str] = "exponential"
    gamma: float = kinds.number(0.95, "factor per epoch", "above 0")


@dataclass(frozen=True)
class Warmup(Schedule):
    """Base class of the schedules with a warmup."""

    warmup_steps: int = kinds.count(0, "steps of the warmup")
    warmup_ratio: float = kinds.share(
        0.0, "warmup as a share of all steps, used if warmup_steps is 0"
    )

    def warmup(self, total: int) -> int:
        """Returns the number of warmup steps in a run of `total` steps."""
        # A share below 1 may round to all of a short run.
        return self.warmup_steps or min(round(self.warmup_ratio * total), total - 1)


@dataclass(frozen=True)
class WarmupLinear(Warmup):
    """Linear warmup, then linear decay to 0 at the last step."""

    name: ClassVar[str] = "warmup_linear"


@dataclass(frozen=True)
class Cosine(Warmup):
    """Linear warmup, then half a cosine to 0 at the last step."""

    name: ClassVar[str] = "cosine"


@dataclass(frozen=True)
class InverseSqrt(Warmup):
    """1 / sqrt(max(step, warmup_steps)) (Raffel et al. 2020, section 3.1.2)."""

    name: ClassVar[str] = "inverse_sqrt"


@dataclass(frozen=True)
class OptimConfig(Block):
    """Optimizer and learning rate."""

    name: str = kinds.word(
        "adamw", kinds.ImportedWords("training.optim", "OPTIMIZERS"), "the optimizer"
    )
    lr: float = kinds.number(0.01, "learning rate")
    lr_head: float | None = kinds.number(None, "learning rate of the head; None = lr")
    lr_backbone: float | None = kinds.number(None, "learning rate of the backbone; None = lr")
    schedule: Schedule = choice(
        Linear,
        Schedule,
        WarmupLinear,
        Cosine,
        Exponential,
        InverseSqrt,
        note="learning-rate schedule, see training/optim.py",
    )
    weight_decay: float = kinds.number(
        0.0, "weight decay per step: adamw multiplies it by the learning rate, adafactor does not"
    )
    no_decay: tuple[str, ...] = kinds.texts(
        (".*/bias\\d*", ".*norm/scale"),
        "patterns of parameters without weight decay",
        is_pattern=True,
    )
    clip: float = kinds.number(1.0, "maximum global norm of the gradients; 0 = no clipping")
    b1: float = kinds.share(0.9, "Adam's beta_1")
    b2: float = kinds.share(0.999, "Adam's beta_2")
    eps: float = kinds.number(1e-08, "Adam's epsilon", "above 0")
    decay_rate: float = kinds.share(0.8, "adafactor: decay rate of the second moment")
    scaled: bool = kinds.flag(
        False,
        "adafactor: as T5 was trained: factored second moments, lr relative to the scale of "
        "a matrix",
    )
    accumulate: int = kinds.size(1, "gradient accumulation: parts that a batch is split into")
    label_smoothing: float = kinds.share(0.0, "label smoothing")


@dataclass(frozen=True)
class CacheConfig(Block):
    """Hidden states of the frozen layers below all trainable ones, computed once and cached."""

    location: str = kinds.word(
        "",
        ("host", "disk"),
        "host: in memory; disk: in a folder; empty = no cache, computed in every step",
    )
    folder: str = kinds.path(
        "", "disk: folder of the cache; empty = in the workdir of the run or its grid"
    )
    dtype: str = kinds.word("float32", _DTYPES, "dtype of the cached states")
    limit: float = kinds.number(
        8.0,
        "maximum GiB per process, over all runs of a grid; a larger cache is an error",
        "above 0",
    )


_MIN_TEMPERATURE = 1e-6
# Fields of `generate` that exclude beam search.
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "n", "repetition_penalty", "stop", "logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class GenerateConfig(Block):
    """How texts are generated."""

    max_new_tokens: int = kinds.size(64, "maximum number of new tokens")
    num_beams: int = kinds.size(1, "beam width; 1 = no beam search")
    length_penalty: float = kinds.number(
        1.0, "beams are ranked by log-probability / length ** length_penalty", ""
    )
    early_stopping: str = kinds.word(
        "false", ("true", "false", "never"), "true: stop when `num_beams` texts have ended"
    )
    temperature: float = kinds.number(
        0.0, "0: the most likely token (greedy); above 0: a sample of softmax(scores / temperature)"
    )
    top_k: int = kinds.count(0, "sample from this many of the most likely tokens; 0 = all")
    top_p: float = kinds.number(
        1.0, "sample from the fewest tokens whose probabilities sum to this", "in (0, 1]"
    )
    min_p: float = kinds.share(
        0.0, "sample from tokens with at least this share of the most likely one's probability"
    )
    n: int = kinds.size(
        1, "samples of each text; if above 1, evaluation also returns maj@n and pass@n"
    )
    repetition_penalty: float = kinds.number(
        1.0,
        "divisor of positive scores, and factor of negative ones, of tokens in the input (of an "
        "encoder-decoder: none of these) or in the text so far; 1 = off",
        "above 0",
    )
    stop: tuple[str, ...] = kinds.texts(
        (), "strings that end a text, which is cut before the first of them"
    )
    seed: int = kinds.whole(0, "seed of the samples", kinds.SEED)
    logprobs: bool = kinds.flag(
        False, "`predict` also writes the tokens of each text and their log-probabilities"
    )

    def __post_init__(self) -> None:
        """Raises InputError for an empty stop string, and for fields that exclude each other."""
        if "" in self.stop:
            raise InputError(
                f"generate.stop={self.stop} has an empty string, which would end every text at "
                "once; remove it"
            )
        defaults = {x.name: x.default for x in dataclasses.fields(self) if x.name in _SAMPLING}
        changed = [name for name, x in defaults.items() if getattr(self, name) != x]
        if self.num_beams > 1 and changed:
            name = changed[0]
            raise InputError(
                f"generate.num_beams={self.num_beams} is a search for the most likely text, which "
                f"excludes generate.{name}={getattr(self, name)}; set num_beams to 1, or "
                f"{name} to {defaults[name]}"
            )
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise InputError(
                f"generate.temperature={self.temperature} is too small to divide by; set it to 0 "
                f"(greedy) or to at least {_MIN_TEMPERATURE}"
            )
        for name in changed:
            if not self.temperature and name in ("top_k", "top_p", "min_p", "n"):
                raise InputError(
                    f"generate.{name}={getattr(self, name)} needs samples, but "
                    f"generate.temperature=0 is greedy; set a temperature, e.g. 0.7, or {name} to "
                    f"{defaults[name]}"
                )


@dataclass(frozen=True)
class GridConfig(Block):
    """A grid of runs that train as one program, each with its own folder; an empty list means
    the value in the config.
    """

    tasks: tuple[str, ...] = kinds.several(
        kinds.word("", _TASKS, "values of ppt.task, for `pretrain`")
    )
    seeds: tuple[int, ...] = kinds.several(kinds.whole(0, "values of seed", kinds.SEED))
    data_seeds: tuple[int, ...] = kinds.several(kinds.whole(0, "values of data.seed", kinds.SEED))
    folds: tuple[int, ...] = kinds.several(
        kinds.count(0, "values of data.protocol.fold, for kfold")
    )
    lr: tuple[float, ...] = kinds.several(kinds.number(0.0, "values of optim.lr"))
    weight_decay: tuple[float, ...] = kinds.several(
        kinds.number(0.0, "values of optim.weight_decay")
    )
    prompt_starts: tuple[str, ...] = kinds.texts((), "values of prompt.start")
    texts: tuple[str, ...] = kinds.texts((), "values of prompt.text")
    words: tuple[str, ...] = kinds.texts((), "values of task.words, each e.g. bad,good")
    size: int = kinds.count(
        0,
        "runs that train at once; 0 = as many as fit in memory, on a CPU those with the "
        "same batches",
    )


@dataclass(frozen=True)
class SharedConfig(Block):
    """Several tasks that train one prompt, each with its own head."""

    tasks: tuple[str, ...] = kinds.texts(
        (),
        "JSON files, one per task, with the fields of task, data and head that differ from "
        "the config; a task is named after its file",
    )
    temperature: float = kinds.number(
        1.0,
        "the steps of a task are proportional to its number of examples to the power of 1 / "
        "temperature",
        "above 0",
    )


@dataclass(frozen=True)
class TrainConfig(Block):
    """Training length, evaluation and checkpoints; setting one total unsets the others."""

    total_steps: int = kinds.count(0, "number of steps")
    total_epochs: float = kinds.number(10.0, "number of epochs")
    total_examples: int = kinds.count(0, "number of examples")
    eval_steps: int = kinds.count(0, "evaluate on dev every n steps; 0 = every eval_epochs")
    eval_epochs: float = kinds.number(1.0, "evaluate on dev every n epochs, if eval_steps is 0")
    patience: int = kinds.count(0, "evaluations without improvement before the run stops; 0 = off")
    save_steps: int = kinds.count(0, "save a checkpoint every n steps; 0 = at every evaluation")
    keep: int = kinds.size(
        2, "number of newest checkpoints kept in the workdir; `inspect` reads all of them"
    )
    plot: bool = kinds.flag(True, "draw curves.png at the end, if matplotlib is installed")
    log_steps: int = kinds.size(10, "write metrics every n steps")
    max_nonfinite_steps: int = kinds.size(10, "consecutive non-finite steps before the run stops")
    test: bool = kinds.flag(True, "score the test split with the best prompt at the end")
    profile: int = kinds.count(
        0,
        "steps of one run to trace into its folder, after the first two; also --profile=STEPS",
    )
    init_head: bool = kinds.flag(
        False, "initialise the head, too, from the export that prompt.init names"
    )
    tracker: str = kinds.word(
        "tensorboard",
        kinds.ImportedWords("training.trackers", "TRACKERS"),
        "tensorboard: event files in the workdir; wandb, trackio: a run named after the "
        "workdir; none: only metrics.jsonl",
    )
    compilation_cache: str = kinds.text(
        "", "folder of compiled programs; empty = ~/.cache/jaxprompt/compiled, none = no cache"
    )


@dataclass(frozen=True)
class RunConfig(Block):
    """The complete config of a run."""

    seed: int = kinds.whole(
        0, "training seed: initialisation, order of examples, dropout", kinds.SEED
    )
    rng: str = kinds.word(
        "threefry",
        kinds.ImportedWords("rng", "GENERATORS"),
        "random number generator of dropout. threefry: the same masks on every mesh and "
        "device; rbg: the device's generator, whose masks may change with mesh, device and "
        "compiler version",
    )
    backbone: BackboneConfig = nested(BackboneConfig)
    trainable: tuple[str, ...] = kinds.texts(
        (), "patterns of parameters that train; () = the method's default", is_pattern=True
    )
    mesh: MeshConfig = nested(MeshConfig)
    task: TaskConfig = nested(TaskConfig)
    data: DataConfig = nested(DataConfig)
    demos: DemosConfig = nested(DemosConfig)
    corpus: CorpusConfig = nested(CorpusConfig)
    objective: PretrainingObjective = choice(
        PretrainingObjective,
        MaskedLM,
        ReplacedTokens,
        CausalLM,
        PrefixLM,
        SpanCorruption,
        note="pre-training objective of `adapt`, on sequences of data.max_len tokens",
    )
    ppt: PPTConfig = nested(PPTConfig)
    optim: OptimConfig = nested(OptimConfig)
    cache: CacheConfig = nested(CacheConfig)
    generate: GenerateConfig = nested(GenerateConfig)
    runs: GridConfig = nested(GridConfig)
    shared: SharedConfig = nested(SharedConfig)
    train: TrainConfig = nested(TrainConfig)
    prompt: OpenBlock = open_block("prompt")
    head: OpenBlock = open_block("head")


def forms() -> tuple[str, ...]:
    """Lists the forms of a task."""
    return "cloze", "text", *_TASKS.read()


# Fields that may change when a workdir is used again: they do not change results.
CHANGEABLE_FIELDS: tuple[str, ...] = (
    "backbone.path",
    "backbone.stack",
    "train.tracker",
    "train.log_steps",
    "train.test",
    "train.compilation_cache",
    "train.plot",
    "train.keep",
    "train.profile",
    "data.cache_dir",
    "mesh",  # only changes the order of sums
    "cache.location",
    "cache.folder",
    "cache.limit",
)
# Fields that may also change after training: how it was trained, how the backbone runs, and what is
# scored. The data seed is not among them, since it selects the demonstrations.
DATA_FIELDS = tuple(f"data.{name}" for name in DataConfig.declared() if name != "seed")
CHANGEABLE_AFTER_TRAINING: tuple[str, ...] = (
    "optim",
    "train",
    *DATA_FIELDS,
    "generate",
    "cache",
    "backbone.dtype",
    "backbone.remat",
    "backbone.attention",
    "backbone.last_layer",
    "backbone.cache_shared_prefix",
)
