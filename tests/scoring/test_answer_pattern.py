"""Answers in texts, as GSM8K and MATH have them."""

import pytest

from jaxprompt.scoring.answer_pattern import find_answer

GSM8K = "He pays $1,200 for 3 beds, so 1,200 * 3 = <<1200*3=3600>>3,600 dollars.\n#### 3,600"


@pytest.mark.parametrize("text, answer", [
    (GSM8K, "3600"), ("It is 7.50.", "15/2"), ("$-4", "-4"), ("-$4.00 in all", "-4"),
    ("no number", ""), (".5", "1/2"), ("from 3, 4", "4"), ("12,34", "34"), ("1" * 5000, "1" * 5000),
])  # fmt: skip
def test_the_last_number(text, answer):
    assert find_answer("number", text) == answer


@pytest.mark.parametrize("text, answer", [
    (r"so $x = \boxed{\frac{1}{2}}$.", "1/2"), (r"\boxed{\dfrac{1}{2}}", "1/2"),
    (r"\boxed{1}, no, \fbox{2x + \sqrt{3}}", r"2x+\sqrt{3}"), (r"$\boxed 5$", "5"),
    (r"\boxed{\left( 3, \, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})"),
    (r"\boxed{12{,}000", ""), ("12", ""), (r"\boxed{\$10,000.00}", "10000"),
    (r"\boxed{3/0}", "3/0"),
])  # fmt: skip
def test_the_last_box(text, answer):
    assert find_answer("boxed", text) == answer


@pytest.mark.parametrize("pattern, text, answer", [
    (r"#### (-?[\d.,]+)", GSM8K, "3600"), (r"answer is (\w+)|=> (\w+)", "=> yes", "yes"),
    (r"[A-D]", "B or C", "C"), (r"#### (\d+)", "####", ""),
])  # fmt: skip
def test_the_last_match_or_its_group(pattern, text, answer):
    assert find_answer(pattern, text) == answer
