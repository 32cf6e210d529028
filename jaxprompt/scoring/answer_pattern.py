r"""The answer in a text: a number, as in GSM8K, the content of \boxed{}, as in MATH, or a match.

GSM8K compares the last number of a text (Cobbe et al. 2021), MATH the last \boxed{} (Hendrycks et
al. 2021, appendix). Formulas are compared as they are written, without spaces and commands that
only change how they look; the official script of MATH rewrites a few more forms.
"""

import re
from fractions import Fraction

_NUMBER = r"-?\$?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_DECIMAL = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?")
_RATIO = re.compile(r"(-?)(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))")
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*")
_MAX_DIGITS = 1000  # of numbers that are compared by value; Python refuses to read very long ones
# Commands of formulas that do not change the value.
_LOOKS = re.compile(r"\\(?:left|right|[!,;: ])|\\\$|\$|\s+")


def find_answer(pattern: str, text: str) -> str:
    """Returns the answer in a text in a form that can be compared; "" if there is none.

    `pattern` is "number", the last number; "boxed", the content of the last \\boxed{}; or a regular
    expression, whose last match counts, or the first of its groups that matches.
    """
    if pattern == "boxed":
        return _normalize(_last_box(text))
    matches = list(re.finditer(_NUMBER if pattern == "number" else pattern, text))
    if not matches:
        return ""
    groups = [group for group in matches[-1].groups() if group is not None]
    return _normalize((groups or [matches[-1][0]])[0])


def _last_box(text: str) -> str:
    r"""Returns the content of the last \boxed{...}, with the braces inside it, or \boxed X."""
    boxes = list(_BOXES.finditer(text))
    if not boxes:
        return ""
    content = text[boxes[-1].end() :]
    if not content.startswith("{"):
        return re.split(r"[\s$]", content, maxsplit=1)[0]
    depth = 0
    for i, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if not depth:
            return content[1:i]
    return ""  # it does not end


def _normalize(answer: str) -> str:
    """Returns one spelling of equal numbers, and of formulas that only look different."""
    text = _LOOKS.sub("", answer.strip()).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.rstrip(".")
    if len(text) > _MAX_DIGITS:
        return text
    if ratio := _RATIO.fullmatch(text):
        sign, *parts = ratio.groups()
        numerator, denominator = (int(part) for part in parts if part is not None)
        return str(Fraction(numerator, denominator) * (-1 if sign else 1)) if denominator else text
    if text.strip("+-") and _DECIMAL.fullmatch(text):
        return str(Fraction(text.replace(",", "")))
    return text
