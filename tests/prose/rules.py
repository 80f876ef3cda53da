"""The rules of prose, and how sentences are read out of Markdown.

Theory of operation: a document becomes passages (a paragraph, an item of a list, a cell of a table,
a heading), each with the line on which it begins. Code, addresses of links and pictures are taken
out first: a span of code counts as one word. Rules look at sentences of passages, or at headings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_WORDS: Final = 25
"""Of a sentence."""
MAX_FIGURES: Final = 3
"""Numbers in a sentence outside code and tables; more belong into a table."""
MAX_HEADING_WORDS: Final = 7


class Kind(StrEnum):
    """What a passage is."""

    HEADING = "heading"
    TEXT = "text"
    CELL = "cell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Text that stands together."""

    line: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A place that breaks a rule."""

    line: int
    rule: str
    message: str


OWN_WORDS: Final[dict[str, str]] = {
    r"second tr(?:y|ies)": "retry",
    r"tak(?:e|es|ing|en) back|took back": "roll back",
    r"turn(?:s|ed|ing)? away": "reject",
    r"patience": "timeout",
    r"promis(?:e|es|ed|ing)": "SLO, objective",
    r"doubt(?:s|ed|ing)?": "suspect, misprediction",
    r"silen(?:ce|t|tly)s?": "heartbeat timeout, unresponsive, without an error",
    r"strangers?": "unauthenticated peer",
    r"newcomers?": "candidate, new request",
    r"stor(?:y|ies)": "request report",
    r"lately": "recently",
    r"in vain": "name the failure",
    r"at the door|front door|doors?": "ingress, admission",
    r"of its own accord": "by itself",
    r"besides": "also",
    r"whoever|whomever|whatever": "name the subject",
    r"nobody|somebody": "no client, no replica, an operator: name it",
    r"for ever": "forever",
    r"thereby|thereof|therein|wherein|whereby": "plain words",
    r"as yet": "yet",
    r"so much|so many": "the amount",
}
"""A pattern, and what the field says instead."""

OWN_IN_TEXTS: Final[dict[str, str]] = {
    r"let(?:s|ting)? in": "admit, accept",
    r"told": "notify, report, distinguish",
    r"said": "report, log, set",
    r"by hand": "override, manually",
    r"never came": "no token",
    r"mend(?:s|ed|ing)?": "repair",
    r"knock(?:s|ed|ing)?": "connect",
    r"minds": "configuration, decision",
    r"spoken?|speaks": "use, support",
}
"""The same of docstrings, strings and scripts, beside `OWN_WORDS`."""

OWN_IN_NAMES: Final[dict[str, str]] = {
    r"who|whom|every(?:body|one)|any(?:body|one)|someone|(?:no|some)bodys": "name the subject",
    r"rest(?:s|ed)": "idle",
    r"speaks?|spoken?": "send a heartbeat, implement a protocol",
    r"hears?|heard": "get a message, be told",
    r"book(?:s|ed)?": "table, totals, charge",
    r"desks?": "manager, allocator",
    r"verdicts?|judge[sd]?": "decision, result, evaluate",
    r"crowds?": "peer load factor",
    r"unseen": "unreported",
    r"owe[sd]": "pending, debt",
    r"ledgers?": "totals",
    r"seats?": "slot",
    r"journeys?|outlooks?|standing": "lifecycle, forecast, health",
    r"givers|takers": "sources, targets",
    r"harms?": "interference, or name the damage",
    r"told apart": "distinguished",
    r"anew|mends": "again, repairs",
}
"""The same of names of tests, beside `OWN_WORDS`; prose may use them in their plain sense."""

OWN = [(re.compile(rf"\b(?:{old})\b", re.IGNORECASE), new) for old, new in OWN_WORDS.items()]
IN_TEXTS = [
    *OWN,
    *((re.compile(rf"\b(?:{old})\b", re.IGNORECASE), new) for old, new in OWN_IN_TEXTS.items()),
]
HEADLESS = re.compile(
    r"(?:^|[;:(] ?|\b(?:and|or|than|but) )(?:who|what) (?!if\b)"
    r"|\b(?:of|to|for|by|with|from|in|on|at|as|after|before|beside|through) what\b",
    re.IGNORECASE,
)
_FORMER = [re.compile(rf"\b(?:{old})\b") for old in (*OWN_WORDS, *OWN_IN_NAMES)]
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|etc|cf|approx|Fig|Sec|No)\.")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*")
_VERB = re.compile(
    r"\b(?:is|are|was|were|has|have|had|does|do|goes|go|comes|come|can|will|may|must|cannot|takes|gets|knows)\b",
    re.IGNORECASE,
)
_ITEM = re.compile(r"(?:[-*+]|\d+\.) +(?:\[[ x]\] +)?|> ?")
_ALONE = re.compile(r"$|[#|<]|!\[")
"""Begins a line that ends the passage before it, and is none or one or several by itself."""
_RULER = re.compile(r"[|:\- ]+")
_WORD = re.compile(r"[^\s/()]*\w[^\s()]*")


def passages(markdown: str) -> Iterator[Passage]:
    """The passages of a document, in order; blocks of code and of HTML are left out."""
    lines: list[str] = []
    begun = 0
    for number, raw in enumerate([*_without_blocks(markdown).split("\n"), ""], 1):
        line = raw.strip()
        item = _ITEM.match(line)
        if lines and (item is not None or _ALONE.match(line)):
            yield Passage(line=begun, kind=Kind.TEXT, text=_plain(" ".join(lines)))
            lines = []
        if _ALONE.match(line):
            yield from _alone(number, line)
            continue
        begun = begun if lines else number
        lines.append(line[item.end() :] if item is not None else line)


def _alone(number: int, line: str) -> Iterator[Passage]:
    """The passages of a line that no other line goes on."""
    if line.startswith("#"):
        yield Passage(line=number, kind=Kind.HEADING, text=_plain(line.lstrip("# ")))
    if line.startswith("|") and not _RULER.fullmatch(line):
        for cell in re.split(r"(?<!\\)\|", line.strip("|")):
            if cell.strip():
                yield Passage(line=number, kind=Kind.CELL, text=_plain(cell.strip()))


def _without_blocks(markdown: str) -> str:
    blank = lambda found: "\n" * found[0].count("\n")  # noqa: E731 - keeps the numbers of lines
    text = re.sub(r"^ *(```|~~~).*?^ *\1[^\n]*$", blank, markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)


def _plain(text: str) -> str:
    text = re.sub(r"`+[^`]*`+", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<?https?://\S+>?", "address", text)
    return re.sub(r"\*\*|__|\\", "", text)


def sentences(text: str) -> list[str]:
    """The sentences of a passage."""
    return [part for part in _SENTENCE.split(_ABBREVIATION.sub(r"\1", text)) if part.strip()]


def words(sentence: str) -> int:
    """How many words a sentence has."""
    return len(_WORD.findall(sentence))


def former_words(name: str) -> list[str]:
    """The words in a name of code that the field has others for, or that stand without a noun."""
    text = name.removeprefix("test_").replace("_", " ")
    return [found[0].strip() for rule in (*_FORMER, HEADLESS) for found in rule.finditer(text)]


def _sentence_rules(sentence: str, kind: Kind) -> Iterator[tuple[str, str]]:
    count = words(sentence)
    if count > MAX_WORDS:
        yield "long-sentence", f"got {count} words, expected at most {MAX_WORDS}"
    if not sentence.rstrip(" )\"'").endswith("?"):
        for found in HEADLESS.finditer(sentence):
            yield "headless", f"got {found[0].strip()!r} as a noun, expected the noun itself"
    figures = len(_NUMBER.findall(sentence))
    if kind is Kind.TEXT and figures > MAX_FIGURES:
        yield "figures", f"got {figures} numbers, expected at most {MAX_FIGURES}; make a table"
    for pattern, instead in OWN:
        for found in pattern.finditer(sentence):
            yield "own-word", f"got {found[0]!r}, expected the field's word: {instead}"


def _heading_rules(text: str) -> Iterator[tuple[str, str]]:
    if text.endswith("?"):
        return
    count = words(text)
    if count > MAX_HEADING_WORDS:
        yield "long-heading", f"got {count} words, expected at most {MAX_HEADING_WORDS}"
    if found := _VERB.search(text) or re.match(r"(?:Who|What|When|Where|Whose)\b", text):
        yield "sentence-heading", f"got {found[0]!r}, expected a topic that one searches for"
    for pattern, instead in OWN:
        for own in pattern.finditer(text):
            yield "own-word", f"got {own[0]!r}, expected the field's word: {instead}"


def findings(markdown: str) -> Iterator[Finding]:
    """Every place of a document that breaks a rule."""
    for passage in passages(markdown):
        if passage.kind is Kind.HEADING:
            for rule, message in _heading_rules(passage.text):
                yield Finding(line=passage.line, rule=rule, message=f"{message}: {passage.text!r}")
            continue
        for sentence in sentences(passage.text):
            for rule, message in _sentence_rules(sentence, passage.kind):
                text = f"{message}: {sentence[:90]!r}"
                yield Finding(line=passage.line, rule=rule, message=text)
