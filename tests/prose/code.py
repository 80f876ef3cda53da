"""The words of code: docstrings, comments, help texts and messages, and the rules that they keep.

Theory of operation: a module is parsed once. Its constants become passages of one of five kinds,
each with its line. What a text names in code (between backticks, or filled in by an f-string)
counts as one word. Docstrings keep fewer rules than documents do.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.prose.rules import HEADLESS, IN_TEXTS, Finding, passages, sentences, words

MAX_WORDS: Final = 30
"""Of a sentence."""


class Text(StrEnum):
    """The kinds of text in code."""

    DOCSTRING = "docstring"
    COMMENT = "comment"
    HELP = "help"
    MESSAGE = "message"
    STRING = "string"
    """Any other text with a space in it: titles, rows, reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A text of a module."""

    line: int
    kind: Text
    text: str


_ERROR = re.compile(
    r"(?:\w+(?:Error|Ended|Exceeded|Exhausted|Died|Failed|Full|Invalid|Key|Limited|Line|Long|Memory"
    r"|Missing|Range|Rejected|Resumable|Running|Unattainable|Unhealthy|Unsupported|Parameter|Out)"
    r"|Unknown\w+|Ambiguous\w+|Not\w+|No[A-Z]\w+|Cannot\w+|Rejected|Evicted|[Ff]inding)$"
)
"""Names of calls whose texts are messages."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_BUILTIN = re.compile(r"\bnew Promise\b|\bPromise\.")
_DIRECTIVE = re.compile(r"#\s*(?:!|noqa|type:|ruff:|fmt:|pragma|pyright|-{3,}|={3,})")
_SECTION = re.compile(r"(?:Args|Attributes|Raises|Returns|Source|Yields|Example):$")
_ENTRY = re.compile(r"\s+[\w.*, ]+: ")
_PERSON = re.compile(r"\b(?:whom|who else|whose\b(?! [\w`]))", re.IGNORECASE)
_ONE = re.compile(r"\b(?:ones|(?:this|that|every) one\b(?! [a-z])|one (?:that|of which|whose))\b")
STARTS: Final = re.compile(
    r"(?:about|also|and|as|at|because|before|both|but|by|during|either|everything|for|from|how|however"
    r"|if|in|instead|into|it|its|more|most|neither|none|nor|not|nothing|of|on|once|only|or|otherwise|so"
    r"|such|than|that|their|them|then|there|these|they|this|those|to|too|under|unless|until|what|when"
    r"|where|whether|which|while|who|whose|with|without)$",
    re.IGNORECASE,
)
"""First words of help that are neither a noun nor a verb."""
_NO_TEXT = re.compile(r"^\s*(?:import |http-request |the of )|\(txn\.")
"""Begins programs, rules of HAProxy and the common words of prompts."""


def _calls(node: ast.Call) -> str:
    """The last part of what is called."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _text_of(node: ast.expr) -> str | None:
    """A constant text, with code in the places that are filled in; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text_of(part) or "`code`" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = (_text_of(left), _text_of(right))
            return None if None in both else "".join(part or "`code`" for part in both)
    return None


def is_error(name: str) -> bool:
    """Whether the texts that a call of that name gets are messages."""
    return _ERROR.match(name) is not None


def _of_call(node: ast.Call) -> Iterator[Snippet]:
    name = _calls(node)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    helps = [keywords["help"]] if "help" in keywords else []
    helps += node.args[:1] if name == "Verb" else []
    for value in helps:
        if text := _text_of(value):
            yield Snippet(line=value.lineno, kind=Text.HELP, text=text)
    if is_error(name):
        for value in node.args:
            text = _text_of(value)
            if text and " " in text:
                yield Snippet(line=value.lineno, kind=Text.MESSAGE, text=text)


def _strings(tree: ast.Module) -> Iterator[Snippet]:
    """Texts of expressions, each whole, but docstrings; a name or a key has no space."""
    seen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            seen.add(node.value)
        elif isinstance(node, ast.expr) and node not in seen and (text := _text_of(node)):
            seen.update(ast.walk(node))
            if " " in text.strip() and not _NO_TEXT.search(text):
                yield Snippet(line=node.lineno, kind=Text.STRING, text=text)


def _constants(tree: ast.Module) -> Iterator[Snippet]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Snippet(line=node.lineno, kind=Text.DOCSTRING, text=text)
            case ast.Call():
                yield from _of_call(node)
            case ast.Assign(targets=[ast.Name(id="message")], value=value):
                if message := _text_of(value):
                    yield Snippet(line=value.lineno, kind=Text.MESSAGE, text=message)


def _comments(source: str) -> Iterator[Snippet]:
    """The comments; lines of them that follow each other are one."""
    lines: list[str] = []
    begun = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        line = token.start[0]
        if lines and line != last + 1:
            yield Snippet(line=begun, kind=Text.COMMENT, text="\n".join(lines))
            lines = []
        begun, last = begun if lines else line, line
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield Snippet(line=begun, kind=Text.COMMENT, text="\n".join(lines))


def snippets(source: str) -> Iterator[Snippet]:
    """Every text of a module that a person reads."""
    tree = ast.parse(source)
    known = list(_constants(tree))
    texts = {snippet.text for snippet in known}
    yield from known
    yield from (snippet for snippet in _strings(tree) if snippet.text not in texts)
    yield from _comments(source)


def _as_markdown(docstring: str) -> str:
    """A docstring with its sections as lists, and without its drawings and examples."""
    first, _, rest = docstring.partition("\n")
    lines = [first, *textwrap.dedent(rest).split("\n")] if rest else [first]
    result: list[str] = []
    in_section = is_drawn = False
    for index, line in enumerate(lines):
        shown = line
        if _SECTION.match(line.strip()):
            in_section, is_drawn, shown = True, False, "#"
        elif not line.strip():
            in_section = is_drawn = False
        elif index and not in_section and line.startswith("    ") and not lines[index - 1].strip():
            is_drawn = True
        elif in_section and _ENTRY.match(line):
            shown = f"- {line.strip()}"
        elif not line.startswith(" "):
            is_drawn = False
        result.append("" if is_drawn else shown)
    return "\n".join(result)


def _prose_rules(snippet: Snippet, sentence: str) -> Iterator[tuple[str, str]]:
    count = words(sentence)
    if snippet.kind is not Text.MESSAGE and count > MAX_WORDS:
        yield "long-sentence", f"got {count} words, expected at most {MAX_WORDS}"
    if not sentence.rstrip(" )\"'").endswith("?"):
        for found in (*HEADLESS.finditer(sentence), *_PERSON.finditer(sentence)):
            yield "headless", f"got {found[0].strip()!r} as a noun, expected the noun itself"
    for found in _ONE.finditer(sentence):
        yield "headless", f"got {found[0]!r} as a noun, expected the noun itself"


def _word_rules(sentence: str) -> Iterator[tuple[str, str]]:
    for pattern, instead in IN_TEXTS:
        for found in pattern.finditer(sentence):
            yield "own-word", f"got {found[0]!r}, expected the field's word: {instead}"


def _text_rules(snippet: Snippet) -> Iterator[tuple[str, str]]:
    text = snippet.text.strip()
    first = (re.findall(r"[\w'-]+", text) or [""])[0]
    if snippet.kind is Text.HELP and STARTS.match(first):
        yield "help", f"got {first!r} first, expected a noun or an imperative verb"
    if snippet.kind is Text.MESSAGE:
        if re.search(r"\bwanted\b", text):
            yield "message", "got 'wanted', expected 'expected'"
        elif re.match(r"got\b", text) and not re.search(r"\bexpected\b|; |: ", text):
            yield "message", "got no right value, expected 'got X, expected Y'"
        if re.search(r"[^.]\.$", text):
            yield "message", "got a full stop, expected none at the end"


def _findings(snippet: Snippet, *, only_words: bool) -> Iterator[tuple[int, str, str, str]]:
    for rule, message in () if only_words else _text_rules(snippet):
        yield snippet.line, rule, message, snippet.text
    markdown = _as_markdown(snippet.text)
    for passage in passages(markdown):
        for sentence in sentences(passage.text):
            if not only_words and snippet.kind is not Text.STRING:
                for rule, message in _prose_rules(snippet, sentence):
                    yield snippet.line + passage.line - 1, rule, message, sentence
            for rule, message in _word_rules(sentence):
                yield snippet.line + passage.line - 1, rule, message, sentence


def findings(source: str, *, only_words: bool = False) -> list[Finding]:
    """Every place of a module whose words break a rule, by line.

    With `only_words`, sentences may be long and without a noun.
    """
    found: Iterable[Finding] = (
        Finding(
            line=line,
            rule=f"{snippet.kind}/{rule}",
            message=f"{message}: {' '.join(text.split())[:90]!r}",
        )
        for snippet in snippets(source)
        for line, rule, message, text in _findings(snippet, only_words=only_words)
    )
    return sorted(found, key=lambda finding: finding.line)


def script_findings(source: str) -> list[Finding]:
    """Every line of a script, style or page with a word that the field has another for.

    Names count, too, word by word: `promisedText` has the word `promised`.
    """
    result: list[Finding] = []
    for number, line in enumerate(source.splitlines(), 1):
        text = _CAMEL.sub(" ", _BUILTIN.sub("", line)).replace("_", " ").replace("-", " ")
        result += [
            Finding(line=number, rule=f"script/{rule}", message=f"{message}: {line.strip()[:90]!r}")
            for rule, message in _word_rules(text)
        ]
    return result
