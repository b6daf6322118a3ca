"""Megatron-LM's launch scripts as scenarios, and scenarios as its flags."""

from simulator.exchange.megatron.export import launcher_flags, to_megatron, unsaid
from simulator.exchange.megatron.imported import import_megatron

__all__ = ["import_megatron", "launcher_flags", "to_megatron", "unsaid"]
