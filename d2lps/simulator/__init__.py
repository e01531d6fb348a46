"""A described cluster in virtual time: the same functions of a communicator, on a thousand ranks, on a laptop."""

from d2lps.simulator.faults import Cut, Kill, Narrow, Slow
from d2lps.simulator.model import Model
from d2lps.simulator.simulate import simulate

__all__ = ["Cut", "Kill", "Model", "Narrow", "Slow", "simulate"]
