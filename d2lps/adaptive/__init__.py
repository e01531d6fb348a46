"""A logical topology that follows the work: which ranks talk to which is decided again and again, from what was measured.

`estimate` turns measured seconds into lines (seconds by bytes), `controller` decides, `all_reduce` lets the ranks agree, opens
connections, and sums. Read them in this order.
"""

from d2lps.adaptive.all_reduce import AdaptiveAllReduce, neighbors
from d2lps.adaptive.controller import Controller
from d2lps.adaptive.estimate import Estimate, by_link

__all__ = ["AdaptiveAllReduce", "Controller", "Estimate", "by_link", "neighbors"]
