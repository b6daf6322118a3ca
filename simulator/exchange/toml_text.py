"""Tables of a scenario as the text of a TOML file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
COMMENT_COLUMN = 40
"""Where comments begin, if what is before them is shorter."""


def toml_text(
    tables: Mapping[str, Any], comments: Mapping[str, str] | None = None, head: Sequence[str] = ()
) -> str:
    """Return a TOML file of values and of tables below them.

    Args:
        tables: values by key; mappings at the top level become tables.
        comments: what stands behind the line of a dotted key.
        head: lines of comment at the top.
    """
    comments = comments or {}
    lines = [f"# {_CONTROL.sub(' ', line)}".rstrip() for line in head]
    lines += [""] if lines else []
    plain = {k: v for k, v in tables.items() if not isinstance(v, Mapping)}
    lines += [_line(key, value, comments.get(key)) for key, value in plain.items()]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]"]
            lines += [_line(k, v, comments.get(f"{name}.{k}")) for k, v in table.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, comment: str | None) -> str:
    said = f"{_key(key)} = {_value(value)}"
    comment = _CONTROL.sub(" ", comment) if comment else None
    return f"{said:<{COMMENT_COLUMN}}  # {comment}" if comment else said


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    """Return a basic string: what JSON escapes, TOML escapes alike, and one character more."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
