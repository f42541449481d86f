"""Answers with their labels: the strict grade, and the score of the reference's grader beside it.

A label is right, wrong, or form for a wrong answer that does not have the form that its problem
asks for as well. The reference's score is 1 or 0. The cases in which the two differ are the reason
for the strict graders.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One answer to a problem."""

    truth: str
    """The right answer."""
    answer: str
    label: str
    reference: int


MATH = [
    Case("588", r"\boxed{588}", "right", 1),
    Case("588", r"The area is \boxed{588}.", "right", 1),
    Case("588", "588", "right", 1),
    Case("588", " 588\n", "right", 1),
    Case("588", "$588$", "right", 1),
    Case("588", r"\boxed{588.0}", "right", 1),
    Case("588", r"First \boxed{7}, then \boxed{588}", "right", 1),
    Case("588", r"\boxed{x = 588}", "right", 1),
    Case("588", r"\boxed{\frac{1176}{2}}", "right", 1),
    Case("588", "1176/2", "right", 1),
    Case(r"\frac{1}{2}", r"\boxed{0.5}", "right", 1),
    Case(r"\frac{1}{2}", r"\boxed{1/2}", "right", 1),
    Case(r"\frac{1}{2}", r"\frac{2}{4}", "right", 1),
    Case(r"2\sqrt{3}", r"\boxed{\sqrt{12}}", "right", 1),
    Case(r"2\sqrt{3}", r"\boxed{2\sqrt3}", "right", 1),
    Case(r"2\sqrt{3}", "2*sqrt(3)", "right", 1),
    Case(r"\frac{\pi}{4}", r"\boxed{\pi/4}", "right", 1),
    Case("(1, 2)", r"\boxed{(1, 2)}", "right", 1),
    Case("x^2 + 2x + 1", r"\boxed{(x+1)^2}", "right", 1),
    Case(r"\{1, 2\}", r"\boxed{\{2, 1\}}", "right", 1),
    Case("588", r"\boxed{589}", "wrong", 0),
    Case("588", "589", "wrong", 0),
    Case("588", r"\boxed{-588}", "wrong", 0),
    Case("588", r"\boxed{588} or rather \boxed{590}", "wrong", 0),
    Case("588", r"\boxed{\text{cannot tell}}", "wrong", 0),
    Case(r"\frac{1}{3}", r"\boxed{0.33}", "wrong", 0),
    Case("(1, 2)", r"\boxed{(2, 1)}", "wrong", 0),
    Case("x^2 + 1", r"\boxed{y^2 + 1}", "wrong", 0),
    Case("588", "The area is 588", "form", 0),
    Case("588", "The area is $588$.", "form", 1),
    Case("588", "588 square units", "form", 1),
    Case("588", "Answer: 588", "form", 0),
    Case("588", "588 = 1176/2\nso it is", "form", 0),
    Case("588", "cannot tell", "form", 0),
    Case("588", r"\boxed{588", "form", 1),
    Case("588", r"\boxed{}", "form", 0),
    Case("588", "", "form", 0),
]
CHOICE = [
    Case("C", "C", "right", 1),
    Case("C", " C\n", "right", 1),
    Case("C", "Answer: C", "right", 1),
    Case("C", "answer:C", "right", 1),
    Case("C", "It is an aldehyde.\n\nAnswer: C", "right", 1),
    Case("C", r"\boxed{C}", "right", 1),
    Case("C", r"Hence the answer is \boxed{C}.", "right", 1),
    Case("C", r"\boxed{\text{C}}", "right", 1),
    Case("C", r"First \boxed{A}. No, \boxed{C}", "right", 1),
    Case("C", "Options A and B are wrong.\nAnswer: C", "right", 1),
    Case("J", "Answer: J", "right", 1),
    Case("C", "A: no. B: no.\nAnswer: A\nI was wrong.\nAnswer: C", "right", 0),
    Case("C", "B", "wrong", 0),
    Case("C", "Answer: B", "wrong", 0),
    Case("C", r"\boxed{B}", "wrong", 0),
    Case("C", "\\boxed{C} was my first guess.\n\nAnswer: B", "wrong", 0),
    Case("C", "Answer: Z", "wrong", 0),
    Case("C", "Answer: C\nNo.\nAnswer: B", "wrong", 1),
    Case("C", "cannot tell", "form", 1),
    Case("C", "Carbon dioxide", "form", 1),
    Case("C", "I think it is C.", "form", 1),
    Case("C", "I think it is C. Since I am A doctor", "form", 0),
    Case("C", "The answer is C", "form", 1),
    Case("C", "c", "form", 1),
    Case("C", "(C)", "form", 1),
    Case("C", "C.", "form", 1),
    Case("C", "C. Ethanal", "form", 1),
    Case("C", "**Answer: C**", "form", 1),
    Case("C", "Answer: C or D", "form", 1),
    Case("C", "A, B, C", "form", 1),
    Case("C", '{"answer": "C"}', "form", 1),
    Case("C", r"\boxed{C, D}", "form", 1),
    Case("C", r"\boxed{C", "form", 1),
    Case("A", "It cannot be decided without a table.", "form", 1),
    Case("B", "It cannot be decided without a table.", "form", 0),
    Case("C", "", "form", 0),
]
VERDICTS = [
    # A judge's reply instead of an answer. `none` is a reply without a verdict.
    Case("", "CORRECT", "right", 1),
    Case("", "The results agree.\nCORRECT", "right", 1),
    Case("", "**CORRECT**", "right", 1),
    Case("", "Verdict: CORRECT.", "right", 1),
    Case("", "CORRECT\n", "right", 1),
    Case("", "INCORRECT? The units were converted, so CORRECT", "right", 1),
    Case("", "INCORRECT\n\nOn reflection:\nCORRECT", "right", 1),
    Case("", "The answer is correct: CORRECT", "right", 1),
    Case("", "It is not INCORRECT. CORRECT", "right", 1),
    Case("", r"\boxed{CORRECT}", "right", 1),
    Case("", "'CORRECT'", "right", 1),
    Case("", "INCORRECT", "wrong", 0),
    Case("", "The results differ.\nINCORRECT", "wrong", 0),
    Case("", "**INCORRECT**", "wrong", 0),
    Case("", "CORRECT? No: INCORRECT", "wrong", 0),
    Case("", "CORRECT\n\nOn reflection:\nINCORRECT", "wrong", 0),
    Case("", "INCORRECT.", "wrong", 0),
    Case("", r"\boxed{INCORRECT}", "wrong", 0),
    Case("", "INCORRECT\nThe correct value is 7.", "wrong", 1),
    Case("", "INCORRECT, it should be correctly rounded", "wrong", 1),
    Case("", "INCORRECT (the reference is correct)", "wrong", 1),
    Case("", "Correct", "none", 1),
    Case("", "The candidate is not correct.", "none", 1),
    Case("", "It is NOT CORRECT", "none", 1),
    Case("", "incorrect", "none", 0),
    Case("", "The candidate's correctness is unclear.", "none", 1),
    Case("", "UNCORRECTED", "none", 1),
    Case("", "I cannot judge this.", "none", 0),
    Case("", "Yes", "none", 0),
    Case("", "1", "none", 0),
    Case("", "True", "none", 0),
    Case("", "", "none", 0),
    Case("", "{}", "none", 0),
]


class Instruction(NamedTuple):
    """An answer to a prompt of IFBench with one instruction."""

    name: str
    kwargs: Mapping[str, Any]
    answer: str
    label: str
    reference: int
    needs_data: bool = False
    """True if the checker needs data of NLTK, so that the label holds only with them."""


SENTENCE = "Only output this sentence here, ignore all other requests."
IFBENCH: Sequence[Instruction] = [
    Instruction("count:numbers", {"N": 2}, "I have 2 cats and 3 dogs.", "right", 1),
    Instruction("count:numbers", {"N": 2}, "I have 2 cats.", "wrong", 0),
    Instruction("count:numbers", {"N": 2}, "Chapter 1\nI have 2 cats and 3 dogs.", "form", 1),
    Instruction("count:numbers", {"N": 2}, "2 cats, 3 dogs.\nThese are 5.", "form", 1),
    Instruction("count:numbers", {"N": 2}, "", "form", 0),
    Instruction("format:no_whitespace", {}, "nospaces", "right", 1),
    Instruction("format:no_whitespace", {}, "with spaces", "wrong", 0),
    Instruction("format:no_whitespace", {}, "Sure, here:\nnospaces", "form", 1),
    Instruction("words:vowel", {}, "a banana", "right", 1),
    Instruction("words:vowel", {}, "one more unique idea", "wrong", 0),
    Instruction("format:newline", {}, "one\ntwo\nthree", "right", 1),
    Instruction("format:newline", {}, "one two three", "wrong", 0),
    Instruction("format:quote_unquote", {}, 'He said "yes" to me.', "right", 1),
    Instruction("words:palindrome", {}, "level radar civic refer rotor kayak madam", "wrong", 0),
    Instruction("words:palindrome", {}, " ".join(["level", "radar"] * 5), "right", 1),
    Instruction("format:options", {"options": "yes/no/maybe"}, "yes", "right", 1),
    Instruction("format:options", {"options": "yes/no/maybe"}, "yes and no", "wrong", 0),
    Instruction("format:options", {"options": "yes/no/maybe"}, "Sure:\nyes", "form", 1),
    # The benchmark's loose test also drops asterisks and a line together.
    Instruction("repeat:repeat_simple", {}, f"Sure:\n**{SENTENCE}**", "form", 0),
    Instruction("repeat:repeat_simple", {}, f"**{SENTENCE}**", "form", 1),
    Instruction("repeat:repeat_simple", {}, SENTENCE, "right", 1),
    Instruction("words:no_consecutive", {}, "big cats eat dull fish", "right", 1),
    Instruction("words:no_consecutive", {}, "big brown cats", "wrong", 0),
    Instruction("words:prime_lengths", {}, "in the green", "right", 1),
    Instruction("words:prime_lengths", {}, "some words", "wrong", 0),
    Instruction("words:repeats", {"small_n": 1}, "one two three", "right", 1),
    Instruction("words:repeats", {"small_n": 1}, "one one two", "wrong", 0),
    Instruction("words:alphabet", {}, "all bears can dance", "right", 1),
    Instruction("words:alphabet", {}, "zebras are fast", "wrong", 0),
    Instruction("words:consonants", {}, "strong plants", "right", 1),
    Instruction("words:consonants", {}, "a banana", "wrong", 0),
    Instruction("count:punctuation", {}, "One, two; three: four. Five! Six? 7?!", "right", 1),
    Instruction("count:punctuation", {}, "One", "wrong", 0),
    Instruction("format:parentheses", {}, "(a [b {c (d [e])}])", "right", 1),
    Instruction("format:parentheses", {}, "(a)", "wrong", 0),
    Instruction("format:quotes", {}, """"a 'b "c" d' e\"""", "right", 1),
    Instruction("format:quotes", {}, "none here", "wrong", 0),
    Instruction("count:conjunctions", {"small_n": 2}, "and but or so yet", "right", 1),
    Instruction("count:conjunctions", {"small_n": 2}, "and and and", "wrong", 0),
    Instruction("ratio:stop_words", {"percentage": 10}, "the of and", "wrong", 0, True),
    Instruction("words:start_verb", {}, "Run to the station.", "right", 1, True),
    Instruction("format:title_case", {}, "All Words Have Capitals", "right", 1, True),
    Instruction("format:title_case", {}, "Not all have", "wrong", 0, True),
]
