"""Every field of a config, once: defaults, checks, --help and docs/config.md come from it.

A block is a frozen dataclass, and `RunConfig` composes them. Nothing heavy is imported.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxprompt.config import kinds
from jaxprompt.config.block import Block, OpenBlock, Option, choice, nested, open_block

_DTYPES = ("float32", "bfloat16")
_TASKS = kinds.Words("corpus.ppt", "TASKS")


@dataclass(frozen=True)
class BackboneConfig(Block):
    """The frozen model."""

    path: str = kinds.path(
        "", "folder of save_pretrained, .gguf file, hub id, or pkg:PACKAGE/FOLDER"
    )
    revision: str = kinds.text("", "of a hub id")
    init: str = kinds.path(
        "", "adapt: a config.json, randomly initialised; `path` gives the tokenizer"
    )
    family: str = kinds.word(
        "", kinds.Words("backbones", "families"), "empty = model_type of config.json"
    )
    dtype: str = kinds.word("float32", _DTYPES, "of the frozen weights and the activations")
    quantize: str = kinds.word(
        "none",
        ("none", "int8", "int4"),
        "codes that the frozen matrices are kept in, a scale and a minimum for 32 of them",
    )
    stack: str = kinds.word(
        "scan",
        kinds.Words("layers.stack", "STACKS"),
        "scan: compile one layer; unroll: compile them all",
    )
    remat: str = kinds.word(
        "none", kinds.Words("layers.stack", "REMATS"), "what the backward pass computes again"
    )
    attention: str = kinds.word(
        "auto",
        kinds.Words("layers.kernels", "KERNELS"),
        "auto: the device's own kernel where it has one for these inputs; fused: also for "
        "short texts on TPUs, elsewhere scores are computed again in the backward pass; "
        "einsum: two products",
    )
    reads: str = kinds.word(
        "asked",
        kinds.Words("models.model", "READS"),
        "asked: the last layer runs at the positions that the head reads; all: at all of them",
    )
    once: bool = kinds.flag(
        True,
        "GPT-2, Llama: what all rows begin with, as soft tokens, runs once per step and not"
        " for each row, with one dropout mask",
    )
    dropout: float | None = kinds.share(
        None, "None = as in config.json; 0 also ends the attention's"
    )
    sentinel: str = kinds.text("<extra_id_{}>", "T5: how the vocabulary writes the n-th sentinel")
    rescale: float = kinds.number(
        1.0, "T5: what the residual stream is divided by, for 16-bit floats", "above 0"
    )


@dataclass(frozen=True)
class MeshConfig(Block):
    """How devices are laid out; -1 = the rest of them."""

    data: int = kinds.whole(-1, "parts of a batch")
    model: int = kinds.whole(1, "parts of heads, feed-forward widths and vocabulary")
    fsdp: bool = kinds.flag(False, "frozen weights are sharded over `data` too")
    slices: int = kinds.size(
        1, "slices of TPUs, or hosts of GPUs, between which only `data` may cross"
    )


@dataclass(frozen=True)
class TaskConfig(Block):
    """What is answered."""

    name: str = kinds.text("topics", "a known task, or custom: your own file, described below")
    chat: bool = kinds.flag(
        False, "the template up to [mask] is the user's turn of the tokenizer's own chat"
    )
    template: str = kinds.text(
        "", "empty = the task's own; form unified or nss: only what stands before the options"
    )
    words: tuple[str, ...] = kinds.texts(
        (), "label words per class, | between several of one; () = the task's own"
    )
    spaced: str = kinds.word(
        "", ("true", "false"), "label words are encoded behind a space; empty = the task's own"
    )
    option: str = kinds.text(
        "", "how {choices} writes one, as in {name}. {text}.; empty = the task's own"
    )
    fields: tuple[str, ...] = kinds.texts(
        (), "custom: text columns; nsp, cls: the texts asked, () = the task's own"
    )
    label: str = kinds.text("label", "custom: column of the label")
    labels: tuple[str, ...] = kinds.texts(
        (),
        "custom, and of tags: class names in order, or types of tags; () = found in the "
        "training examples",
    )
    vocabulary: str = kinds.path(
        "",
        "custom: file of one word per line; those of one token are the classes, and "
        "examples of other labels are left out",
    )
    choices: tuple[str, ...] = kinds.texts(
        (), "custom: columns of the choices, or one that holds a list"
    )
    metric: str = kinds.word(
        "", kinds.Words("scoring.metrics", "all_metrics"), "empty = the task's own"
    )
    positive: str = kinds.text(
        "", "the positive class of f1, f1a and answer_f1; empty = the second"
    )
    target: str = kinds.text("", "custom: column of the text to write, for head.name=text")
    answers: str = kinds.text(
        "", "custom: column of answers in the last field, for head.name=spans"
    )
    number: str = kinds.text(
        "", "custom: column of the number to predict, for head.name=regression"
    )
    limits: tuple[float, ...] = kinds.several(
        kinds.number(None, "custom: the least and the greatest that it can be", limit="")
    )
    tags: str = kinds.text("", "custom: column with a tag for every word, for head.name=tags")
    scheme: str = kinds.word(
        "",
        kinds.Words("data.tasks.tags", "SCHEMES"),
        "of these tags; empty = found in the training examples; none: each is of one word",
    )
    predicate: str = kinds.text(
        "",
        "custom: column of the word whose roles `tags` are, its index from 0 on; or of a "
        "list of such, with a list of tags for each",
    )
    entities: tuple[str, ...] = kinds.texts(
        (), "custom: where each entity of the first field stands; the labels are relations"
    )
    offsets: str = kinds.word(
        "tags",
        kinds.Words("data.tasks.readers.entities", "OFFSETS"),
        "of task.entities: tags, <e1>|</e1>; characters or words, a column of [start, end] "
        "or start|end of two; last_word: the same, the end included; text: a column of its "
        "text",
    )
    markers: tuple[str, ...] = kinds.texts(
        (),
        "words in front of and behind each entity where a template says |marked; () = @ @ #"
        " #; with task.predicate around that, () = none",
    )
    negative: str = kinds.text(
        "", "custom: the class that is no relation, which micro_f1 leaves out"
    )
    question: tuple[str, ...] = kinds.texts(
        (),
        "custom: columns that make a question, of which examples are answers; for f1a and "
        "answer_f1",
    )
    candidate: str = kinds.text("", "custom: the field of such an answer")
    candidates: tuple[str, ...] = kinds.texts(
        (),
        "custom: a column of candidates and that of the right ones; each candidate becomes "
        "an example, as task.candidate",
    )
    placeholder: str = kinds.text("", "custom: what stands for the candidate in the other columns")
    form: str = kinds.word(
        "cloze",
        kinds.Words("config.run", "forms"),
        "cloze: the words at a mask; text: T5's own text format; nsp, nss, unified, cls: as"
        " that pre-training task is asked in ppt.patterns; nss and unified answer by the "
        "name of an option",
    )
    answer: str = kinds.text(
        "",
        'T5: what is written; empty = "[mask] {label}" (cloze), "{label} [sep]" (text); '
        'GLM: "{label}", which stands in its blank',
    )
    eos: bool = kinds.flag(True, "T5: the input ends with </s>")


@dataclass(frozen=True)
class FilesConfig(Block):
    """Files, before `source`."""

    train: str = kinds.path("", "of the training examples")
    dev: str = kinds.path("", "of the examples that choose the best prompt")
    test: str = kinds.path("", "of the examples that are scored once")

    def paths(self) -> dict[str, str]:
        """Returns the files that are named, by split."""
        paths = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: path for name, path in paths.items() if path}


_SCARCE = kinds.Words("data.sampling.fewshot", "SCARCE")


@dataclass(frozen=True)
class Protocol(Option):
    """All training examples, and the task's own dev."""


@dataclass(frozen=True)
class KShot(Protocol):
    """So many examples of each class."""

    name: ClassVar[str] = "kshot"
    k: int = kinds.count(16, "examples per class for train")
    dev_k: int = kinds.count(0, "examples per class for dev; 0 = k")
    scarce: str = kinds.word(
        "raise",
        _SCARCE,
        "of a class with too few examples: an error, or train gets what there is, dev the rest",
    )


@dataclass(frozen=True)
class Balanced(Protocol):
    """So many examples in all, spread over the classes (PPT)."""

    name: ClassVar[str] = "balanced"
    n: int = kinds.size(32, "examples in all for train, and as many for dev")


@dataclass(frozen=True)
class Fraction(Protocol):
    """A share of each class."""

    name: ClassVar[str] = "fraction"
    ratio: float = kinds.number(
        0.1, "share of each class, or from 2 on examples per class", "above 0"
    )
    holdout: float = kinds.share(
        0.0, "share of each class that becomes dev; 0 = the task's own dev"
    )


@dataclass(frozen=True)
class KFold(Protocol):
    """Parts of the training examples, of which one is dev."""

    name: ClassVar[str] = "kfold"
    folds: int = kinds.size(4, "number of parts")
    fold: int = kinds.count(0, "the part that is dev")
    k: int = kinds.count(16, "examples per class in all; 0 = all")
    scarce: str = kinds.word(
        "raise", _SCARCE, "of a class with too few examples: an error, or what there is is divided"
    )


@dataclass(frozen=True)
class HoldOut(Protocol):
    """So many training examples become dev."""

    name: ClassVar[str] = "holdout"
    size: int = kinds.size(500, "training examples that become dev, of each class its share")


@dataclass(frozen=True)
class Listed(Protocol):
    """The examples that a file lists."""

    name: ClassVar[str] = "listed"
    rows: str = kinds.path("", "JSONL file with the numbers of each seed's examples")


@dataclass(frozen=True)
class DataConfig(Block):
    """Which examples, and how they are laid into batches."""

    source: str = kinds.path(
        "", "folder, hub, hub:owner/name[:subset], tfds:name, package; empty = the task's own"
    )
    files: FilesConfig = nested(FilesConfig)
    test_split: str = kinds.word(
        "test",
        ("test", "dev"),
        "split of the data set that is scored as test; dev only where data.protocol samples"
        " dev from train",
    )
    only: str = kinds.text(
        "", "COLUMN=VALUE: examples with another value are left out, of every split"
    )
    cache_dir: str = kinds.path("", "of hub and TFDS downloads")
    protocol: Protocol = choice(
        Protocol,
        KShot,
        Balanced,
        Fraction,
        KFold,
        HoldOut,
        Listed,
        note="how train and dev are sampled; empty = all",
    )
    seed: int = kinds.whole(0, "data seed: which examples the protocol samples", kinds.SEED)
    batch: int = kinds.size(32, "examples per step, over all hosts")
    eval_batch: int = kinds.size(64, "examples per batch in evaluation")
    max_len: int = kinds.size(128, "tokens of an example, soft tokens included")
    max_target: int = kinds.size(64, "tokens of a free text, its end included")
    multiple: int = kinds.size(8, "batches are padded to multiples of this length")
    group: int = kinds.size(
        1, "sorts the examples of so many batches by length, which saves padding; 1 = off"
    )
    side: str = kinds.word("right", ("right", "left"), "where padding stands")


@dataclass(frozen=True)
class DemosConfig(Block):
    """Demonstrations: training examples that are shown with their labels beside each example."""

    per_class: int = kinds.count(0, "of each class, behind the example (GPT-2: in front); 0 = none")
    total: int = kinds.count(
        0, "or of all classes in random order, in front, as many as fit; 0 = none"
    )
    exact: int = kinds.count(0, "or exactly so many of these, none of them cut; 0 = none")
    samples: int = kinds.size(
        1, "sets for each example; each is trained on as one, evaluation averages scores"
    )
    similar: float = kinds.number(
        1.0, "share of a class, the most similar, to sample from", "in (0, 1]"
    )
    encoder: str = kinds.path("", "similar below 1: a BERT whose mean-pooled states are compared")
    limit: int = kinds.count(0, "tokens of each of their texts, at most; 0 = what fits")
    own_limit: int = kinds.count(
        0, "tokens of each text of the example itself, at most; 0 = what fits"
    )


@dataclass(frozen=True)
class CorpusConfig(Block):
    """Running text, for `adapt`, `annotate` and `pretrain`."""

    path: str = kinds.path(
        "", "folder, file or glob of .txt, JSONL or Parquet; hub:owner/name, tfds:name"
    )
    field: str = kinds.text("text", "JSONL, Parquet, hub, TFDS: where a document stands")
    split: str = kinds.text("train", "hub, TFDS")
    documents: str = kinds.word(
        "file",
        kinds.Words("corpus.read", "DOCUMENTS"),
        ".txt: a document is a file, a line, or what blank lines divide",
    )
    paragraphs: str = kinds.word(
        "line",
        kinds.Words("corpus.split", "PARAGRAPHS"),
        "a paragraph ends with a line, or at a blank one",
    )
    units: str = kinds.word(
        "paragraph", kinds.Words("corpus.split", "UNITS"), "what a text is divided into"
    )
    language: str = kinds.text("en", "of sentences")
    max_document: int = kinds.size(2**24, "bytes; a longer one is an error")
    on_error: str = kinds.word(
        "raise",
        kinds.Words("corpus.read", "ON_ERROR"),
        "what to do with a document that cannot be read",
    )
    store: str = kinds.path("", "folder where the indexed text is kept; empty = in the workdir")
    processes: int = kinds.count(0, "processes that index the text; 0 = one per core, at most 6")
    held_out: float = kinds.share(0.01, "share of the documents that is dev, sampled by data.seed")
    dev_rows: int = kinds.size(512, "rows of them that are scored, at most")


@dataclass(frozen=True)
class Objective(Option):
    """What a backbone is pre-trained by, in rows of data.max_len tokens; none of them."""


@dataclass(frozen=True)
class OnText(Objective):
    """What every objective on running text has."""

    packed: bool = kinds.flag(True, "rows are filled with several documents")
    apart: bool = kinds.flag(False, "packed: attention stays inside a document")
    examples: int = kinds.count(10, "held-out rows that are written out as the model fills them")


@dataclass(frozen=True)
class MaskedLM(OnText):
    """Masked language modelling."""

    name: ClassVar[str] = "mlm"
    rate: float = kinds.share(0.15, "share of the tokens")
    whole_words: bool = kinds.flag(False, "all subwords of a word or none")


@dataclass(frozen=True)
class ReplacedTokens(MaskedLM):
    """Replaced-token detection."""

    name: ClassVar[str] = "rtd"
    weight: float = kinds.number(50.0, "of the discriminator's loss")
    generator: float = kinds.number(
        0.25, "the generator's width, of the discriminator's", "above 0"
    )
    generator_layers: float = kinds.number(1.0, "and its layers", "above 0")
    generator_path: str = kinds.path(
        "", "a masked LM to begin with; empty = a randomly initialised one of that size"
    )


@dataclass(frozen=True)
class CausalLM(OnText):
    """Causal language modelling."""

    name: ClassVar[str] = "clm"


@dataclass(frozen=True)
class PrefixLM(OnText):
    """Prefix language modelling."""

    name: ClassVar[str] = "prefix_lm"
    share: float = kinds.share(0.0, "of a row that is read, in (0, 1); 0 = random for each row")


@dataclass(frozen=True)
class SpanCorruption(OnText):
    """Span corruption."""

    name: ClassVar[str] = "span_corruption"
    rate: float = kinds.share(0.15, "share of the tokens")
    span: float = kinds.number(3.0, "mean length", "above 0")


@dataclass(frozen=True)
class PPTConfig(Block):
    """What `pretrain` learns a prompt by; head, task.answer and .eos say how."""

    task: str = kinds.word("", _TASKS, "of `pretrain`")
    patterns: str = kinds.word(
        "en",
        kinds.Words("corpus.ppt", "PATTERNS"),
        "en: as released; en_paper: as published; zh: Chinese; en_end, zh_end: [mask] comes"
        " last; of task.form too",
    )
    hard: bool = kinds.flag(
        False, "task.form=nsp, nss, cls: a hard prompt stands beside the soft one"
    )
    least: int = kinds.size(2, "unified: options of an example, at least")
    most: int = kinds.size(16, "and at most")
    matched: bool = kinds.flag(
        True, "nsp, nss, unified: negatives are as long as the neighbour of a text"
    )
    annotations: str = kinds.path("", "cls: folder with the label of each unit of the text")
    thresholds: tuple[float, ...] = kinds.several(
        kinds.share(0.0, "cls: what a label's probability exceeds, by class; () = as released")
    )


@dataclass(frozen=True)
class Schedule(Option):
    """The factor on the learning rate by the step; this one is 1."""

    name: ClassVar[str] = "constant"


@dataclass(frozen=True)
class Linear(Schedule):
    """To 0 at the last step."""

    name: ClassVar[str] = "linear"


@dataclass(frozen=True)
class Exponential(Schedule):
    """A factor per epoch."""

    name: ClassVar[str] = "exponential"
    gamma: float = kinds.number(0.95, "factor per epoch", "above 0")


@dataclass(frozen=True)
class Warmup(Schedule):
    """What schedules with a warmup share."""

    warmup_steps: int = kinds.count(0, "steps of the warmup")
    warmup_ratio: float = kinds.share(0.0, "the same as a share of the steps, where they are 0")

    def warmup(self, total: int) -> int:
        """Returns the steps of the warmup of a run of `total` steps."""
        # A share below 1 may round to all of a short run.
        return self.warmup_steps or min(round(self.warmup_ratio * total), total - 1)


@dataclass(frozen=True)
class WarmupLinear(Warmup):
    """Up over the warmup, then along a line to 0 at the last step."""

    name: ClassVar[str] = "warmup_linear"


@dataclass(frozen=True)
class Cosine(Warmup):
    """Up over the warmup, then along half a cosine to 0 at the last step."""

    name: ClassVar[str] = "cosine"


@dataclass(frozen=True)
class InverseSqrt(Warmup):
    """1 / sqrt(step), at first 1 / sqrt(warmup_steps) (Raffel et al. 2020, section 3.1.2)."""

    name: ClassVar[str] = "inverse_sqrt"


@dataclass(frozen=True)
class OptimConfig(Block):
    """How numbers are learned."""

    name: str = kinds.word("adamw", kinds.Words("training.optim", "OPTIMIZERS"), "the optimizer")
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
        note="of the learning rate, as a factor, see training/optim.py",
    )
    weight_decay: float = kinds.number(
        0.0, "of a step: adamw multiplies it by the learning rate, adafactor does not"
    )
    no_decay: tuple[str, ...] = kinds.texts(
        (".*/bias\\d*", ".*norm/scale"), "patterns spared by weight decay", is_pattern=True
    )
    clip: float = kinds.number(1.0, "gradients are clipped to this global norm; 0 = off")
    b1: float = kinds.share(0.9, "Adam's beta_1")
    b2: float = kinds.share(0.999, "Adam's beta_2")
    eps: float = kinds.number(1e-08, "Adam's epsilon", "above 0")
    decay_rate: float = kinds.share(0.8, "adafactor")
    scaled: bool = kinds.flag(
        False, "adafactor: as T5 was trained, lr relative to a matrix's size; factored"
    )
    accumulate: int = kinds.size(1, "parts that a batch is cut into")
    smoothing: float = kinds.share(0.0, "label smoothing")


@dataclass(frozen=True)
class CacheConfig(Block):
    """States of the frozen layers below all that trains, computed once and kept."""

    where: str = kinds.word("", ("host", "disk"), "host: in memory; empty = computed in every step")
    folder: str = kinds.path("", "disk: where; empty = in the workdir, or that of a grid")
    dtype: str = kinds.word("float32", _DTYPES, "of what is kept")
    limit: float = kinds.number(
        8.0, "GiB on each process, for all runs of a grid; what needs more is refused", "above 0"
    )


@dataclass(frozen=True)
class GenerateConfig(Block):
    """How a free text is written."""

    max_new: int = kinds.size(64, "tokens")
    beams: int = kinds.size(1, "1 = greedy")
    length_penalty: float = kinds.number(
        1.0, "beams are ranked by log-probability / length ** this", ""
    )
    early_stopping: str = kinds.word(
        "false", ("true", "false", "never"), "true: stop at `beams` ended texts"
    )


@dataclass(frozen=True)
class GridConfig(Block):
    """A grid of runs that train as one program, each in a folder of its own; of a list that is
    empty the config's own value is taken.
    """

    tasks: tuple[str, ...] = kinds.several(kinds.word("", _TASKS, "ppt.task, of `pretrain`"))
    seeds: tuple[int, ...] = kinds.several(kinds.whole(0, "seed", kinds.SEED))
    data_seeds: tuple[int, ...] = kinds.several(kinds.whole(0, "data.seed", kinds.SEED))
    folds: tuple[int, ...] = kinds.several(kinds.count(0, "data.protocol.fold, of kfold"))
    lr: tuple[float, ...] = kinds.several(kinds.number(0.0, "optim.lr"))
    weight_decay: tuple[float, ...] = kinds.several(kinds.number(0.0, "optim.weight_decay"))
    starts: tuple[str, ...] = kinds.texts((), "prompt.start")
    texts: tuple[str, ...] = kinds.texts((), "prompt.text")
    words: tuple[str, ...] = kinds.texts((), "task.words of each run, as in bad,good")
    size: int = kinds.count(
        0, "runs at once; 0 = all that memory holds, on a CPU those with the same batches"
    )


@dataclass(frozen=True)
class SharedConfig(Block):
    """Several tasks that train one prompt, each with a head of its own."""

    tasks: tuple[str, ...] = kinds.texts(
        (),
        "JSON files, one per task: fields of task, data and head that differ from the "
        "config's own; a task is called by its file",
    )
    temperature: float = kinds.number(
        1.0,
        "a task's share of the steps is its number of examples to the power of 1 / this",
        "above 0",
    )


@dataclass(frozen=True)
class TrainConfig(Block):
    """How long, and when it is scored and saved; a total that is given replaces the config's."""

    total_steps: int = kinds.count(0, "steps")
    total_epochs: float = kinds.number(10.0, "passes over the training examples")
    total_examples: int = kinds.count(0, "examples")
    eval_steps: int = kinds.count(0, "evaluate on dev every n steps; 0 = by epochs")
    eval_epochs: float = kinds.number(1.0, "and every n epochs")
    patience: int = kinds.count(0, "evaluations without gain before the run stops; 0 = off")
    save_steps: int = kinds.count(0, "save every n steps; 0 = at every evaluation")
    keep: int = kinds.size(
        2, "newest saved steps that stay in the workdir; `inspect` reads all of them"
    )
    plot: bool = kinds.flag(True, "draw curves.png at the end, where matplotlib is installed")
    log_steps: int = kinds.size(10, "metrics of every n-th step are written")
    max_streak: int = kinds.size(10, "steps in a row that are not finite before the run stops")
    test: bool = kinds.flag(True, "score the test split with the best prompt at the end")
    profile: int = kinds.count(
        0,
        "steps of one run that are traced into its folder, behind the first two; also "
        "--profile=STEPS",
    )
    init_head: bool = kinds.flag(
        False, "the head starts from the export that prompt.init names, too"
    )
    tracker: str = kinds.word(
        "tensorboard",
        kinds.Words("training.trackers", "TRACKERS"),
        "tensorboard: event files in the workdir; wandb, trackio: a run there, named after "
        "the workdir; none: metrics.jsonl alone",
    )
    compilation_cache: str = kinds.text(
        "", "folder of compiled programs; empty = ~/.cache/jaxprompt/compiled, none = not kept"
    )


@dataclass(frozen=True)
class RunConfig(Block):
    """All that a run depends on."""

    seed: int = kinds.whole(0, "train seed: initial values, order of examples, dropout", kinds.SEED)
    rng: str = kinds.word(
        "threefry",
        kinds.Words("rng", "GENERATORS"),
        "random number generator of dropout. threefry: the same masks on every mesh and "
        "device; rbg: the device's own, whose masks may change with mesh, device and "
        "compiler version",
    )
    backbone: BackboneConfig = nested(BackboneConfig)
    trainable: tuple[str, ...] = kinds.texts(
        (), "patterns of parameter names; () = the method's own", is_pattern=True
    )
    mesh: MeshConfig = nested(MeshConfig)
    task: TaskConfig = nested(TaskConfig)
    data: DataConfig = nested(DataConfig)
    demos: DemosConfig = nested(DemosConfig)
    corpus: CorpusConfig = nested(CorpusConfig)
    objective: Objective = choice(
        Objective,
        MaskedLM,
        ReplacedTokens,
        CausalLM,
        PrefixLM,
        SpanCorruption,
        note="what `adapt` pre-trains a backbone by, in rows of data.max_len tokens",
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


# What may change between two runs in one workdir: nothing here changes a number.
FREE: tuple[str, ...] = (
    "backbone.path",
    "train.tracker",
    "train.log_steps",
    "train.test",
    "data.cache_dir",
)
FREE += ("train.compilation_cache", "train.plot", "train.keep", "train.profile")
FREE += ("mesh", "cache.where", "cache.folder", "cache.limit")  # only the order of sums
# What may besides, once trained: how it was learned, how the backbone runs, what is scored. The
# seed of the data says which demonstrations are shown.
OF_DATA = tuple(f"data.{name}" for name in DataConfig.declared() if name != "seed")
FREE_TRAINED: tuple[str, ...] = (
    "optim",
    "train",
    *OF_DATA,
    "generate",
    "cache",
    "backbone.dtype",
    "backbone.stack",
)
FREE_TRAINED += ("backbone.remat", "backbone.attention", "backbone.reads", "backbone.once")
