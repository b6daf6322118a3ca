"""The flags that a launch script, a part of one, or a file of settings gives to Megatron-LM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.describe.fields import MOST
from simulator.errors import DescriptionError, suggestion
from simulator.exchange.megatron.expansion import MARK, unknown_names
from simulator.exchange.megatron.flags import ALIASES, FLAGS, OPPOSITES, Flag
from simulator.exchange.megatron.shell import Command, Script, read_script
from simulator.exchange.megatron.unmodelled import (
    FAMILIES,
    NOT_MODELLED,
    REFUSED,
    WITHOUT_EFFECT,
    group_of,
)

_BEHIND = {"|", "|&", ">", ">>", "2>&1", "&>", ">&", "&", "&&", ";"}
"""Words of a command kept in a text where its flags end."""
_SETTING = re.compile(r"\s*(?:-\s+)?(?:--)?([A-Za-z_][\w-]*)\s*:(?:\s+(.*))?")
_SBATCH: Sequence[tuple[str, re.Pattern[str]]] = (
    ("nnodes", re.compile(r"#SBATCH\s+(?:--nodes[= ]|-N\s*)(\d+)\b")),
    ("nproc-per-node", re.compile(r"#SBATCH\s+--ntasks-per-node[= ](\d+)\b")),
    (
        "nproc-per-node",
        re.compile(r"#SBATCH\s+--(?:gpus-per-node|gres)[= ](?:gpu:)?(?:[A-Za-z][\w-]*:)?(\d+)\b"),
    ),
)
"""Slurm's own lines, which say what a launcher's flags do not; the last that is there counts."""
FEW = 3
"""Flags of Megatron-LM that make a command without a .py its launch."""
MOST_TEXT = 1_000_000
"""Characters of a script that is read."""
_TRUE, _FALSE = {"true", "yes", "on"}, {"false", "no", "off"}
_NOTHING = {"null", "none", "~", ""}


@dataclass
class Arguments:
    """What Megatron-LM is given."""

    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Words behind each flag that is given, by its name without dashes; the last one counts."""
    script: str = ""
    """The program that is launched; empty where only flags are read."""
    unset: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def said(self, *names: str) -> bool:
        """Return whether any of some flags is given."""
        return any(name in self.words for name in names)

    def shown(self, name: str) -> str:
        """Return a flag as it is given, or its default in words."""
        if name in self.words:
            return " ".join((f"--{name}", *map(_quoted, self.words[name])))
        default = FLAGS[name].default
        if default in (False, None):
            return f"without --{name}"
        shown = " ".join(default) if isinstance(default, tuple) else default
        return f"--{name} {shown} by default"

    def __getitem__(self, name: str) -> Any:
        """Return the value of a flag, Megatron-LM's default where it is not given."""
        flag = FLAGS[name]
        if name not in self.words:
            return flag.default
        value, problem = _typed(flag, self.words[name])
        if problem:
            self.complain(name, problem)
            return flag.default
        return value

    def complain(self, name: str, problem: str) -> None:
        """Keep a problem with a flag, once."""
        sentence = f"--{name}: {problem}{self._asked(name)}"
        if sentence not in self.problems:
            self.problems.append(sentence)

    def _asked(self, name: str) -> str:
        """Ask for what the value of a flag hangs on."""
        names = [n for word in self.words.get(name, ()) for n in unknown_names(word)]
        if names:
            known = sorted({n for n in names if n})
            via = f" through {', '.join(f'${n}' for n in known)}" if known else ""
            return f", which only a run would tell{via}; {_give(known or [name])}"
        if not self.words.get(name, ("",)) and self.unset:
            some = sorted(self.unset)[:6]
            return f"; not set are {', '.join(some)}: {_give(some[:1])}"
        return ""


def _give(names: Sequence[str]) -> str:
    """Say how a value is given."""
    if names and names[0] in FLAGS:
        return f"add -- --{names[0]} VALUE"
    return f"say --var {names[0]}=VALUE" if names else "add the flag after --"


def read_arguments(
    text: str, given: Mapping[str, str] | None = None, more: Sequence[str] = ()
) -> Arguments:
    """Return what a text gives to Megatron-LM.

    Args:
        text: a script, a part of one, bare flags, or lines of ``key: value``.
        given: values of shell variables, whatever the script assigns to them.
        more: flags laid over those of the text, as words.
    """
    if len(text) > MOST_TEXT:
        raise DescriptionError(f"its {len(text):,} characters are no launch script's")
    out = Arguments()
    slurm = {name: (found[1],) for name, pattern in _SBATCH if (found := pattern.search(text))}
    if _holds_settings(text):
        out.words |= dict(_settings(text))
    else:
        try:
            script = read_script(text, given)
        except RecursionError:
            raise DescriptionError("the script nests brackets too deeply to be read") from None
        _read_launch(script, out)
    _take(more, out)
    for name, words in slurm.items():
        if not any(word.strip(MARK) for word in out.words.get(name, ()) if MARK not in word):
            out.words[name] = words
    return out


# --- a script -------------------------------------------------------------------------------------


def _read_launch(script: Script, out: Arguments) -> None:
    """Take the flags of what a script launches."""
    out.unset, out.notes = script.unset, list(script.notes)
    loose = [c for c in script.commands if c.words and c.words[0].startswith("--")]
    launches = [c for c in script.commands if c not in loose and _program(c.words) is not None]
    if not launches:
        kept = (words for words in _texts(script) if _program(words) is not None)
        launches = [Command(0, words) for words in kept]
    if launches:
        chosen = max(launches, key=lambda c: sum(_named(w) in FLAGS for w in c.words))
        if len(launches) > 1 and chosen.line:
            out.notes.append(
                f"line {chosen.line}: of {len(launches)} programs that are launched this one is "
                "read, it has most of Megatron-LM's flags"
            )
        at = _program(chosen.words)
        assert at is not None
        out.script = chosen.words[at]
        _take(chosen.words[:at], out, launcher=True)
        _take(chosen.words[at + 1 :], out)
    elif not loose:
        for words in _texts(script):
            _take(words, out)
    for command in loose:
        if launches:
            out.notes.append(
                f"line {command.line}: {command.words[0]} begins a command of its own (is a "
                "backslash missing, or a comment in between?); it is read as one more flag"
            )
        _take(command.words, out)


def _program(words: Sequence[str]) -> int | None:
    """Return the place of the program that is launched with flags behind it.

    It ends in .py, follows a -m, or has several of Megatron-LM's flags behind it.
    """
    for at, word in enumerate(words):
        named = word.endswith(".py") or (at > 0 and words[at - 1] == "-m" and "." not in word[:1])
        if named and any(w.startswith("--") for w in words[at + 1 :]):
            return at
    known = [at for at, word in enumerate(words) if _named(word) in FLAGS]
    return known[0] - 1 if len(known) >= FEW and not words[0].startswith("--") else None


def _texts(script: Script) -> Iterator[tuple[str, ...]]:
    """Yield the words of every variable that holds flags."""
    for elements in script.variables.values():
        words = tuple(" ".join(elements).split())
        if any(_named(word) in FLAGS for word in words):
            yield words


def _named(word: str) -> str:
    """Return the name of the flag that a word is, or an empty text."""
    if not word.startswith("--") or word == "--":
        return ""
    name = word[2:].partition("=")[0].replace("_", "-").lower()
    return ALIASES.get(name, name)


def _take(words: Iterable[str], out: Arguments, *, launcher: bool = False) -> None:
    """Add flags and the words behind them; of a launcher's only those that are known."""
    name = ""
    for word in words:
        if word in _BEHIND:
            return
        if found := _named(word):
            name = found
            if launcher and name not in FLAGS and name not in WITHOUT_EFFECT:
                name = ""
                continue
            _, equals, value = word.partition("=")
            out.words[name] = (value,) if equals else ()
        elif name and word.strip():
            out.words[name] = (*out.words[name], word)


# --- settings -------------------------------------------------------------------------------------


def _holds_settings(text: str) -> bool:
    """Return whether a text is lines of ``key: value`` rather than a script."""
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    keyed = sum(bool(_SETTING.fullmatch(line)) for line in lines)
    return 2 * keyed > len(lines)


def _settings(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the flags that lines of ``key: value`` stand for; headings and null are nothing."""
    for line in text.splitlines():
        found = _SETTING.fullmatch(line)
        if not found or found[1].isupper():  # ENV_VARS and what is below it
            continue
        name = _named(f"--{found[1]}")
        value = re.sub(r"(^|\s)#.*$", "", found[2] or "").strip()
        if value.lower() in _NOTHING:
            continue
        opposite = OPPOSITES.get(name)
        if value.lower() in _TRUE | _FALSE:
            if (value.lower() in _TRUE) != bool(opposite):
                yield opposite or name, ()
            continue
        yield name, tuple(_items(value))


def _items(value: str) -> list[str]:
    """Return the words of a value; those of a list ``[a, b]`` apart, but for expressions."""
    if re.fullmatch(r"\[[^][]*\]", value) and "*" not in value:
        value = value[1:-1].replace(",", " ")
    try:
        return shlex.split(value)
    except ValueError:
        return [value]


# --- values ---------------------------------------------------------------------------------------


def _typed(flag: Flag, words: tuple[str, ...]) -> tuple[Any, str]:
    """Return the value that words behind a flag stand for, and what is wrong with them."""
    if flag.kind == "switch":
        if words and words[0].lower() in _FALSE:
            return False, ""
        wrong = words and words[0].lower() not in _TRUE
        return True, f"takes no value, but {words[0]!r} stands behind it" if wrong else ""
    if any(MARK in word for word in words):
        return None, "its value is not known"
    if flag.kind == "texts":
        return words, "" if words else "a value is missing"
    if len(words) != 1:
        return None, f"takes one value, not {len(words)}"
    if flag.kind == "text":
        return words[0], ""
    try:
        number = float(words[0])
    except ValueError:
        return None, f"{words[0]!r} is not a number"
    if not abs(number) <= MOST:
        return None, f"{words[0]!r} is more than any run has"
    if flag.kind == "number":
        return number, ""
    if not number.is_integer() or number < 0:
        return None, f"{words[0]!r} is not a whole number of at least 0"
    return int(number), ""


def unknown_flags(args: Arguments) -> list[str]:
    """Return the flags that are none of Megatron-LM's, each with the known one that is near."""
    known = (*FLAGS, *NOT_MODELLED, *REFUSED, *WITHOUT_EFFECT)
    return [
        f"--{name}{suggestion(name, known)}"
        for name in args.words
        if name not in FLAGS
        and name not in NOT_MODELLED
        and name not in REFUSED
        and group_of(name) is None
    ]


def asks(args: Arguments, name: str, neutral: tuple[str, ...]) -> bool:
    """Return whether a flag that is not mapped is given, and asks for something."""
    if name not in args.words:
        return False
    words = args.words[name]
    return not (words and all(word in neutral for word in words)) and words != ("false",)


def _quoted(word: str) -> str:
    names = unknown_names(word)
    return f"${names[0]}" if names else shlex.quote(word)


__all__ = ["FAMILIES", "Arguments", "asks", "read_arguments", "unknown_flags"]
