"""Every field of a run, with its default. Other configs start from `get_config()` and change it.

The argument is a method of configs/parts/methods.py, with its learning rate and what it trains:
`--config=configs/base.py:soft`, or `:zero_shot`.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs.parts import heads
from configs.parts.methods import METHODS
from jaxprompt.errors import choose


def get_config(method: str = "") -> ConfigDict:
    """Returns the defaults: P-tuning v2 with a linear head on the backbone's pooler."""
    c = ConfigDict()
    c.seed = 0  # train seed: initial values, order of examples, dropout

    c.backbone = ConfigDict()
    c.backbone.path = ""  # folder of save_pretrained, hub id, or pkg:PACKAGE/FOLDER
    c.backbone.revision = ""  # of a hub id
    c.backbone.init = ""  # adapt: a config.json whose weights are drawn; `path` gives the tokenizer
    c.backbone.family = ""  # bert | roberta | electra | t5 | gpt2; "" = model_type of config.json
    c.backbone.dtype = "float32"  # float32 | bfloat16, of the frozen weights and the activations
    c.backbone.stack = "scan"  # scan: compile one layer; unroll: compile them all
    c.backbone.remat = "none"  # none | dots | full: what the backward pass recomputes
    # auto: the device's own kernel where it has one for these inputs | fused: also for short texts
    # on TPUs, elsewhere scores are computed again in the backward pass | einsum: two products
    c.backbone.attention = "auto"  # auto | einsum | fused
    c.backbone.dropout = placeholder(float)  # None = as in config.json; 0 also ends the attention's
    c.backbone.sentinel = "<extra_id_{}>"  # T5: how the vocabulary writes the n-th sentinel
    c.backbone.rescale = 1.0  # T5: what the residual stream is divided by, for 16-bit floats

    # The method; its fields are those of jaxprompt/prompts/<name>.py. Parts replace this block.
    c.prompt = ConfigDict()
    c.prompt.name = "prefix"
    c.prompt.length = 20
    c.prompt.init = ""  # an export to start from; "" = draws, or what prompt.start says
    c.prompt.layers = ""  # interval of layers, as in "17-24"; "" = all
    c.prompt.decoder = 0  # T5: length in the decoder's own attention; 0 = none
    c.prompt.decoder_layers = ""  # interval of the decoder's layers, as in "1-6"; "" = all
    c.prompt.cross = 0  # T5: length in the decoder's attention over the encoder; 0 = none
    c.prompt.cross_layers = ""  # the same of that attention
    c.prompt.hidden = 0  # width of the MLP that computes the prefix; 0 = none
    c.prompt.dropout = 0.1  # of keys and values
    c.prompt.shift = True  # the text's positions start at `length`
    c.prompt.start = "normal"  # normal | zero | text: what the frozen model gives `text`
    c.prompt.scale = 0.02  # normal: standard deviation of the initial values
    c.prompt.text = ""  # text: what it starts from the keys and values of
    c.trainable = ()  # patterns of parameter names; () = the method's own

    c.mesh = ConfigDict()  # how devices are laid out; -1 = the rest of them
    c.mesh.data = -1  # parts of a batch
    c.mesh.model = 1  # parts of heads, feed-forward widths and vocabulary
    c.mesh.fsdp = False  # frozen weights are divided over `data` too
    c.mesh.slices = 1  # slices of TPUs, or hosts of GPUs, between which only `data` may cross

    # The kind of answer; its fields are those of jaxprompt/heads/<name>.py. Parts replace this
    # block: linear | verbalizer (label words, on the backbone's own LM head) | text (free text)
    # | tags (a tag for every word) | spans (an answer that stands in a text)
    heads.linear(c)

    c.task = ConfigDict()
    c.task.name = "topics"  # a known task, or custom: your own file, described below
    c.task.template = ""  # "" = the task's own; unified, nss: of what stands before the options
    c.task.words = ()  # label words, an entry a class, "|" between several; () = the task's own
    c.task.spaced = ""  # label words are encoded behind a space: true | false; "" = the task's own
    c.task.option = ""  # how {choices} writes one, as in "{name}. {text}."; "" = the task's own
    c.task.fields = ()  # custom: text columns; nsp, cls: the texts asked, () = the task's own
    c.task.label = "label"  # custom: column of the label
    c.task.labels = ()  # custom: class names in order; () = found in the training rows
    c.task.choices = ()  # custom: columns of the choices, or one that holds a list
    # of classes accuracy | f1 | macro_f1 | matthews, of texts exact_match | rouge_l | bleu, of tags
    # entity_f1, of spans f1 | exact_match
    c.task.metric = ""  # "" = the task's own
    c.task.target = ""  # custom: column of the text to write, for head.name=text
    c.task.answers = ""  # custom: column of answers in the last field, for head.name=spans
    c.task.tags = ""  # custom: column with a tag for every word, for head.name=tags
    c.task.scheme = ""  # of these tags: iob2 | iob1 | bioes; "" = found in the training rows
    # cloze: the words at a mask | text: T5's own text format | nsp, nss, unified, cls: as that
    # pre-training task is asked in ppt.patterns; nss and unified answer by the name of an option
    c.task.form = "cloze"  # cloze | text | nsp | nss | unified | cls
    c.task.answer = ""  # T5: what is written; "" = "[mask] {label}" (cloze), "{label} [sep]" (text)
    c.task.eos = True  # T5: the input ends with </s>

    c.data = ConfigDict()
    c.data.source = ""  # folder, hub:owner/name[:subset], tfds:name; "" = where the task lives
    c.data.files = ConfigDict({"train": "", "dev": "", "test": ""})  # files, before `source`
    c.data.cache_dir = ""  # of hub and TFDS downloads
    c.data.protocol = ""  # kshot | balanced | fraction | kfold | holdout | listed; "" = all rows
    c.data.seed = 0  # data seed: which rows the protocol draws
    c.data.k = 16  # kshot: rows a class for train; kfold: rows a class in all, 0 = all rows
    c.data.dev_k = 0  # kshot: rows a class for dev; 0 = k
    c.data.n = 32  # balanced: rows in all for train, and as many for dev
    c.data.ratio = 0.1  # fraction: share of each class, or from 2 on rows of each class
    c.data.holdout = 0.0  # fraction: share of each class that becomes dev; 0 = the task's own dev
    c.data.folds = 4  # kfold: number of parts
    c.data.fold = 0  # kfold: the part that is dev
    c.data.size = 500  # holdout: rows of train that become dev, of each class its share
    c.data.rows = ""  # listed: JSONL file with the row numbers of each seed
    c.data.batch = 32  # examples a step, over all hosts
    c.data.eval_batch = 64  # examples a batch in evaluation
    c.data.max_len = 128  # tokens of an example, soft tokens included
    c.data.max_target = 64  # tokens of a free text, its end included
    c.data.multiple = 8  # batches are padded to multiples of this length
    c.data.group = 1  # batches whose examples are sorted by length together; 1 = none
    c.data.side = "right"  # where padding stands

    c.corpus = ConfigDict()  # running text, for `adapt`, `annotate` and `pretrain`
    c.corpus.path = ""  # folder, file or glob of .txt, JSONL or Parquet; hub:owner/name, tfds:name
    c.corpus.field = "text"  # JSONL, Parquet, hub, TFDS: where a document stands
    c.corpus.split = "train"  # hub, TFDS
    c.corpus.documents = "file"  # .txt: a document is a file | a line | what blank lines divide
    c.corpus.paragraphs = "line"  # a paragraph ends with a line | at a blank one
    c.corpus.units = "paragraph"  # paragraph | sentence
    c.corpus.language = "en"  # of sentences
    c.corpus.max_document = 2**24  # bytes; a longer one is an error
    c.corpus.on_error = "raise"  # raise | skip: of a document that cannot be read
    c.corpus.store = ""  # folder where the indexed text is kept; "" = in the workdir
    c.corpus.processes = 0  # that index it; 0 = one a core, at most 6
    c.corpus.held_out = 0.01  # share of the documents that is dev, drawn by data.seed
    c.corpus.dev_rows = 512  # rows of them that are scored, at most

    c.objective = ConfigDict()  # what a backbone is pre-trained by, in rows of data.max_len tokens
    c.objective.name = ""  # mlm | rtd | clm | prefix_lm | span_corruption
    c.objective.packed = True  # rows are filled with several documents
    c.objective.apart = False  # packed: attention stays inside a document
    c.objective.rate = 0.15  # mlm, rtd, span_corruption: share of the tokens
    c.objective.whole_words = False  # mlm, rtd: all pieces of a word or none
    c.objective.span = 3.0  # span_corruption: mean length
    c.objective.share = 0.0  # prefix_lm: of a row that is read; 0 = drawn anew for each
    c.objective.weight = 50.0  # rtd: of the discriminator's loss
    c.objective.generator = 0.25  # rtd: the generator's width, of the discriminator's
    c.objective.generator_layers = 1.0  # and its layers
    c.objective.generator_path = ""  # rtd: a masked LM to begin with; "" = a fresh one of that size
    c.objective.examples = 10  # held-out rows that are written out as the model fills them

    c.ppt = ConfigDict()  # what `pretrain` learns a prompt by; head, task.answer and .eos say how
    c.ppt.task = ""  # nsp | nss | unified | cls
    c.ppt.patterns = "en"  # en: as released | en_paper: as published | zh; of task.form too
    c.ppt.hard = False  # task.form=nsp, nss, cls: a hard prompt stands beside the soft one
    c.ppt.least = 2  # unified: options of an example, at least
    c.ppt.most = 16  # and at most
    c.ppt.matched = True  # nsp, nss, unified: negatives are as long as the neighbour of a text
    c.ppt.annotations = ""  # cls: folder with the label of each unit of the text
    c.ppt.thresholds = ()  # cls: what a label's probability exceeds, by class; () = as released

    c.optim = ConfigDict()
    c.optim.name = "adamw"  # adamw | adafactor
    c.optim.lr = 1e-2
    c.optim.lr_head = placeholder(float)  # None = lr
    c.optim.lr_backbone = placeholder(float)  # None = lr
    # constant | linear | warmup_linear | cosine | exponential | inverse_sqrt
    c.optim.schedule = "linear"  # of the rate, as a factor
    c.optim.warmup_steps = 0  # warmup_linear, cosine; inverse_sqrt: steps at 1 / sqrt(warmup_steps)
    c.optim.gamma = 0.95  # exponential: factor an epoch
    c.optim.weight_decay = 0.0
    c.optim.no_decay = (r".*/bias", r".*norm/scale")  # patterns spared by weight decay
    c.optim.clip = 1.0  # global norm of the gradient; 0 = off
    c.optim.b1 = 0.9
    c.optim.b2 = 0.999
    c.optim.eps = 1e-8
    c.optim.decay_rate = 0.8  # adafactor
    c.optim.scaled = False  # adafactor: as T5 was trained, lr relative to a matrix's size; factored
    c.optim.accumulate = 1  # parts that a batch is cut into
    c.optim.smoothing = 0.0  # label smoothing

    c.cache = ConfigDict()  # what layers below all that trains give: computed once, then kept
    c.cache.where = ""  # host (memory) | disk; "" = computed in every step
    c.cache.folder = ""  # disk: where; "" = in the workdir
    c.cache.dtype = "float32"  # float32 | bfloat16
    c.cache.limit = 8.0  # GiB; a run that needs more is refused

    c.generate = ConfigDict()  # how a free text is written
    c.generate.max_new = 64  # tokens
    c.generate.beams = 1  # 1 = greedy
    c.generate.length_penalty = 1.0  # beams are ranked by log-probability / length ** this
    c.generate.early_stopping = "false"  # true: stop at `beams` ended texts | false | never

    # A grid of runs that train as one program, each in a folder of its own. Of a list that is empty
    # the config's own value is taken.
    c.runs = ConfigDict()
    c.runs.tasks = ()  # ppt.task, of `pretrain`
    c.runs.seeds = ()  # seed
    c.runs.data_seeds = ()  # data.seed
    c.runs.lr = ()  # optim.lr
    c.runs.weight_decay = ()  # optim.weight_decay
    c.runs.starts = ()  # prompt.start
    c.runs.texts = ()  # prompt.text
    c.runs.words = ()  # task.words, an entry a run: "bad,good"
    c.runs.size = 0  # runs at once; 0 = all that memory holds, on a CPU those with the same batches

    c.train = ConfigDict()  # exactly one total is above 0
    c.train.total_steps = 0
    c.train.total_epochs = 10.0
    c.train.total_examples = 0
    c.train.eval_steps = 0  # evaluate on dev every n steps; 0 = by epochs
    c.train.eval_epochs = 1.0  # and every n epochs
    c.train.patience = 0  # evaluations without gain before the run stops; 0 = off
    c.train.save_steps = 0  # save every n steps; 0 = at every evaluation
    c.train.log_steps = 10  # metrics of every n-th step are written
    c.train.max_streak = 10  # steps in a row that are not finite before the run stops
    c.train.test = True  # score the test split with the best prompt at the end
    c.train.tensorboard = True  # write event files
    c.train.compilation_cache = ""  # folder of compiled programs; "" = the user's own, or none
    if method:
        METHODS[choose("the method", method, METHODS)](c)
    return c
