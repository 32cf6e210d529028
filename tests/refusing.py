"""What calls that must be refused say."""

from collections.abc import Callable

import pytest

from jaxprompt.errors import InputError


def refuse_line(call: Callable, *given, **named) -> str:
    """Calls what must raise InputError. -> its message, which is one line"""
    with pytest.raises(InputError) as error:
        call(*given, **named)
    assert "\n" not in str(error.value)
    return str(error.value)
