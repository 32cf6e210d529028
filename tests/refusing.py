"""What calls that must be refused say."""

from collections.abc import Callable

import pytest

from jaxprompt.errors import InputError


def refuse_line(call: Callable, *args, **kwargs) -> str:
    """Calls what must raise InputError. -> its message, which is one line"""
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)
