"""The keys of a Hugging Face ``config.json``, read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}


class Keys:
    """A config file whose missing keys and wrong values are collected, not raised one by one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that may be absent or null."""
        value = self.config.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number; a key without default must be there."""
        value = self.get(key, default)
        if value is None:
            self.problems.append(f"key {key!r} is missing")
        elif type(value) is not int or value < 1:
            self.problems.append(f"{key} {value!r} must be a whole number of at least 1")
        else:
            return value
        return 1

    def natural(self, key: str, default: int) -> int:
        """Return a whole number of at least 0."""
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            self.problems.append(f"{key} {value!r} must be a whole number of at least 0")
            return default
        return value

    def activation(self, key: str, default: str) -> str:
        """Return the activation function of the MLP in our spelling."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.problems.append(f"{key} {value!r} is not one of {', '.join(ACTIVATIONS)}")
            return "gelu"
        return ACTIVATIONS[value]

    def share(self, key: str, default: float) -> float:
        """Return a number from 0 to 1, such as a dropout."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            self.problems.append(f"{key} {value!r} must be a number from 0 to 1")
            return 0.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{key} {value!r} must be true or false")
            return default
        return value

    def task(self, *known: str) -> str:
        """Return the head that the model is trained with, the first of those known when unsaid."""
        stated = self.get("architectures", known[:1])
        if not isinstance(stated, (list, tuple)) or not stated or stated[0] not in known:
            self.problems.append(
                f"architectures {stated!r}: what is modelled is {', '.join(known)}"
            )
            return known[0]
        return str(stated[0])

    def labels(self) -> int:
        """Return the classes of a classifier: those named, or as many as `num_labels`."""
        named = self.get("id2label")
        return len(named) if isinstance(named, dict) and named else self.count("num_labels")
