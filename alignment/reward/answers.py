r"""Find the answer in a completion, and compare two answers: the one normaliser that every rule-based reward uses.

**Where the answer is** (`extract`), by form:

- `strict`: the first that is there of the last `\boxed{}` or `\fbox{}`; what follows the last `####`; what follows the
  last "answer is" or "answer:"; a number after the `=` (or "equals") that ends the text; the whole text.
- `boxed`, `hash`, `whole`: only that form.
- `last_number`: the last number anywhere. Flexible: it pays for a number mentioned in passing, so it is no default.

A box that is never closed is an answer that was cut off: `strict` and `boxed` then find none.

**When two answers are equal** (`equal`). Both are cleaned: mathematics and markdown delimiters, `\text{}`, `\left`,
LaTeX spaces, quotes, a leading `x =` and trailing punctuation go. If both are numbers, their exact values are compared;
otherwise their text, without spaces and case. A number may have

- thousands separators: `70,000`, `70{,}000`, `70\,000`; a comma elsewhere is no number (`1,2` is a pair);
- a currency sign, a percent or degree sign, a unit of up to four words (`$5`, `5\text{ cm}`, `72 clips, altogether`).
  They are dropped, not converted: `28%` equals 28 and not 0.28, `5 cm` equals `5 m`. Words that change the value or
  hedge (million, half, or, not, ...) are no unit, nor is a letter that touches the number (`5x`);
- the form of a fraction (`1/2`, `\frac12`), a mixed number (`1 1/2`) or a power of ten (`2e3`, `2 \times 10^3`).

Every regular expression here takes time linear in the text, whatever a policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Literal

Form = Literal["strict", "boxed", "hash", "whole", "last_number"]

BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")
ANSWER_IS = re.compile(r"\banswer\b[\s*_\"']{0,4}(?:is\b|[:=])[\s:=*_]{0,8}", re.IGNORECASE)
SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
EQUALS = re.compile(r"(?<![=<>!])=(?!=)|\bequals\b|\bis equal to\b")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+|\.(?!\d))?|\.\d+)"
_PART = r"\{\s?([-+]?\d+(?:\.\d+)?)\s?\}"
NUMBER = re.compile(
    rf"""(?:[$€£¥₹]\s?(?=[-+]))?(?P<sign>[-+]?)\s?[$€£¥₹]?\s?(?:
        (?:(?P<whole>\d+)\s?)?\\frac{_PART.replace("(", "(?P<top>", 1)}{_PART.replace("(", "(?P<bottom>", 1)}
      | (?:(?P<whole2>\d+)\s)?(?P<top2>{_DECIMAL})\s?/\s?(?P<bottom2>{_DECIMAL})
      | (?P<decimal>{_DECIMAL})
        (?:[eE](?P<e>[-+]?\d{{1,3}})(?!\d)|\s?(?:\\times|\\cdot|×|\*)\s?10\^\{{?(?P<power>[-+]?\d{{1,3}})\}}?)?
    )""",
    re.VERBOSE,
)
# No sign after a digit or a bracket (5-3 ends in 3), no number inside a word (v2).
NUMBER_IN_TEXT = re.compile(rf"(?<![\w.])(?:(?<![)\]}}]){NUMBER.pattern})", re.VERBOSE)

# A letter that is picked, at the beginning: "(B)", "B) Paris", "B: Paris", "option B"; "B or C" and "A dog" pick none.
CHOICE = re.compile(
    r"(?:(?:option|choice|letter)\s)?"
    r"(?:[(\[]([a-z])[)\]]|([a-z])(?=$|[).:]|\s?[-–—]\s|,?\s(?:because|since|as)\b))",
    re.IGNORECASE,
)
# A second one behind it: "(B) or (C)", "A) 3 B) 4".
SECOND_CHOICE = re.compile(r"[(\[][A-Za-z][)\]]|\b[A-Z]\)|^[\s).:]{0,4}(?:or|and|/|,|&)\s?[A-Za-z]\b(?!')")

LONGEST_NUMBER = 100  # characters; what is longer is compared as text, so that no value costs memory
LONGEST_UNIT = 4  # words


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Symbols that may touch the number or stand as a single letter; other letters there are a variable.
SYMBOLS = _words(
    "% ° $ € £ ¥ ₹ m s g h l L N J W V A K C F mm cm dm km mg kg lb lbs oz ft in yd mi ml mL kL min sec hr hrs am pm "
    "mph kph kmh Hz kHz MHz GB MB KB kWh kW kJ Pa kPa th st nd rd"
)
# Words that take an answer back or offer a second one.
HEDGES = _words(
    "or nor not no maybe perhaps possibly either neither alternatively otherwise versus vs if unless except wrong"
)
# Words that are no unit: those, and words that make another number of the one before them.
NO_UNITS = HEDGES | _words(
    "and plus minus times divided over out of to than hundred hundreds thousand thousands million millions billion "
    "billions trillion dozen dozens half third thirds quarter quarters point squared cubed pi sqrt root factorial mod "
    "modulo"
)


def extract(text: str, form: Form = "strict") -> str | None:
    """The answer a text gives in that form, as written; None where it gives none."""
    match form:
        case "strict":
            return _strict(text)
        case "boxed":
            return _boxed(text)
        case "hash":
            return _after_hash(text)
        case "whole":
            return text.strip() or None
        case "last_number":
            return _last_number(text)
    raise ValueError(f"there is no form {form!r} of an answer: use strict, boxed, hash, whole or last_number")


def after(text: str, end: str) -> str | None:
    """What follows the last `end` (a closing reasoning tag); None where the reasoning never ended."""
    _, found, rest = text.rpartition(end)
    return rest if found else None


def last_block(text: str, marks: Collection[str]) -> str | None:
    """The last closed Markdown block whose mark is one of these ("" = none, "json"); None where there is none."""
    found, block, fence, mark = None, None, 0, ""
    for line in text.splitlines():
        stripped = line.strip()
        ticks = len(stripped) - len(stripped.lstrip("`"))
        if block is None:
            if ticks >= 3 and "`" not in stripped[ticks:]:
                block, fence, mark = [], ticks, stripped[ticks:].strip().lower()
        elif ticks >= fence and ticks == len(stripped):
            found = "".join(f"{line}\n" for line in block) if mark in marks else found
            block = None
        else:
            block.append(line)
    return found


def gold_answer(text: str) -> str | None:
    """The answer in a dataset's solution: its last box or ####, otherwise the whole text. None where that is empty."""
    if BOX.search(text):
        return _boxed(text)
    return _after_hash(text) if "####" in text else text.strip() or None


def equal(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether two answers are the same, as the module's docstring says.

    tolerance: numbers are the same up to this share of `gold`; 0 = exactly.
    """
    value, wanted = number(answer), number(gold)
    if value is not None and wanted is not None:
        return abs(value - wanted) <= Fraction(str(tolerance)) * abs(wanted)
    if value is not None or wanted is not None:
        return False
    text = plain(answer)
    return bool(text) and text == plain(gold)


def choice(answer: str) -> str | None:
    """The letter that an answer to a multiple-choice question picks, as a capital; None for none and for several."""
    text = unwrapped(answer).strip("*_ ")
    match = CHOICE.match(text)
    if match is None or SECOND_CHOICE.search(text[match.end() :]):
        return None
    return (match[1] or match[2]).upper()


# ---- where the answer is -------------------------------------------------------------------------------------------
def _strict(text: str) -> str | None:
    if BOX.search(text):
        return _boxed(text)
    if "####" in text:
        return _after_hash(text)
    said = [match.end() for match in ANSWER_IS.finditer(text)]
    if said:
        return _claim(text[said[-1] :])
    return _after_equals(text) or text.strip() or None


def _boxed(text: str) -> str | None:
    """Content of the last box, braces balanced."""
    starts = [match.end() for match in BOX.finditer(text)]
    depth, place = 1, starts[-1] if starts else len(text)
    while place < len(text):
        if text[place] == "\\":  # an escaped brace is text
            place += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place].strip() or None
        place += 1
    return None


def _after_hash(text: str) -> str | None:
    """GSM8K's form: the number right after the last ####, whatever follows it, unless a second one is offered."""
    if "####" not in text:
        return None
    claim = _first_sentence(text.rpartition("####")[2].lstrip())
    lead = NUMBER.match(claim)
    if lead is None or number(claim) is not None:
        return claim or None
    rest = claim[lead.end() :]
    return claim if _hedges(rest) and re.search(r"\d", rest) else lead.group()


def _claim(text: str) -> str | None:
    """The answer at the beginning of a sentence: all of it, or its number where prose follows ("12, because ...")."""
    claim = _first_sentence(text)
    lead = NUMBER.match(claim)
    if lead is None or number(claim) is not None:
        return claim or None
    rest = claim[lead.end() :]
    prose = re.match(r"[,;:]?\s([A-Za-z]{2,})", rest)
    return lead.group() if prose and prose[1].lower() not in NO_UNITS and not _hedges(rest) else claim


def _first_sentence(text: str) -> str:
    end = SENTENCE_END.search(text)
    return text[: end.start() if end else len(text)].strip()


def _hedges(text: str) -> bool:
    return any(word.lower() in HEDGES for word in re.findall(r"[A-Za-z]+", text))


def _after_equals(text: str) -> str | None:
    """The number after the last `=` or "equals" of the last line, if nothing but its unit follows."""
    line = text.strip().rpartition("\n")[2]
    signs = [match.end() for match in EQUALS.finditer(line)]
    answer = line[signs[-1] :].strip() if signs else ""
    return answer if answer and number(answer) is not None else None


def _last_number(text: str) -> str | None:
    found = [match.group().strip() for match in NUMBER_IN_TEXT.finditer(_clean(text))]
    return found[-1] if found else None


# ---- what an answer is worth ---------------------------------------------------------------------------------------
def number(text: str) -> Fraction | None:
    """The exact value of an answer that is one number, with or without a unit; None for anything else."""
    text = unwrapped(text)
    match = NUMBER.match(text)
    if match is None or len(match.group()) > LONGEST_NUMBER or not _is_unit(text[match.end() :]):
        return None
    value = _value({name: found.replace(",", "") for name, found in match.groupdict().items() if found is not None})
    return -value if value is not None and match["sign"] == "-" else value


def _value(found: dict[str, str]) -> Fraction | None:
    if "decimal" in found:
        return Fraction(found["decimal"]) * Fraction(10) ** int(found.get("e") or found.get("power") or 0)
    top, bottom = found.get("top") or found["top2"], found.get("bottom") or found["bottom2"]
    whole = found.get("whole") or found.get("whole2") or 0
    return Fraction(whole) + Fraction(top) / Fraction(bottom) if Fraction(bottom) else None


def _is_unit(text: str) -> bool:
    """Whether what follows a number is a unit: nothing, a symbol, or a few words on the same line."""
    text = re.sub(r"\^\{?-?\d\}?|[²³]", "", text)
    words = [word for word in re.split(r"[ ,./*·()-]", text) if word]
    if not words:
        return not text.strip(" ,.;:")
    touches = not text.startswith((" ", ",", "-"))
    return (
        len(words) <= LONGEST_UNIT
        and all(word in SYMBOLS or (len(word) > 1 and word.isalpha()) for word in words)
        and not any(word.lower() in NO_UNITS for word in words)
        and (not touches or words[0] in SYMBOLS)
    )


def plain(text: str) -> str:
    """An answer as text to be compared: cleaned, no spaces, no case, `(C)` as `c`."""
    text = re.sub(r"\s", "", unwrapped(text)).casefold()
    return text[1:-1] if re.fullmatch(r"\(\w\)", text) else text


def unwrapped(text: str) -> str:
    """An answer without what surrounds it, its mathematics written in one way."""
    return _unwrap(_clean(text))


def _clean(text: str) -> str:
    """Write mathematics and spaces in one way."""
    text = text.replace("−", "-").replace("\\$", "$").replace("\\%", "%").replace("\\!", "").replace("{,}", ",")
    text = re.sub(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[,;: ]|~|[\u00a0\u2009\u202f\t\r ]|\\q?quad\b", " ", text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree\b", "°", text)
    for _ in range(3):  # nested \text{\textbf{...}}
        text = re.sub(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname) ?\{([^{}\\]*)\}", r" \1", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac ?(?:(\w)|(\{[^{}]*\})) ?(?:(\w)|(\{[^{}]*\}))", _braced_fraction, text)
    return re.sub(r" {2,}", " ", text)


def _braced_fraction(match: re.Match[str]) -> str:
    top, top_braced, bottom, bottom_braced = match.groups()
    return rf"\frac{top_braced or '{' + top + '}'}{bottom_braced or '{' + bottom + '}'}"


def _unwrap(text: str) -> str:
    """Delimiters, markdown, quotes, `x =` and trailing punctuation, off in whatever order they come."""
    pairs = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("*", "*"), ("`", "`"))
    pairs += (('"', '"'), ("'", "'"), ("“", "”"))
    for _ in range(8):
        before = text
        text = re.sub(r"^[A-Za-z](?:_\{?\w\}?)? ?= ?", "", text.strip()).rstrip(" .,;:!?\n")
        for left, right in pairs:
            if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
                text = text[len(left) : -len(right)]
        if text == before:
            break
    return text
