"""Descriptions of models, clusters, plans and runs, and the loader that reads them."""

from simulator.describe.cluster import Cluster, Device, Link, Nic, Node
from simulator.describe.loader import load
from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.describe.scenario import Scenario

__all__ = ["Cluster", "Device", "Link", "Model", "Nic", "Node", "Plan", "Run", "Scenario", "load"]
