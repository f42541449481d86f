"""Answers with their labels: the strict grade, and the score of the reference's grader beside it.

A label is right, wrong, or form for a wrong answer that does not have the form that its problem
asks for as well. The reference's score is 1 or 0. The cases in which the two differ are the reason
for the strict graders.

The reference has no graders for exact numbers, texts, whole files, JSON and reasoning-gym. Their
cases have the scores of its nearest graders (NEAREST): that of mathematics for numbers, and for the
others that of its example task, which compares whole texts in any case.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from evaluation.graders import MAX_ANSWER_CHARS


class Case(NamedTuple):
    """One answer to a problem."""

    truth: str
    """The right answer."""
    answer: str
    label: str
    reference: int


class GymCase(NamedTuple):
    """One answer to a problem of reasoning-gym."""

    family: str
    entry: Mapping[str, Any]
    answer: str
    label: str
    reference: int


NEAREST: Mapping[str, str] = {
    "number": "math",
    "text": "demo",
    "verbatim": "demo",
    "json": "demo",
    "reasoning-gym": "demo",
}
"""The reference's tasks whose graders are nearest to ours, by our grader."""
NUMBERS = [
    Case("42", "42", "right", 1),
    Case("42", "Answer: 42", "right", 0),
    Case("42", "answer: 42", "right", 0),
    Case("42", "ANSWER:42", "right", 0),
    Case("42", "  Answer:   42  \n\n", "right", 0),
    Case("42", "Six times seven.\n\nAnswer: 42", "right", 1),
    Case("42", "Answer: 41\nNo, I made a mistake.\nAnswer: 42", "right", 1),
    Case("42", "42.0", "right", 1),
    Case("42", "042", "right", 1),
    Case("42", "+42", "right", 1),
    Case("-42", "Answer: -42", "right", 0),
    Case("-42", "Answer: \N{MINUS SIGN}42", "right", 0),
    Case("1234567", "Answer: 1,234,567", "right", 0),
    Case("0.5", "Answer: 0.50", "right", 0),
    Case("0", "-0", "right", 1),
    Case("123456789012345678901234567890", "Answer: 123456789012345678901234567890", "right", 0),
    Case("123456789012345678901234567890", "Answer: 123456789012345678901234567891", "wrong", 0),
    Case("42", "Answer: 43", "wrong", 0),
    Case("42", "-42", "wrong", 0),
    Case("42", "Answer: 42\nOr rather:\nAnswer: 43", "wrong", 0),
    Case("0.1", "Answer: 0.10000000000000000001", "wrong", 0),
    Case("42", "The result is 42.", "form", 1),
    Case("42", "Answer: 42.", "form", 1),
    Case("42", "Answer: **42**", "form", 1),
    Case("42", "**Answer:** 42", "form", 1),
    Case("42", "Answer: $42", "form", 0),
    Case("42", "Answer: 42 apples", "form", 0),
    Case("42", "Answer: 4.2e1", "form", 0),
    Case("42", "Answer: forty-two", "form", 0),
    Case("42", "Answer:\n42", "form", 0),
    Case("42", "Answer: 42\nI hope this helps.", "form", 1),
    Case("42", "It may be\n42", "form", 0),
    Case("1234", "Answer: 12,34", "form", 0),
    Case("42", "Answer: \N{ARABIC-INDIC DIGIT FOUR}\N{ARABIC-INDIC DIGIT TWO}", "form", 0),
    Case("42", "", "form", 0),
    Case("42", " \n ", "form", 0),
    Case("42", "nan", "form", 0),
    Case("42", "Answer: " + "0" * MAX_ANSWER_CHARS + "42", "form", 0),
]
TEXTS = [
    Case("Ada", "Ada", "right", 1),
    Case("Ada", "Answer: Ada", "right", 0),
    Case("Ada", "answer:Ada", "right", 0),
    Case("Ada", "She is named below.\nAnswer: Ada\n", "right", 0),
    Case("Ada", "\n\n  Ada \n", "right", 1),
    Case("KXQ-4821", "Answer: KXQ-4821", "right", 0),
    Case("Ada Byron", "Answer: Ada  Byron", "right", 0),
    Case("Ada Byron", "Answer: Ada\tByron", "right", 0),
    Case("Ada", "Answer: Bo\nWait.\nAnswer: Ada", "right", 0),
    Case("Answer: x", "Answer: Answer: x", "right", 0),
    Case("é", "Answer: é", "right", 0),
    Case("a|b", "Answer: a|b", "right", 0),
    Case("Ada", "Answer: Bo", "wrong", 0),
    Case("Ada", "Answer: ada", "wrong", 0),
    Case("Ada", "ada", "wrong", 1),
    Case("Ada", "Answer: ADA", "wrong", 0),
    Case("Ada", "Answer: Ada.", "wrong", 0),
    Case("Ada", 'Answer: "Ada"', "wrong", 0),
    Case("Ada", "Answer: **Ada**", "wrong", 0),
    Case("Ada", "Answer: Ada or Bo", "wrong", 0),
    Case("Ada", "Answer: Adam", "wrong", 0),
    Case("Ada", "Answer: A", "wrong", 0),
    Case("C", "cannot tell", "wrong", 0),
    Case("KXQ-4821", "Answer: KXQ4821", "wrong", 0),
    Case("KXQ-4821", "Answer: KXQ\N{EN DASH}4821", "wrong", 0),
    Case("Ada Byron", "Answer: AdaByron", "wrong", 0),
    Case("Ada", "It is Ada", "wrong", 0),
    Case("Ada", "Answer: Ada\nAnswer: Bo", "wrong", 0),
    Case("Ada", "It is Ada,\nI believe.", "form", 0),
    Case("Ada", "Answer: Ada\n\nShe is in line 7.", "form", 0),
    Case("Ada", "Answer:\nAda", "form", 0),
    Case("Ada", "- Ada\n- Bo", "form", 0),
    Case("Ada", "", "form", 0),
    Case("Ada", "\n", "form", 0),
    Case("Ada", "**Answer:** Ada\n**Done.**", "form", 0),
]
VERBATIM = [
    Case("a;b\nc;d", "a;b\nc;d", "right", 1),
    Case("a;b\nc;d", "a;b\nc;d\n", "right", 1),
    Case("a;b\nc;d", "\n\na;b\nc;d\n\n", "right", 1),
    Case("a;b\nc;d", "a;b\r\nc;d\r\n", "right", 0),
    Case("a", "a", "right", 1),
    Case("a b", "a b", "right", 1),
    Case("é;ß", "é;ß", "right", 1),
    Case("a\n\nb", "a\n\nb", "right", 1),
    Case(" a", " a", "right", 1),
    Case("```", "```", "right", 1),
    Case("a;b\nc;d", "c;d\na;b", "wrong", 0),
    Case("a;b\nc;d", "a;b", "wrong", 0),
    Case("a;b\nc;d", "a;b\nc;d\ne;f", "wrong", 0),
    Case("a;b\nc;d", "a;b c;d", "wrong", 0),
    Case("a;b\nc;d", "A;B\nC;D", "wrong", 1),
    Case("a;b\nc;d", "a; b\nc; d", "wrong", 0),
    Case("a;b\nc;d", "a;b \nc;d", "wrong", 0),
    Case("a;b\nc;d", " a;b\nc;d", "wrong", 1),
    Case("a;b\nc;d", "a;b\n\nc;d", "wrong", 0),
    Case("a;b\nc;d", "Here they are:\na;b\nc;d", "wrong", 0),
    Case("a;b\nc;d", "Answer: a;b\nc;d", "wrong", 0),
    Case("a;b\nc;d", "a;b\nc;d\nDone.", "wrong", 0),
    Case("a;b\nc;d", "- a;b\n- c;d", "wrong", 0),
    Case("a;b\nc;d", "a,b\nc,d", "wrong", 0),
    Case("a;b\nc;d", "x", "wrong", 0),
    Case("a b", "a  b", "wrong", 0),
    Case("a b", "a\tb", "wrong", 0),
    Case("a", "Answer: a", "wrong", 0),
    Case("a", "a.", "wrong", 0),
    Case("a;b\nc;d", "```\na;b\nc;d\n```", "form", 0),
    Case("a;b\nc;d", "```csv\na;b\nc;d\n```", "form", 0),
    Case("a", "a ```", "form", 0),
    Case("a", "", "form", 0),
    Case("a", "\n\n", "form", 0),
]
RECORD = '{"name": "Ada", "year": 1815}'
JSONS = [
    Case(RECORD, RECORD, "right", 1),
    Case(RECORD, '{"year": 1815, "name": "Ada"}', "right", 0),
    Case(RECORD, '{"name":"Ada","year":1815}', "right", 0),
    Case(RECORD, '\n{\n  "name": "Ada",\n  "year": 1815\n}\n', "right", 0),
    Case(RECORD, '{"name": "\\u0041da", "year": 1815}', "right", 0),
    Case(RECORD, '{"name": "Ada", "year": 1815.0}', "right", 0),
    Case("[1, 2]", "[1,2]", "right", 0),
    Case("[]", "[]", "right", 1),
    Case("null", "null", "right", 1),
    Case("0.1", "0.10", "right", 0),
    Case('{"a": [true, {"b": null}]}', '{"a": [true, {"b": null}]}', "right", 1),
    Case(RECORD, '{"name": "Ada", "year": "1815"}', "wrong", 0),
    Case(RECORD, '{"name": "ada", "year": 1815}', "wrong", 1),
    Case(RECORD, '{"name": "Ada"}', "wrong", 0),
    Case(RECORD, '{"name": "Ada", "year": 1815, "place": null}', "wrong", 0),
    Case(RECORD, '{"Name": "Ada", "year": 1815}', "wrong", 1),
    Case(RECORD, f"[{RECORD}]", "wrong", 0),
    Case(RECORD, "{}", "wrong", 0),
    Case(RECORD, "null", "wrong", 0),
    Case(RECORD, '"Ada"', "wrong", 0),
    Case("[1, 2]", "[2, 1]", "wrong", 0),
    Case("[1, 2]", "[1]", "wrong", 0),
    Case("[1]", "[true]", "wrong", 0),
    Case("[true]", "[1]", "wrong", 0),
    Case("[0]", "[false]", "wrong", 0),
    Case("0.1", "0.10000000000000000001", "wrong", 0),
    Case("null", "false", "wrong", 0),
    Case(RECORD, f"```json\n{RECORD}\n```", "form", 0),
    Case(RECORD, '{"year": 1e9999999999999999999999}', "form", 0),
    Case(RECORD, f"Here it is: {RECORD}", "form", 0),
    Case(RECORD, f"Answer: {RECORD}", "form", 0),
    Case(RECORD, f"{RECORD}\nDone.", "form", 0),
    Case(RECORD, "{'name': 'Ada', 'year': 1815}", "form", 0),
    Case(RECORD, '{"name": "Ada", "year": 1815,}', "form", 0),
    Case(RECORD, '{"name": "Ada", "name": "Ada", "year": 1815}', "form", 0),
    Case(RECORD, '{"name": "Ada", "year": NaN}', "form", 0),
    Case(RECORD, "Ada, 1815", "form", 0),
    Case(RECORD, "", "form", 0),
    Case(RECORD, "[" * 50_000, "form", 0),
]
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
    """True if the checker needs data of NLTK that no package of the tests has. The label holds only
    with them."""


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
    Instruction("ratio:stop_words", {"percentage": 10}, "the of and", "wrong", 0),
    Instruction("words:start_verb", {}, "Run to the station.", "right", 1, True),
    Instruction("format:title_case", {}, "All Words Have Capitals", "right", 1),
    Instruction("format:title_case", {}, "Not all have", "wrong", 0),
]
X = "\N{MULTIPLICATION SIGN}"
GYM = [
    GymCase(family, entry, answer, label, reference)
    for family, entry, answers in [
        (
            "gcd",
            {"answer": "4"},
            [
                ("4", "right", 1),
                ("Answer: 4", "right", 0),
                ("answer: 4", "right", 0),
                ("It divides both.\nAnswer: 4", "right", 0),
                ("Answer: 5\nNo.\nAnswer: 4", "right", 0),
                ("Answer: 5", "wrong", 0),
                ("Answer: 44", "wrong", 0),
                ("Answer: 4.", "wrong", 0),
                ("Answer: 4 or 5", "wrong", 0),
                ("Answer: the GCD is 4", "wrong", 0),
                ("Answer: -4", "wrong", 0),
                ("The GCD is 4", "wrong", 0),
                ("It is 4,\nI think.", "form", 0),
                ("Answer:\n4", "form", 0),
                ("Answer: 4\nDone.", "form", 0),
                ("", "form", 0),
            ],
        ),
        (
            "spell_backward",
            {"answer": "puteg", "metadata": {"word": "getup"}},
            [
                ("puteg", "right", 1),
                ("Answer: puteg", "right", 0),
                ("The letters turned.\nAnswer: puteg", "right", 0),
                ("Answer: getup", "wrong", 0),
                ("Answer: p u t e g", "wrong", 0),
                ("Answer: put", "wrong", 0),
                ("Answer: puteg or getup", "wrong", 0),
                ("Letters:\np, u, t, e, g", "form", 0),
                ("\n", "form", 0),
            ],
        ),
        (
            "prime_factorization",
            {"answer": f"2 {X} 2 {X} 3", "metadata": {"factors": [2, 2, 3]}},
            [
                (f"2 {X} 2 {X} 3", "right", 1),
                (f"Answer: 2 {X} 2 {X} 3", "right", 0),
                (f"Answer: 3{X}2{X}2", "right", 0),
                (f"Answer: 2 {X} 6", "wrong", 0),
                ("Answer: 12", "wrong", 0),
                (f"Answer: 2 {X} 3", "wrong", 0),
                ("Answer: 2 * 2 * 3", "form", 0),
                (f"Answer: 2^2 {X} 3", "form", 0),
                ("Answer: twelve", "form", 0),
                ("2\n2\n3", "form", 0),
            ],
        ),
    ]
    for answer, label, reference in answers
]
