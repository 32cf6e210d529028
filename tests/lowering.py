"""Steps of tiny models, lowered for devices that are not there, and what their programs say."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import probes
from tiny import CAUSAL, CONFIGS, MODEL_HEADS, block_sizes, make_batch

from jaxprompt.backbones import make_backbone, with_lm_states
from jaxprompt.heads import linear, make_head, verbalizer
from jaxprompt.heads.discriminator import ClassTokens
from jaxprompt.heads.label_rows import LabelRows
from jaxprompt.heads.multi_spans import JudgedTokens
from jaxprompt.heads.pretraining import TargetHead
from jaxprompt.heads.spans import SpanScores
from jaxprompt.heads.tags import TagScores
from jaxprompt.heads.topics import Topics
from jaxprompt.heads.verbalizer import AnswerHead
from jaxprompt.layers.reading import TargetScores
from jaxprompt.layers.word_rows import pack_ids
from jaxprompt.models.generation import (
    Search,
    add_room,
    best_texts,
    continue_rows,
    replace_rows,
)
from jaxprompt.models.model import Model, backbone_shapes
from jaxprompt.models.sampling import Sampling, make_row_keys
from jaxprompt.parallel.sharding import DATA, Placement, Target, make_placement, with_placement
from jaxprompt.planning.compilers import trace_without_gpu
from jaxprompt.prompts import make_prompt
from jaxprompt.rng import key_for
from jaxprompt.runs import replaced_tokens
from jaxprompt.runs.grid.batched_steps import PerRun, RunsPlacement, make_group_step
from jaxprompt.scoring.losses import (
    count_classes,
    count_hits,
    cross_entropy,
    full_vocabulary,
    target_loss,
    text_loss,
)
from jaxprompt.training.evaluation import generation_step, shared_prefix_fn
from jaxprompt.training.refilling import can_refill, make_start_step
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_eval_step, make_train_step
from jaxprompt.tree import (
    cast,
    is_plane,
    merge,
    split_layers,
    split_trainable,
    trainable_mask,
    unflatten,
)
from jaxprompt.types import Objective, Role, SharedPrefix, TaskInfo

H100, A100, V100 = (Target("gpu", capability) for capability in (9.0, 8.0, 7.0))
TPU = Target("tpu")
PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}
WORKS = ("train", "evaluate", "predict", "generate", "grid", "pretrain", "adapt")
LEARNS = ("train", "grid", "pretrain", "adapt")
# Heads of 8, which cuDNN takes, and widths that tell a product of a weight by its shape.
WIDTH, HEADS, KEYS, SIZE, MLP, VOCAB, PLACES = 32, 4, 2, 8, 40, 56, 640
_SIZES = {
    "gpt2": dict(n_embd=WIDTH, n_head=HEADS, n_inner=MLP, n_positions=PLACES, vocab_size=VOCAB),
    "glm": dict(
        hidden_size=WIDTH, num_attention_heads=HEADS, max_sequence_length=PLACES, vocab_size=VOCAB
    ),
    "llama": dict(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        intermediate_size=MLP,
        vocab_size=VOCAB,
        max_position_embeddings=PLACES,
    ),
    "bart": dict(
        d_model=WIDTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=MLP,
        decoder_ffn_dim=MLP,
        vocab_size=VOCAB,
        max_position_embeddings=PLACES,
    ),
    "distilbert": dict(
        dim=WIDTH, n_heads=HEADS, hidden_dim=MLP, vocab_size=VOCAB, max_position_embeddings=PLACES
    ),
    "opt": dict(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_dim=MLP,
        vocab_size=VOCAB,
        max_position_embeddings=PLACES,
    ),
    "t5": dict(d_model=WIDTH, d_kv=SIZE, num_heads=HEADS, d_ff=MLP, vocab_size=VOCAB),
}
_SIZES["eurobert"] = _SIZES["llama"]
_T5GEMMA = _SIZES["llama"] | dict(
    num_hidden_layers=2, head_dim=SIZE, sliding_window=30, query_pre_attn_scalar=8
)
_SIZES["t5gemma"] = dict(encoder=_T5GEMMA, decoder=_T5GEMMA)
_ENCODER = dict(
    hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=MLP, vocab_size=VOCAB,
    max_position_embeddings=PLACES,
)  # fmt: skip
# Llamas whose local layers see a window, with caps or norms of heads; a DeBERTa's decoder; a T5.
KINDS = {
    "gemma2": dict(
        model_type="gemma2", head_dim=SIZE, sliding_window=7, query_pre_attn_scalar=8,
        attn_logit_softcapping=20.0,
    ),
    "gemma3": dict(
        model_type="gemma3_text", head_dim=SIZE, sliding_window=12, query_pre_attn_scalar=8,
        sliding_window_pattern=2,
    ),
    "mistral": dict(model_type="mistral", head_dim=SIZE, sliding_window=517),
    "qwen3": dict(model_type="qwen3", head_dim=SIZE),
    "cohere2": dict(model_type="cohere2", sliding_window=12, sliding_window_pattern=2),
    "olmo3": dict(model_type="olmo3", sliding_window=12),
    "phi3": dict(model_type="phi3", partial_rotary_factor=0.5),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(
        model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=SIZE,
        sliding_window=7,
    ),
    "mask_decoder": dict(position_biased_input=False),
    "wide_heads": dict(d_kv=16),
}  # fmt: skip
WEIGHTS = {
    (WIDTH, MLP), (MLP, WIDTH), (WIDTH, HEADS, SIZE), (HEADS, SIZE, WIDTH), (VOCAB, WIDTH),
    (WIDTH, VOCAB), (WIDTH, WIDTH), (WIDTH, KEYS, SIZE), (4, WIDTH, MLP), (4, MLP, WIDTH),
}  # fmt: skip
RUNS, CLASSES = 2, 3
# Of an LSTM of 12 a direction and the MLP behind it, and of three convolutions of 12.
ENCODER = {12, 20, 24, 36, 48}
IPT = {
    "ipt": {}, "ipt_added": {"on": "prefix"},
    "ipt_lstm": {"encoder": "lstm", "fixed": True, "hidden": 12},
    "ipt_cnn": {"on": "prefix", "added": False, "encoder": "cnn", "fixed": True, "hidden": 12},
}  # fmt: skip
HEAD_MODULES = {
    "tags": TagScores(CLASSES), "spans": SpanScores(), "label_rows": LabelRows((1,) * CLASSES),
    "word_rows": LabelRows((2,) * CLASSES),
    "discriminator": ClassTokens(CLASSES, bias=True), "multi_spans": JudgedTokens(),
    "topics": Topics(CLASSES), "text": TargetScores(),
}  # fmt: skip
TX = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to lower, in bfloat16."""

    family: str = "bert"
    work: str = "train"
    method: str = "prefix"
    length: int = 16  # of the prompt
    tokens: int = 24
    dropout: float = 0.0
    mesh: tuple[int, int, bool] = (1, 1, False)  # data, model, fsdp
    side: str = "right"
    target: Target = H100
    attention: str = "auto"
    head: str = ""  # of HEAD_MODULES; "" = what the work has
    quantize: str = "none"
    kind: str = ""  # of KINDS; "" = the plainest of a family
    front: bool = False  # the soft tokens stand in front of all rows, and run once
    rng: str = "threefry"
    attention_dropout: float | None = None
    separate: bool = False  # layers are separate arrays
    remat: str = "none"
    sampled: bool = False  # texts are samples, not beams
    packed: bool = False  # a row has two documents

    def __str__(self):
        data, model, fsdp = self.mesh
        words = [self.target.platform, self.family, self.work, f"{self.method}{self.length}"]
        words += [f"T{self.tokens}", f"{data}x{model}" + "fsdp" * fsdp]
        words += ["dropout"] * (self.dropout > 0) + ["hidden"] * (self.attention_dropout == 0)
        words += [self.side] * (self.side != "right")
        words += [self.head] * bool(self.head) + [self.quantize] * (self.quantize != "none")
        words += [self.kind] * bool(self.kind) + ["front"] * self.front
        words += [self.rng] * (self.rng != "threefry") + ["separate"] * self.separate
        words += [self.remat] * (self.remat != "none") + ["sampled"] * self.sampled
        words += ["packed"] * self.packed
        return "-".join(words)


def make_model(case: Case):
    """Makes the model of a case and the terms of its loss."""
    hf = CONFIGS[case.family] | _SIZES.get(case.family, _ENCODER)
    hf |= KINDS.get(case.kind, {})
    if case.quantize != "none":
        hf |= block_sizes(case.family) | (dict(head_dim=32) if case.kind else {})
    make = lambda hf, heads: make_backbone(
        "electra" if case.family == "electra" else case.family, hf, heads, dtype="bfloat16",
        stack="scan", dropout=case.dropout, attention_dropout=case.attention_dropout,
        attention=case.attention, remat=case.remat,
    )  # fmt: skip
    more_heads = (case.kind,) if case.kind == "mask_decoder" else ()
    backbone = with_lm_states(
        make(hf, (*MODEL_HEADS.get(case.family, ("pooler", "mlm")), *more_heads))
    )
    if case.work == "adapt" and case.family == "electra":
        pair = replaced_tokens.make_pair(make(hf, ("mlm",)), backbone)
        return pair, replaced_tokens.make_objectives()
    if case.work == "adapt":
        model = Model(backbone, make_prompt("none", backbone.dims), {"main": TargetHead()})
        return model, [Objective("main", target_loss, sums=count_hits)]
    prompt, head = make_method(case, backbone.dims), linear.Classifier(CLASSES, pooler_of(backbone))
    loss = Objective("main", cross_entropy)
    if case.work == "pretrain":
        words = np.arange(4).reshape(4, 1, 1)
        head = verbalizer.LabelWords(np.arange(5, 9), words, 0 * words, "full")
        head = AnswerHead(head, head)
        whole = lambda scores, *args: full_vocabulary(scores.whole, *args)
        counts = lambda scores, *args: count_classes(scores.words, *args)
        loss = Objective("main", whole, sums=counts)
    elif case.head:
        head, kind = HEAD_MODULES[case.head], case.head.replace("word_rows", "label_rows")
        (loss,) = make_head(kind).objectives(0.0)
    elif case.work == "generate" or case.work == "grid" and case.family in CAUSAL:
        head, loss = TargetScores(), Objective("main", text_loss)
    model = Model(backbone, prompt, {"main": head} | prompt.modules())
    if case.front:
        none = (0,) * case.length
        front = SharedPrefix(none, tuple(range(case.length)), none, (Role.SOFT,) * case.length)
        model = dataclasses.replace(model, shared_prefix=front)
    return model, [loss, *prompt.objectives()]


def pooler_of(backbone) -> str:
    """Picks the checkpoint's pooler where it has one."""
    return "checkpoint" if "pooler" in backbone.cfg.model_heads else "cls"


def make_method(case: Case, dims):
    """Makes the method of a case; `predict` has what it folds to."""
    decodes, length = dims.decoder_layers > 0, case.length
    if case.work == "predict":
        fields = dict(slots=length)
        if case.method == "prefix":
            fields = dict(length=length, first=1, last=dims.layers, shift=length)
        if case.method == "prefix" and decodes:
            fields |= dict(decoder_length=length, decoder_first=0, decoder_last=dims.decoder_layers)
        return make_prompt("constant", dims, **fields)
    fields = dict(length=length)
    if case.method == "p_tuning":
        fields |= dict(hidden=12, inner=20)
    if case.method in IPT:
        words = pack_ids(np.arange(9))
        return make_prompt("ipt", dims, length=case.length, seen=words, **IPT[case.method])
    if case.method == "compose":
        fields = dict(parts=f"prefix(length={length})+soft(length={length})")
    if case.method == "prefix" and decodes:
        fields |= dict(decoder=length, cross=length)
    task_info = TaskInfo(CLASSES)
    if case.method == "dpt":
        task_info = TaskInfo(CLASSES, tuple(((word, word + 1),) for word in range(5, 5 + CLASSES)))
    if case.method == "dart":
        masked, several = not decodes and case.family not in CAUSAL, case.head == "word_rows"
        fields |= {"fluency": 1.0} if masked else {}
        fields |= {"each": "word"} if several else {}
        words = tuple(((word,), (word + 1,))[: 1 + several] for word in range(5, 5 + CLASSES))
        task_info = TaskInfo(CLASSES, words, 4 if masked else -1)
    with probes.known():
        return make_prompt(case.method, dims, task_info, **fields)


def make_shapes(case: Case, model):
    """Returns shapes of the trainable and frozen parameters, and a batch."""

    def narrow(module):
        shapes = backbone_shapes(module, case.quantize)
        kind = lambda name, x: x.dtype if is_plane(name) else jnp.bfloat16
        laid = {n: jax.ShapeDtypeStruct(x.shape, kind(n, x)) for n, x in shapes.items()}
        backbone = unflatten(laid)["backbone"]
        return jax.eval_shape(split_layers, backbone) if case.separate else backbone

    laid = dict(rows=8, length=case.tokens, family=case.family, side=case.side)
    if isinstance(model, replaced_tokens.Pair):
        whole = narrow(model.discriminator.backbone)
        generator = replaced_tokens.untie_embeddings(narrow(model.generator.backbone))
        params = {"backbone": whole, "generator": generator}
    else:
        params = jax.eval_shape(lambda b: model.init(jax.random.key(0), b), narrow(model.backbone))
        prompt = model.prompt
        laid |= dict(
            slots=0 if case.front else prompt.num_slots(), shift=prompt.position_shift(),
            decoder_slots=prompt.num_decoder_slots(), decoder_shift=prompt.decoder_shift(),
        )  # fmt: skip
    patterns = (".*",) if case.work == "adapt" else (r"prompt/.*", r"head/.*")
    parts = {part for part in ("prompt", "head") if jax.tree.leaves(params.get(part, {}))}
    patterns = [p for p in patterns if p == ".*" or p.split("/")[0] in parts]
    trainable, frozen = split_trainable(params, trainable_mask(params, patterns))
    trainable = jax.eval_shape(lambda x: cast(x, jnp.float32), trainable)
    by_token = case.head in ("tags", "spans", "multi_spans")
    several = by_token or case.work == "adapt" or case.head == "discriminator"
    batch = make_batch(masks=3 if several else 1, **laid)
    if by_token:  # one a read position, and how many of these there are
        counts = np.full(len(batch.labels), 3, np.int32)
        batch = batch._replace(labels=np.ones_like(batch.label_pos), counts=counts)
    batch = batch._replace(prompt=batch.index % 2)  # of a bank
    if case.packed:
        segments = np.where(batch.encoder.mask, 1 + (np.arange(case.tokens) > 9), 0)
        batch = batch._replace(encoder=batch.encoder._replace(segments=np.int32(segments)))
    return trainable, frozen, batch._replace(targets=np.full_like(batch.label_pos, 7))


def _put(tree, where):
    """Describes leaves that lie somewhere: one place, or one a leaf."""
    where = jax.tree.map(lambda _: where, tree) if hasattr(where, "mesh") else where
    put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(put, tree, where)


@functools.cache
def lower(case: Case) -> str:
    """Lowers a step for its target. -> StableHLO"""
    step, args, place = make_step(case, place_for(case.target, case.mesh))
    return lower_on(place, step, *args)


def place_for(target: Target, mesh: tuple[int, int, bool], **changes) -> Placement:
    """Makes a mesh (data, model, fsdp) whose programs are lowered for a target."""
    data, model, fsdp = mesh
    place = make_placement(data, model, fsdp=fsdp, devices=jax.devices()[: data * model])
    return dataclasses.replace(place, compiled_for=target, **changes)


def lower_on(place: Placement, function, *args) -> str:
    """Lowers a function for the target of a mesh. -> StableHLO"""
    target = place.compiled_for
    with trace_without_gpu(target):
        traced = jax.jit(with_placement(place, function)).trace(*args)
        return traced.lower(lowering_platforms=(PLATFORMS[target.platform],)).as_text()


def make_refill_step(model, search):
    """Joins the programs that start, replace and continue rows. -> ids [B, 4]"""
    start = make_start_step(model, search)

    def step(trainable, frozen, batch, *constants):
        new = start(trainable, frozen, batch, *constants)
        rows = replace_rows(add_room(new, search), new, batch.index, search)
        rows = continue_rows(model, merge(trainable, frozen), rows, search, 1)
        return best_texts(model, rows, search).ids

    return step


def make_step(case: Case, place: Placement):
    """Makes the step of a case. -> it, shapes of its arguments, where it runs"""
    model, objectives = make_model(case)
    trainable, frozen, batch = make_shapes(case, model)
    frozen = _put(frozen, place.param_shardings(frozen))
    state = jax.eval_shape(lambda x: make_state(x, TX, key_for(0, "dropout", case.rng)), trainable)
    if case.work == "grid":
        apart = case.mesh[0] > 1
        place = dataclasses.replace(place, maps_runs=True)
        where = place.batch if apart else place.replicated
        many = lambda x: jax.ShapeDtypeStruct((RUNS, *x.shape), x.dtype)
        state, batch = (_put(jax.tree.map(many, tree), where) for tree in (state, batch))
        place = RunsPlacement(**vars(place)) if apart else place
        step = make_group_step(model, TX, objectives, axis=DATA if apart else None)
        return step, (state, frozen, batch, PerRun({}, {})), place
    state, batch = _put(state, place.replicated), _put(batch, place.batch)
    if case.work in LEARNS:
        return make_train_step(model, TX, objectives), (state, frozen, batch), place
    step = make_eval_step(model)
    if case.work == "generate":
        search = Search(4, (1,), 0, num_beams=1 if case.sampled else 2)
        if case.sampled:
            search = dataclasses.replace(search, sampling=Sampling(1.0, 20, 0.9, 0.1, 1.2))
        make = make_refill_step if can_refill(place) else generation_step
        step = make(model, search)
    args = state.trainable, frozen, batch
    if begin := shared_prefix_fn(model):  # what a pass computes once for all of its batches
        args += (_put(jax.eval_shape(begin, *args[:2]), place.replicated),)
    if case.sampled:
        args += (None,) * (len(args) == 3) + (_put(make_row_keys(0), place.replicated),)
    return step, args, place


def products(text: str) -> Counter:
    """Counts products by the types of both sides and the result, as in "8x32xbf16"."""
    lines = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
    types = (re.findall(r"tensor<([^>]*)>", line.rpartition(" : ")[2]) for line in lines)
    return Counter(map(tuple, types))


def shape_of(kind: str) -> tuple[int, ...]:
    """Reads "8x32xbf16". -> (8, 32)"""
    return tuple(int(size) for size in kind.split("x")[:-1])


def has_kernel(text: str) -> bool:
    """Tells whether attention is a kernel: cuDNN's, also on a mesh, or a TPU's."""
    return any(name in text for name in ("__cudnn$fmha", "CustomSPMD", "tpu_custom_call"))
