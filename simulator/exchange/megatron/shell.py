"""A launch script read, not run: the commands that it would run, with their words.

Assignments, arrays, ``if`` and ``case`` are followed as bash follows them; where a branch hangs on
what only a run would tell (files, output of commands) it is left out, and a note says so. Loops
are left out. Functions are read where they stand.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from simulator.exchange.megatron.expansion import MARK, Variables
from simulator.exchange.megatron.words import Token, tokens

DEEPEST = 5
"""Texts inside texts (``bash -c``, here-documents) that are read."""

DEEPEST_DOUBT = 20
"""Branches around a command that are asked why it is left out."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
_OPENING = {"for": "loop", "while": "loop", "until": "loop", "select": "loop", "case": "case"}
_FILES = {"-f", "-d", "-e", "-r", "-w", "-x", "-s", "-L", "-h"}
_RAN = "ran"
"""Status of a command that is no test."""

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


class Command(NamedTuple):
    """A command and its words, as it would run."""

    line: int
    words: tuple[str, ...]


class Script(NamedTuple):
    """What a script would run."""

    commands: tuple[Command, ...]
    variables: Mapping[str, list[str]]
    """Elements of each variable when it ends, in the order in which they were set."""
    unset: frozenset[str]
    """Variables that it uses and does not set."""
    notes: tuple[str, ...]
    """What could not be followed."""


class _Frame:
    """An ``if``, ``case`` or loop that is open."""

    def __init__(self, kind: str, line: int, *, taking: bool, outer: bool) -> None:
        self.kind, self.line = kind, line
        self.taking, self.outer = taking, outer
        self.done = False
        """Whether a branch was taken."""
        self.doubt = ""
        """What kept it from being decided."""
        self.subject = ""
        self.wants_pattern = kind == "case"


def read_script(text: str, given: Mapping[str, str] | None = None) -> Script:
    """Return what a script would run.

    Args:
        text: the script, or a part of one.
        given: values of variables, whatever the script assigns to them.
    """
    reader = _Reader(Variables(dict(given or {})))
    reader.read(text)
    variables = reader.variables
    return Script(
        tuple(reader.commands), dict(variables.values), frozenset(variables.unset),
        tuple(dict.fromkeys(reader.notes)),
    )  # fmt: skip


class _Reader:
    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self.frames: list[_Frame] = []
        self.status: bool | str | None = True
        self.skips = False
        """Whether ``&&`` or ``||`` keeps the next command from running."""
        self.lenient = False
        """Whether nothing counts as 0 in the test at hand."""
        self.depth = 0
        self.shift = 0
        """Lines before the text that is read, where it stands inside another."""

    def read(self, text: str, shift: int = 0) -> None:
        """Follow a text."""
        if self.depth > DEEPEST:
            return
        before, self.shift = self.shift, shift
        self.depth += 1
        command: list[Token] = []
        inside = False  # of [[ ]], where operators belong to the test
        for token in tokens(text):
            inside = (inside or (token.text == "[[" and not command)) and token.text != "]]"
            if token.kind == "document":
                self.read(token.text, token.line)
            elif token.kind != "operator" or (inside and token.text != "\n"):
                command.append(token)
                command = self.keywords(command)
            elif self.patterns(command, token):
                command = []
            else:
                self.run(command)
                self.after(token.text)
                command = []
        self.depth -= 1
        self.shift = before

    @property
    def runs(self) -> bool:
        """Whether the branch at hand is taken."""
        return not self.frames or self.frames[-1].taking

    def note(self, line: int, what: str) -> None:
        self.notes.append(f"line {line + self.shift}: {what}")

    # --- keywords ------------------------------------------------------------------------------

    def keywords(self, command: list[Token]) -> list[Token]:
        """Act on a keyword that stands at a command's beginning, and return what is left of it."""
        first = command[0]
        if len(command) > 1 or first.kind != "word":
            return command
        word, line = first.text, first.line
        frame = self.frames[-1] if self.frames else None
        if frame and frame.wants_pattern and word not in ("in", "esac") and frame.subject:
            return command
        if word == "if":
            self.frames.append(_Frame("if", line, taking=self.runs, outer=self.runs))
            return []
        if frame and frame.kind == "if" and word in ("then", "elif", "else"):
            self.branch(frame, word, line)
            return []
        if (frame and frame.kind == "if" and word == "fi") or (
            frame and frame.kind == "loop" and word == "done"
        ):
            self.frames.pop()
            self.status = _RAN
            return []
        if frame and frame.kind == "case" and word == "esac":
            self.frames.pop()
            return []
        return [] if word in ("{", "}", "do", "!", "time", "function") else command

    def branch(self, frame: _Frame, word: str, line: int) -> None:
        """Take or leave a branch of an ``if``."""
        if word == "then":
            decided = self.status if isinstance(self.status, bool) else None
            if frame.taking and decided is None:
                frame.doubt = f"line {line + self.shift}"
            frame.taking = frame.taking and decided is True
            frame.done = frame.done or frame.taking
        else:
            frame.taking = frame.outer and not frame.done
        self.skips = False

    def patterns(self, command: list[Token], token: Token) -> bool:
        """Read the head of a ``case`` or one of its patterns; return whether that was all."""
        frame = self.frames[-1] if self.frames else None
        if not frame or frame.kind != "case":
            return False
        if token.text == ";;":
            self.run(command)
            frame.wants_pattern, frame.taking = True, False
            return True
        if not frame.wants_pattern or token.text not in (")", "|", "("):
            return False
        texts = [self.variables.text(t.text) for t in command]
        if MARK in frame.subject and frame.outer and texts:
            frame.doubt = f"line {frame.line + self.shift}"
        elif any(fnmatch.fnmatchcase(frame.subject, t) for t in texts) and not frame.done:
            frame.taking = frame.outer
            frame.done = True
        frame.wants_pattern = token.text != ")"
        return True

    # --- commands ------------------------------------------------------------------------------

    def after(self, mark: str) -> None:
        """Let ``&&`` and ``||`` say whether the next command runs."""
        if mark == "&&":
            self.skips = self.skips or self.status in (False, None)
        elif mark == "||":
            self.skips = self.status is not False
        else:
            self.skips = False

    def run(self, command: list[Token]) -> None:
        """Follow one command: an assignment, a test, or what the script is for."""
        if not command:
            return
        opening = _OPENING.get(command[0].text)
        if opening and command[0].kind == "word":
            self.open(opening, command)
            return
        if not self.runs or self.skips:
            self.leave(command)
            return
        first = command[0].text
        if first in ("[", "[[", "test") or first.startswith("(("):
            self.status = self.test(command)
            return
        while command and command[0].text in _DECLARATIONS:
            command = [t for t in command[1:] if not t.text.startswith("-")]
        while command and self.assigned(command[0]):
            command = command[1:]
        if not command:
            return
        words = tuple(w for t in command for w in self.variables.words(t.text))
        if words and words[0] in ("true", "false", ":"):
            self.status = words[0] != "false"
            return
        self.status = _RAN
        self.commands.append(Command(command[0].line + self.shift, words))
        for word in words:
            if ".py" in word and " -" in word:  # bash -c "python train.py --flag"
                self.read(word, command[0].line + self.shift - 1)

    def open(self, kind: str, command: list[Token]) -> None:
        """Enter a loop or a ``case``."""
        line = command[0].line
        if kind == "loop" and self.runs:
            self.note(line, f"a loop is not followed: {_shown(command)}")
        frame = _Frame(kind, line, taking=False, outer=self.runs)
        if kind == "case" and len(command) > 1:
            frame.subject = self.variables.text(command[1].text)
        self.frames.append(frame)

    def leave(self, command: list[Token]) -> None:
        """Note what is left out, where it hung on what is not known."""
        near = self.frames[-DEEPEST_DOUBT:]
        doubt = next((f.doubt for f in near if f.doubt and not f.done), "")
        doubt = doubt or (f"line {command[0].line + self.shift}" if self._undecided() else "")
        adds = any(t.kind == "array" or _ASSIGNMENT.match(t.text) for t in command[:1])
        if doubt and adds:
            self.notes.append(
                f"{doubt}: a condition that only a run would decide; what hangs on it is left out"
            )

    def _undecided(self) -> bool:
        return self.runs and self.status is None

    def assigned(self, token: Token) -> bool:
        """Assign what a word assigns, and return whether it does."""
        if token.kind == "array":
            elements = [w for raw in token.words for w in self.variables.words(raw)]
            more = token.text.endswith("+")
            self.variables.assign(token.text.rstrip("+"), elements, more=more)
            return True
        found = _ASSIGNMENT.fullmatch(token.text)
        if not found:
            return False
        value = self.variables.text(found[3])
        if found[2]:
            value = " ".join(self.variables.elements(found[1]) or ()) + value
        self.variables.assign(found[1], [value])
        return True

    # --- tests ---------------------------------------------------------------------------------

    def test(self, command: list[Token]) -> bool | None:
        """Return what a test says, or None where only a run would tell."""
        first = command[0].text
        if first.startswith("(("):
            value = self.variables.arithmetic(first[2:-2])
            return None if MARK in value else value != "0"
        inner, self.lenient = command[1:], first == "[["
        return self._either([t.text for t in inner if t.text not in ("]", "]]", "\n")])

    def _either(self, raws: list[str]) -> bool | None:
        for marks, whole in ((("||", "-o"), True), (("&&", "-a"), False)):
            place = next((i for i, raw in enumerate(raws) if raw in marks), None)
            if place is not None:
                sides = self._either(raws[:place]), self._either(raws[place + 1 :])
                return whole if whole in sides else None if None in sides else not whole
        if raws and raws[0] == "!":
            inverse = self._either(raws[1:])
            return None if inverse is None else not inverse
        return self._one([self.variables.text(raw) for raw in raws if raw not in ("(", ")")])

    def _one(self, words: list[str]) -> bool | None:
        if any(MARK in word for word in words) or (words and words[0] in _FILES):
            return None
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return bool(words[1]) == (words[0] == "-n")
        if len(words) == 1:
            return bool(words[0]) if words[0] not in ("-z", "-n") else words[0] == "-z"
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return fnmatch.fnmatchcase(words[0], words[2]) == (words[1] != "!=")
        if len(words) == 3 and words[1] in _COMPARISONS:
            if "" in words and not self.lenient:  # [ "" -eq 0 ] is an error, and so not true
                return False
            try:
                return _COMPARISONS[words[1]](int(words[0] or 0), int(words[2] or 0))
            except ValueError:
                return None
        return None


def _shown(command: Iterable[Token], most: int = 60) -> str:
    text = " ".join(t.text for t in command)
    return text if len(text) <= most else f"{text[:most]} ..."
