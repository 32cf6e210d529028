"""Several methods combined: their soft tokens and their prefixes are concatenated."""

import functools
from typing import Any

import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.errors import InputError
from jaxprompt.layers.side_by_side import (
    SlotCounts,
    check_prefixes_agree,
    join_injections,
    renumber_slots,
)
from jaxprompt.prompts import PARTS_FORM, Component, InitSource, LoadExport, Method, make_parts
from jaxprompt.types import Batch, Injection, Objective, TaskInfo


class Prompt(Method):
    """Trains several prompts at once, or some of them while `trainable` leaves out the others.

    The template places the soft tokens of the components in their order. A component is
    initialised as its fields say, one of which is `init`, an export. Only one component may train
    vectors for the head.
    """

    PLAIN = "init= of each of prompt.parts"

    task_info: TaskInfo = TaskInfo()
    parts: str = kinds.option(
        "prefix(length=10)+soft(length=10)", "methods with their fields, separated by +"
    )

    def check(self) -> None:
        """Raises InputError if the components cannot be combined."""
        parts, shown = self.components(), f"prompt.parts={self.parts!r}"
        if len(parts) < 2 or not all(part.method.LEARNS for part in parts):
            raise InputError(f"{shown} must combine at least two trainable methods; {PARTS_FORM}")
        if len(names := [part.name for part in parts if hasattr(part.method, "task_info")]) > 1:
            raise InputError(
                f"{shown}: {' and '.join(names)} train vectors for the head; use only one of them"
            )
        blocks = [part.method.block() for part in parts if not part.method.num_slots()]
        check_prefixes_agree(blocks, self.dims, shown, is_folded=not self.reads)

    def is_computed(self) -> bool:
        """Returns whether folding saves work: it concatenates the components once."""
        return True

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]  # a ClassVar, to flax no field
        """The Batch fields that any component depends on."""
        return tuple(
            dict.fromkeys(sum((tuple(part.method.reads) for part in self.components()), ()))
        )

    def inherits(self) -> list[tuple[str, Method]]:
        """Lists the exports that components are initialised from."""
        nested = [pair for part in self.components() for pair in part.method.inherits()]
        return [(part.init, part.method) for part in self.components() if part.init] + nested

    def with_vocabulary(self, ids: np.ndarray) -> Method:
        """Passes the words of the training text to the components."""
        return self.clone(
            # The same for all components that use it, and "" for the others.
            seen=max(part.method.with_vocabulary(ids).seen for part in self.components())
        )

    def with_base(self, params: dict[str, Any], load_export: LoadExport) -> dict[str, Any]:
        """Adds those of the components. -> params"""
        parts = {
            name: part.with_base(params.get(name, {}), load_export)
            for name, part, _ in self.components()
        }
        return params | {name: leaves for name, leaves in parts.items() if leaves}

    def starts(self) -> list[str]:
        """Lists the initialisations of the components without an export."""
        return sum((part.method.starts() for part in self.components() if not part.init), [])

    def modules(self) -> dict[str, Any]:
        """Returns the modules of the components' objectives."""
        return {k: v for part in self.components() for k, v in part.method.modules().items()}

    def objectives(self) -> list[Objective]:
        """Returns the objectives of the components, with slots renumbered."""
        return [
            term._replace(view=term.view and functools.partial(renumber_slots, term.view, rows))
            for part, rows in zip(self.components(), self._rows(), strict=True)
            for term in part.method.objectives()
        ]

    def begin(self, params: dict[str, Any], source: InitSource) -> dict[str, Any]:
        """Initialises each component. -> params"""
        init_params = dict(params)
        for name, method, init in self.components():
            if name in params and init:
                init_params[name] = source.init_from_exports(init, params[name])
            elif name in params:
                init_params[name] = method.begin(params[name], source)
        return init_params

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Concatenates the injections. -> slots [1|B, S, E], k, v [L, 1|B, P, N, D]"""
        injections = [
            # The cached components have no parent; with one, a clone finds its parameters.
            method.clone(parent=self, name=name)(batch, embed, deterministic=deterministic)
            for name, method, _ in self.components()
        ]
        return join_injections(injections, self._rows())

    def components(self) -> tuple[Component, ...]:
        """Returns the methods that it consists of."""
        return make_parts(self.parts, self.dims, self.task_info, self.seen)

    def _rows(self) -> list[SlotCounts]:
        total, methods = self.num_slots(), [part.method for part in self.components()]
        return [
            SlotCounts(method.num_slots(), method.num_decoder_slots(), total) for method in methods
        ]
