"""MLCommons Chakra execution traces, written and read."""

from simulator.exchange.chakra.imported import Traces, read_chakra
from simulator.exchange.chakra.written import Exported, write_chakra

__all__ = ["Exported", "Traces", "read_chakra", "write_chakra"]
