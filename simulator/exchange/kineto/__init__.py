"""Traces of torch.profiler (Kineto) as measured runs."""

from simulator.exchange.kineto.imported import Measured, read_kineto

__all__ = ["Measured", "read_kineto"]
