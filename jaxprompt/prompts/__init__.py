"""Prompt methods, one file each, by name; the class `Prompt` of a file returns an `Injection`."""

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError, check_kind
from jaxprompt.registry import METHODS
from jaxprompt.types import Batch, Dims, Injection, Objective, Stream, TaskInfo

# Path of an export -> its method and parameters, including those of exports it depends on.
LoadExport = Callable[[str], tuple["Method", dict[str, Any]]]


class InitSource(NamedTuple):
    """The sources that a prompt may be initialised from."""

    tokenizer: Tokenizer
    seed: int
    labels: Callable[[], Sequence[Sequence[int]]]  # -> token ids of the label words of each class
    counts: np.ndarray | None  # int64 [ids], frequency of each token in the texts; None = no texts
    # token ids -> their embeddings at the input of the first layer [ids, E]
    embed: Callable[[Sequence[int]], np.ndarray]
    # token ids -> initial class vectors [ids, E]: rows of the output table, with which a language
    # model scores words, or embeddings if the head puts the classes into the input
    rows: Callable[[Sequence[int]], np.ndarray]
    # a method, and the path of an .npy file, an export or an adapter -> its vectors [P, E]
    read: Callable[[Any, str], np.ndarray]
    # comma-separated exports, randomly initialised parameters -> the parameters in the exports
    init_from_exports: Callable[[str, dict[str, Any]], dict[str, Any]]
    load_export: LoadExport
    # token ids -> their k, v [L, P, N, D] in the frozen model's attention: "encoder" (also of a
    # model with only a decoder), and for an encoder-decoder also "decoder" and "cross"
    keys: Callable[[Sequence[int]], dict[str, tuple[np.ndarray, np.ndarray]]]


BASE = re.compile(r"prompt/(.*/)?base")  # leaves in another export, see `with_base`
_NOT_IN_CONFIG = ("dims", "task_info", "seen", "parent", "name")  # fields of the modules


_HOOKS = (
    "begin", "components", "exported", "inherits", "modules", "objectives", "starts", "with_base",
    "with_vocabulary",
)  # fmt: skip


class Method(nn.Module):
    """The base of all methods. Hyperparameters are fields, so a misspelt one is an error.

    A method that depends on the task also has the field `task_info: TaskInfo = TaskInfo()`, which
    is set for it.
    """

    dims: Dims
    length: int = 0
    seen: str = ""  # packed ids of the words in the training texts, if the method depends on them
    TRAINABLE: ClassVar[tuple[str, ...]] = (r"prompt/.*", r"head/.*")
    LEARNS: ClassVar[bool] = True  # it has parameters
    PLAIN: ClassVar[str] = ""  # field=value with which its vectors are parameters, not computed
    STATIC_FIELDS: ClassVar[
        tuple[str, ...]
    ] = ()  # fields of the initialisation that also act later
    INIT: ClassVar[str] = "init"  # the field that names an export to initialise from
    START_FIELDS: ClassVar[tuple[str, ...]] = ()  # fields that are read by `start` of that name
    READ_WITH: ClassVar[Mapping[str, str]] = {}  # see `idle_fields`
    # Fields of a Batch that the injection depends on. If empty, it folds to constants, which an
    # export contains; otherwise an export contains the method and its parameters.
    reads: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        """Keeps flax from registering the modules that these hooks make as submodules."""
        for name in _HOOKS:
            if name in vars(cls):
                nn.nowrap(vars(cls)[name])
        super().__init_subclass__(**more)

    def block(self) -> dict[str, Any]:
        """Returns the config block of this method."""
        fields = (f.name for f in dataclasses.fields(self) if f.name not in _NOT_IN_CONFIG)
        name = METHODS.name_of(type(self))
        config = {"name": name} | {field: getattr(self, field) for field in fields}
        return config | ({"seen": self.seen} if self.seen else {})

    def num_slots(self) -> int:
        """Returns the number of soft tokens that the template places in the input."""
        return sum(part.method.num_slots() for part in self.components())

    def num_decoder_slots(self) -> int:
        """Returns the number of soft tokens in the decoder's input."""
        return sum(part.method.num_decoder_slots() for part in self.components())

    def num_rows(self) -> int:
        """Returns the number of trained class vectors, which a head uses."""
        return sum(part.method.num_rows() for part in self.components())

    def position_shift(self) -> int:
        """Returns the shift of the text's positions by a prompt that is not in the input."""
        return sum(part.method.position_shift() for part in self.components())

    def decoder_shift(self) -> int:
        """Returns the shift of the positions of the decoder's input."""
        return sum(part.method.decoder_shift() for part in self.components())

    def is_computed(self) -> bool:
        """Returns whether folding saves work: the injection is computed from parameters."""
        return False

    def folds(self) -> bool:
        """Returns whether to fold before use: it saves work and is exact."""
        return self.is_computed() and not self.reads

    def components(self) -> Sequence["Component"]:
        """Lists the methods that it consists of."""
        return ()

    def starts(self) -> list[str]:
        """Lists its initialisations, as named by `prompt.start`."""
        return [self.start] if hasattr(self, "start") else []

    def _vectors(self, std: float) -> Injection:
        """Trains vectors of N(0, std^2): `length` for the template and `num_rows` for the head.

        Those of the template come first. A head, or an objective's view, writes the others.
        """
        counts = {"table": self.length, "rows": self.num_rows()}
        init = nn.initializers.normal(std)
        vectors = {
            name: self.param(name, init, (count, self.dims.embed))
            for name, count in counts.items()
            if count
        }
        slots = jnp.concatenate(list(vectors.values()))[None] if vectors else None
        return Injection(Stream(slots=slots), rows=vectors.get("rows"))

    def inherits(self) -> list[tuple[str, "Method"]]:
        """Lists the exports that it or its components are initialised from, with these."""
        return []

    def must_match(self) -> Sequence[str] | None:
        """Lists the fields that must equal those of the export in init; None = nearly all."""
        return None

    def static_values(self) -> tuple[Any, ...]:
        """Returns the values of STATIC_FIELDS; runs that differ in them need different programs."""
        values = tuple(getattr(self, field) for field in self.STATIC_FIELDS)
        return sum((part.method.static_values() for part in self.components()), values)

    def with_vocabulary(self, ids: np.ndarray) -> "Method":
        """Receives the ids of the words in the training text, if it depends on them."""
        return self

    def check_start(self) -> None:
        """Raises InputError if prompt.start names a field that is empty."""
        if self.start in self.START_FIELDS and not getattr(self, self.start).strip():
            raise InputError(f"prompt.start={self.start} needs prompt.{self.start}; set it")

    def check_decoder(self, *fields: str) -> None:
        """Raises InputError if one of these fields needs a decoder that the backbone lacks."""
        for field in fields:
            value = getattr(self, field)
            if value and not self.dims.decoder_layers:
                raise InputError(
                    f"prompt.{field}={value!r} needs an encoder-decoder, which this backbone is "
                    "not; leave it out or use a T5"
                )

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""

    def objectives(self) -> list[Objective]:
        """Returns its additional terms of the loss, besides those of the head."""
        return []

    def modules(self) -> dict[str, nn.Module]:
        """Returns the modules for its objectives, by `Objective.head`.

        They are called like a head, and their parameters are under head/<name>/.
        """
        return {}

    def begin(self, params: dict[str, Any], source: InitSource) -> dict[str, Any]:
        """Replaces randomly initialised parameters by those of the source. -> params"""
        return params

    def with_base(self, params: dict[str, Any], load_export: LoadExport) -> dict[str, Any]:
        """Adds the leaves `base` of another export, which checkpoints and exports leave out.

        They never train, even if a pattern matches them. -> params
        """
        return params

    @nn.nowrap  # as `__init_subclass__` does for others
    def exported(self, params: dict[str, Any]) -> dict[str, Any]:
        """Removes what an export need not contain because `with_base` restores it. -> params"""
        parts = (part for part in self.components() if part.name in params)
        return params | {part.name: part.method.exported(params[part.name]) for part in parts}

    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns the injection for the backbone; `embed` are its word embeddings [V, E]."""
        raise TypeError(f"{type(self).__name__} must define __call__")


def idle_fields(part: Any) -> list[tuple[str, str]]:
    """Lists the fields of a method or head without effect, each with the field that decides it.

    READ_WITH says what fields need: {"start=normal": "scale"} means that `start` has this value, or
    one of several comma-separated ones; {"cross": "cross_layers"} that `cross` is neither 0 nor
    empty. Fields at their default are not listed.
    """
    default, idle = {field.name: field.default for field in dataclasses.fields(part)}, []
    for need, names in part.READ_WITH.items():
        condition_field, _, values = need.partition("=")
        value = getattr(part, condition_field)
        if not (str(value) in values.split(",") if values else value):
            changed = [name for name in names.split() if getattr(part, name) != default[name]]
            idle += [(name, condition_field) for name in changed]
    return idle


PARTS_FORM = "use methods and their fields, as in soft(length=5,start=labels)+prefix(length=8)"


def read_parts(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parses methods and their fields: "soft(length=5,start=labels)+prefix". -> names, fields

    A string without quotes must be one word.

    Raises:
      InputError: if the string cannot be parsed.
    """
    try:
        # Parsed and never evaluated, since the string may come from an untrusted export.
        left, calls = ast.parse(text.strip(), mode="eval").body, []
        # a + b + c is (a + b) + c: the last part is outermost.
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add):
            calls.append(left.right)
            left = left.left
        return [_read_part(call) for call in [left, *reversed(calls)]]
    except (SyntaxError, ValueError, TypeError) as error:
        raise InputError(f"prompt.parts={text!r} cannot be read; {PARTS_FORM}") from error


def write_parts(parts: Sequence[Method]) -> str:
    """Formats methods and their fields for `read_parts`."""
    texts = []
    for part in parts:
        fields = part.block()
        name = fields.pop("name")
        fields.pop("seen", None)  # shared by all parts, and stored separately
        texts.append(f"{name}({','.join(f'{field}={x!r}' for field, x in fields.items())})")
    return "+".join(texts)


def _read_part(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError
    values = {keyword.arg: keyword.value for keyword in node.keywords}
    if None in values:  # **fields
        raise ValueError
    # A single word needs no quotes: start=labels.
    return node.func.id, {
        str(field): value.id if isinstance(value, ast.Name) else ast.literal_eval(value)
        for field, value in values.items()
    }


_NO_TASK = TaskInfo()


def make_prompt(
    name: str,
    dims: Dims,
    task_info: TaskInfo = _NO_TASK,
    init: str = "",
    seen: str = "",
    **fields: Any,
) -> Method:
    """Creates a method by name.

    `init`, the export that its parameters are read from, is not a hyperparameter.

    Raises:
      InputError: if the name is unknown, or a hyperparameter is unknown, of another type or out of
        range.
    """
    cls = METHODS.load(name)
    kinds.check_fields("prompt", name, cls, fields, hidden=_NOT_IN_CONFIG)
    check_kind("prompt.init", init, str)
    if init and cls.INIT != "init":
        raise InputError(
            f"prompt.init={init}: the method {name!r} is initialised from an export with "
            f"prompt.{cls.INIT}; set that instead"
        )
    # No parent, even if a method of a module calls this.
    prompt = cls(dims=dims, seen=seen, parent=None, **fields)
    prompt.check()
    return with_task(prompt, task_info)


class Component(NamedTuple):
    """One of several methods that are combined."""

    name: str  # of its method, e.g. "soft-2" if repeated; its parameters are prompt/<name>/
    method: Method
    init: str  # the export that it is initialised from; "" = as its fields say


# Cached, since nearly every hook needs the parts.
@functools.cache
def make_parts(text: str, dims: Dims, task_info: TaskInfo, seen: str = "") -> tuple[Component, ...]:
    """Creates the methods of a string for `read_parts`.

    Raises:
      InputError: names the component, for invalid fields.
    """
    parts: list[Component] = []
    for kind, fields in read_parts(text):
        count = sum(part.name.partition("-")[0] == kind for part in parts)
        name, init = f"{kind}-{count + 1}" if count else kind, str(fields.pop("init", ""))
        if kind == "compose":
            raise InputError(f"prompt.parts={text!r} contains compose itself; {PARTS_FORM}")
        try:
            part = make_prompt(kind, dims, task_info, init, seen, **fields)
            parts.append(Component(name, part, init))
        except InputError as error:
            raise InputError(f"prompt.parts, {name}: {error}") from error
    return tuple(parts)


def with_task(prompt: Method, task_info: TaskInfo) -> Method:
    """Passes the task to a method that depends on it."""
    return prompt.clone(task_info=task_info) if hasattr(prompt, "task_info") else prompt
