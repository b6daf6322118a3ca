"""What words of a shell script stand for: variables, defaults, arrays, whole-number arithmetic.

Nothing is run. What only a run would tell (``$(hostname)``, ``$1``) becomes a mark that carries the
name of the variable it came through, so that a message can ask for it.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from simulator.errors import DescriptionError

MARK = "\N{REPLACEMENT CHARACTER}"
"""Around the name of what is not known."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")
_BRACED = re.compile(
    r"(?P<count>#?)(?P<name>[A-Za-z_]\w*|[0-9]+|[@*])(?:\[(?P<index>[^]]*)\])?"
    r"(?P<rule>:?[-=+?]|%%?|##?|\^\^|,,)?(?P<word>.*)",
    re.DOTALL,
)
_UNKNOWN = re.compile(f"{MARK}[^{MARK}]*{MARK}")
_NAMELESS = re.compile(f"{MARK}[0-9]*{MARK}")
_ASSIGNED = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")

_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
MOST_DIGITS = 18
"""Numbers of an arithmetic expression have no more."""
MOST_CHARACTERS = 10_000_000
"""Characters that all words of a script together may become."""


def unknown(name: str = "") -> str:
    """Return the mark of a value that only a run would tell."""
    return f"{MARK}{name}{MARK}"


def unknown_names(text: str) -> list[str]:
    """Return the names behind a text's marks; empty ones where there is no variable."""
    return [found.strip(MARK) for found in _UNKNOWN.findall(text)]


@dataclass
class Variables:
    """Variables of a script, as they are at one line of it."""

    given: Mapping[str, str] = field(default_factory=dict)
    """Values that hold whatever the script assigns."""
    values: dict[str, list[str]] = field(default_factory=dict)
    """Elements of each; a plain variable has one."""
    unset: set[str] = field(default_factory=set)
    """Names that were used and never set."""
    characters: int = 0
    """Of all words so far."""

    def assign(self, name: str, elements: list[str], *, more: bool = False) -> None:
        """Set a variable, or add to it; what is given stays."""
        if name in self.given:
            return
        if more:
            self._count(sum(map(len, self.values.get(name, ()))))
        elements = [_NAMELESS.sub(unknown(name), element) for element in elements]
        self.values[name] = [*self.values.get(name, ()), *elements] if more else elements

    def elements(self, name: str) -> list[str] | None:
        """Return the elements of a variable, or None where it is not set."""
        if name in self.given:
            return [self.given[name]]
        if name in self.values:
            return self.values[name]
        if name.isdigit() or name in "@*#?$!":
            return [unknown(name)] if name.isdigit() else []
        self.unset.add(name)
        return None

    def is_set(self, name: str) -> bool:
        """Return whether a variable has a value; a script's own arguments have none."""
        return name in self.given or name in self.values

    def text(self, raw: str) -> str:
        """Return what a word stands for where words are not split: in an assignment, in a test."""
        return " ".join(self.words(raw, splits=False))

    def words(self, raw: str, *, splits: bool = True) -> list[str]:
        """Return the words that a word as it stands becomes: none, one or several."""
        out = _Words()
        at, quoted = 0, False
        while at < len(raw):
            mark = raw[at]
            if mark == "'" and not quoted:
                end = raw.find("'", at + 1) % (len(raw) + 1)
                out.add(raw[at + 1 : end])
                at = end + 1
            elif mark == '"':
                quoted, at = not quoted, at + 1
                if quoted:  # even nothing is a word in quotes
                    out.add("")
            elif mark == "\\":
                kept = quoted and raw[at + 1 : at + 2] not in tuple('$`"\\')
                out.add(raw[at : at + 2] if kept else raw[at + 1 : at + 2])
                at += 2
            elif mark in "$`":
                at = self._expand(raw, at, out, quoted or not splits)
            else:
                out.add(mark)
                at += 1
        words = out.done()
        self._count(sum(map(len, words)))
        return words

    def _count(self, characters: int) -> None:
        """Count what words become, so that a text that doubles itself ends.

        Raises:
            DescriptionError: when it is more than any script's.
        """
        self.characters += characters
        if self.characters > MOST_CHARACTERS:
            raise DescriptionError(
                f"the words of the script become more than {MOST_CHARACTERS:,} characters"
            )

    def _expand(self, raw: str, at: int, out: _Words, whole: bool) -> int:
        """Add what an expansion stands for, and return the place after it."""
        if raw[at] == "`":
            out.add(unknown())
            return raw.find("`", at + 1) % (len(raw) + 1) + 1
        if raw.startswith("$((", at):
            end = raw.find("))", at)
            end = len(raw) if end < 0 else end
            out.add(self.arithmetic(raw[at + 3 : end]))
            return end + 2
        if raw.startswith("$(", at):
            out.add(unknown())
            return _matching(raw, at + 1)
        if raw.startswith("${", at):
            end = _matching(raw, at + 1)
            elements, listed = self._braced(raw[at + 2 : end - 1])
        elif name := _NAME.match(raw, at + 1):
            end = name.end()
            elements, listed = (self.elements(name[0]) or [])[:1], name[0] == "@"
        else:
            out.add("$")
            return at + 1
        if whole and not listed:
            out.add(" ".join(elements))
        elif whole:
            out.several(elements)
        else:
            out.split(" ".join(elements))
        return end

    def _braced(self, inside: str) -> tuple[list[str], bool]:
        """Return the elements that ``${inside}`` stands for, and whether they stay apart."""
        found = _BRACED.fullmatch(inside)
        if not found:
            return [unknown()], False
        name, index, rule, word = found["name"], found["index"], found["rule"], found["word"]
        if rule and rule.lstrip(":") in ("-", "=", "+"):
            elements = self.elements(name) if self.is_set(name) else None
        else:
            elements = self.elements(name)
        if index not in (None, "@", "*"):
            place = self.text(index)
            known = place.isdecimal() and len(place) <= MOST_DIGITS
            inside_it = known and elements and int(place) < len(elements)
            elements = [elements[int(place)]] if inside_it and elements else None
        elif index is None and elements:
            elements = elements[:1]
        if found["count"]:
            size = len(elements or ()) if index in ("@", "*") else len("".join(elements or ()))
            return [str(size)], False
        if rule is None:
            return ([unknown()] if word else list(elements or ())), index == "@"
        return self._by_rule(rule, elements, word), index == "@"

    def _by_rule(self, rule: str, elements: list[str] | None, word: str) -> list[str]:
        missing = elements is None or (rule[0] == ":" and not any(elements))
        kept = list(elements or ())
        if rule[-1] in "-=":
            return [self.text(word)] if missing else kept
        if rule[-1] == "+":
            return [] if missing else [self.text(word)]
        if rule[-1] == "?":
            return kept
        if rule in ("^^", ",,"):
            return [e.upper() if rule == "^^" else e.lower() for e in kept]
        return [_stripped(e, rule, self.text(word)) for e in kept]

    def arithmetic(self, text: str) -> str:
        """Return the value of ``$((text))``; a mark where it is not known."""
        if "$(" in text or "`" in text:
            return unknown()
        names: list[str] = []

        def value(found: re.Match[str]) -> str:
            element = " ".join(self.elements(found[1]) or ())
            names.extend(unknown_names(element) or ([] if element else [found[1]]))
            return element or "0"

        plain = _ASSIGNED.sub(value, text).strip()
        if names or len(plain) > 200:
            return unknown(next((name for name in names if name), ""))
        try:
            return str(int(_number(ast.parse(plain.replace("!(", "not ("), mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError, OverflowError):
            return unknown()


class _Words:
    """Words under construction."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.current: str | None = None

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def end(self) -> None:
        if self.current is not None:
            self.words.append(self.current)
        self.current = None

    def split(self, text: str) -> None:
        """Add a text that blanks split into words."""
        if text[:1].isspace():
            self.end()
        for number, part in enumerate(text.split()):
            if number:
                self.end()
            self.add(part)
        if text[-1:].isspace():
            self.end()

    def several(self, elements: list[str]) -> None:
        """Add elements that stay words of their own."""
        for number, element in enumerate(elements):
            if number:
                self.end()
            self.add(element)
        if not elements and self.current == "":
            self.current = None

    def done(self) -> list[str]:
        self.end()
        return self.words


def _matching(raw: str, at: int) -> int:
    """Return the place after the bracket that closes the one at a place."""
    closing = {"(": ")", "{": "}"}[raw[at]]
    depth = 0
    for place in range(at, len(raw)):
        depth += (raw[place] == raw[at]) - (raw[place] == closing)
        if not depth:
            return place + 1
    return len(raw) + 1


def _stripped(text: str, rule: str, pattern: str) -> str:
    """Return a text without the shortest (longest) start ``#`` or end ``%`` that a pattern fits."""
    cuts = range(len(text) + 1)
    if rule[0] == "%":
        fits = [cut for cut in cuts if fnmatch.fnmatchcase(text[cut:], pattern)]
        return text[: (min if rule == "%%" else max)(fits)] if fits else text
    fits = [cut for cut in cuts if fnmatch.fnmatchcase(text[:cut], pattern)]
    return text[(max if rule == "##" else min)(fits) :] if fits else text


def _number(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= MOST_DIGITS:
            raise ValueError
        return _bounded(_ARITHMETIC[type(node.op)](left, right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = _number(node.left), _number(node.comparators[0])
        return int(_ARITHMETIC[type(node.ops[0])](*sides))
    raise ValueError


def _bounded(number: int) -> int:
    if abs(number) >= 10**MOST_DIGITS:
        raise ValueError
    return number
