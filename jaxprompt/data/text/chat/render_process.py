"""Renders a chat template in a process with little memory and time: JSON on stdin and stdout.

It renders any number of conversations, since starting it takes longer than rendering one.

A chat template is a program that comes with a checkpoint. Jinja's sandbox keeps it from files and
from Python's objects, but bounds neither loops nor the length of strings. `chat` runs this file as
a script, which imports nothing of the package and therefore starts in a tenth of a second.
"""

import datetime
import json
import resource
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Today's date for chat templates, so that a run reads the same text on every day. Llama 3's
# templates use this date where they have no clock.
_DATE = datetime.datetime(2024, 7, 26)


# Around what a model has generated; characters for private use, which texts have escaped.
_MARKS = "\ue002", "\ue003"


class _Generation(Extension):
    """The block {% generation %} of transformers, which marks what a model has generated."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the content of the block between marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        before, after = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in _MARKS)
        return [before, *body, after]


class _Namespace(Namespace):
    """A namespace without names that Python or Jinja might call."""

    def __init__(self, *pairs: Any, **values: Any):
        super().__init__()
        for name, value in dict(*pairs, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"the name {name!r} is not allowed")
        super().__setitem__(name, value)


def make_template(source: str) -> Template:
    """Compiles a chat template in the environment that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _fail,
        "strftime_now": _DATE.strftime,
        "namespace": _Namespace,
        "dict": lambda *args, **values: dict(*args, **values),
    }
    return environment.from_string(source)


def render(template: Template, variables: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Returns {"text": ...}, or {"error": ...}, also for a text longer than its inputs allow."""
    try:
        text = template.render(variables)
        if len(text) > max(limit, 10 * len(json.dumps(variables))):
            raise TemplateError(f"it writes {len(text):,} characters")
        return {"text": text}
    # Raised by Jinja, or by what the template calls.
    except Exception as error:
        return _error(error)


def _error(error: Exception) -> dict[str, str]:
    return {"error": " ".join(str(error).split())[:200] or type(error).__name__}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _fail(message: str) -> NoReturn:
    raise TemplateError(message)


def main() -> None:
    """Reads the template, variables of each text and the limits; writes each text, or its error."""
    inputs = json.load(sys.stdin)
    limits = {resource.RLIMIT_DATA: inputs["bytes"], resource.RLIMIT_CPU: inputs["seconds"]}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    variables = inputs["variables"]
    try:
        template = make_template(inputs["source"])
    except Exception as error:  # of Jinja's syntax
        outputs = [_error(error)] * len(variables)
    else:
        outputs = [render(template, values, inputs["characters"]) for values in variables]
    json.dump(outputs, sys.stdout)


if __name__ == "__main__":
    main()
