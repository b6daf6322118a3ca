"""Text of a shell script as tokens: words with their quotes, operators, arrays, here-documents.

Only what tells the words of launch scripts apart is known here: quotes, backslashes, comments,
``$( )``, ``${ }`` and backticks (kept as they are), operators, redirections (dropped).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_OPERATORS = (";;", "&&", "||", "|&", ";", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|>|<)|&>>?")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_ARITHMETIC = re.compile(r"\(\(.*?\)\)", re.DOTALL)
_BLANK = " \t"
_ENDS_WORD = " \t\n;&|<>()"
_CLOSING = {"(": ")", "{": "}"}


class Token(NamedTuple):
    """A word, an operator, an array's assignment or the text of a here-document."""

    kind: str
    """`word`, `operator`, `array` or `document`."""
    text: str
    """As it stands, quotes and all; of an array its name, and ``+`` where it is added to."""
    line: int
    words: tuple[str, ...] = ()
    """Elements of an array."""


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a script, its line ends included."""
    text = text.replace("\r\n", "\n")
    documents: list[tuple[str, int]] = []
    at, line, last = 0, 1, text.rfind("))")
    while at < len(text):
        start = at
        operator = next((o for o in _OPERATORS if text.startswith(o, at)), None)
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] in _BLANK:
            at += 1
        elif text[at] == "#":
            at = _end(text, "\n", at)
        elif at < last and (arithmetic := _ARITHMETIC.match(text, at)):
            at = arithmetic.end()
            yield Token("word", arithmetic[0], line)
        elif redirection := _REDIRECTION.match(text, at):
            at, target = _next_word(text, redirection.end())
            if "<<" in redirection[0] and "<<<" not in redirection[0]:
                documents.append((target.strip("'\"\\"), line))
        elif operator == "\n" and documents:
            at += 1
            yield Token("operator", "\n", line)
            for end, begun in documents:
                body, at = _document(text, at, end)
                yield Token("document", body, begun)
            documents = []
        elif operator:
            at += len(operator)
            yield Token("operator", operator, line)
        elif array := _ARRAY.match(text, at):
            elements, at = _elements(text, array.end())
            yield Token("array", array[1] + array[2], line, elements)
        else:
            at = word_end(text, at)
            yield Token("word", text[start:at].replace("\\\n", ""), line)
        line += text.count("\n", start, at)
    yield Token("operator", "\n", line)


def word_end(text: str, at: int) -> int:
    """Return where the word that begins at a place ends."""
    while at < len(text) and text[at] not in _ENDS_WORD:
        at = _after(text, at)
    return at


def _after(text: str, at: int) -> int:
    """Return the place after one character, or after all that is quoted or expanded there."""
    if text[at] == "\\":
        return at + 2
    if text[at] == "'":
        return _end(text, "'", at + 1) + 1
    if text[at] == "`":
        return _end(text, "`", at + 1) + 1
    if text[at] == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = _after(text, at) if text[at] in "\\`$" else at + 1
        return at + 1
    if text[at] == "$" and text[at + 1 : at + 2] in _CLOSING:
        return _closed(text, at + 1)
    return at + 1


def _closed(text: str, at: int) -> int:
    """Return the place after the bracket that closes the one at a place."""
    opening, closing, depth = text[at], _CLOSING[text[at]], 0
    while at < len(text):
        if text[at] in (opening, closing):
            depth += 1 if text[at] == opening else -1
            at += 1
            if not depth:
                return at
        else:
            at = _after(text, at)
    return at


def _end(text: str, mark: str, at: int) -> int:
    found = text.find(mark, at)
    return len(text) if found < 0 else found


def _next_word(text: str, at: int) -> tuple[int, str]:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    end = word_end(text, at)
    return end, text[at:end]


def _document(text: str, at: int, end: str) -> tuple[str, int]:
    """Return a here-document up to the line that ends it, and the place after that."""
    begun = at
    while at < len(text):
        after = _end(text, "\n", at)
        if text[at:after].strip() == end:
            return text[begun:at], after
        at = after + 1
    return text[begun:], len(text)


def _elements(text: str, at: int) -> tuple[tuple[str, ...], int]:
    """Return the elements of an array, as they stand, and the place after its bracket."""
    found = []
    while at < len(text) and text[at] != ")":
        if text[at].isspace() or text.startswith("\\\n", at):
            at += 2 if text[at] == "\\" else 1
        elif text[at] == "#":
            at = _end(text, "\n", at)
        else:
            end = max(word_end(text, at), at + 1)
            found.append(text[at:end].replace("\\\n", ""))
            at = end
    return tuple(found), at + 1
