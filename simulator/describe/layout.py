"""Megatron-LM's layout of a pipeline: a text that says what each stage holds.

``E`` is the embedding, ``t`` a layer of the model, ``m`` a layer that predicts further tokens
(MTP), ``L`` the head with its loss; ``|`` ends a stage, ``,`` means nothing. ``x*3`` and
``(tt|)*3`` stand for three of what precedes the star
(megatron/core/transformer/pipeline_parallel_layer_layout.py).
"""

from __future__ import annotations

import re
from functools import lru_cache

from simulator.errors import DescriptionError

SYMBOLS = "EtmL|"
MOST = 100_000
"""Symbols of a layout, written out: no model has as many layers."""

_TOKEN = re.compile(r"\*(\d+)|.", re.DOTALL)

EXAMPLE = "Et*3|(tt|)*29,t|L"


@lru_cache(maxsize=64)
def read_layout(text: str) -> tuple[str, ...]:
    """Return what each stage holds, as ``("Ettt", "tt", ..., "L")``.

    Raises:
        DescriptionError: when it is no layout, or is one that is not modelled.
    """
    stages = tuple(_written_out(text).split("|"))
    whole = "".join(stages)
    if whole.count("E") != 1 or not stages[0].startswith("E"):
        raise _wrong(text, "E, the embedding, must be there once, at the head of the first stage")
    if whole.count("L") != 1 or not stages[-1].endswith("L"):
        raise _wrong(text, "L, the head and its loss, must be there once, at the very end")
    if "m" in whole.rstrip("mL"):
        raise _wrong(text, "m, a layer that predicts further tokens, must follow all layers t")
    for number, stage in enumerate(stages[:-1]):
        if "m" in stage:
            raise _wrong(
                text,
                f"m is on stage {number}; layers that predict further tokens are modelled on the "
                "last stage only, beside the head L",
            )
        if not stage:
            raise _wrong(text, f"stage {number} holds nothing; leave out one of its two '|'")
    return stages


def _written_out(text: str) -> str:
    """Return a layout without commas, stars and brackets."""
    done: list[list[str]] = [[]]  # what each open bracket holds so far
    for match in _TOKEN.finditer(text):
        token = match[0]
        if match[1]:
            if not done[-1]:
                raise _wrong(text, f"{token!r} follows nothing that it could repeat")
            if int(match[1]) < 1:
                raise _wrong(text, f"{token!r} must repeat at least once")
            if len(done[-1][-1]) * int(match[1]) > MOST:
                raise _wrong(text, f"{token!r} makes more than {MOST:,} symbols")
            done[-1][-1] *= int(match[1])
        elif token == "(":
            done.append([])
        elif token == ")":
            if len(done) == 1:
                raise _wrong(text, "a ')' closes no '('")
            inner = "".join(done.pop())
            done[-1].append(inner)
        elif token in SYMBOLS:
            done[-1].append(token)
        elif token != ",":
            raise _wrong(text, f"{token!r} is not one of E, t, m, L, |, (, ), *N and ','")
    if len(done) > 1:
        raise _wrong(text, "a '(' is not closed")
    return "".join(done[0])


def _wrong(text: str, why: str) -> DescriptionError:
    return DescriptionError(f"layout {text!r}: {why}; write it as {EXAMPLE!r}")
