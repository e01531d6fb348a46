"""Data for training: in which order, to whom, in time, and from where.

`shuffle` is an order that needs no table; `loader` hands samples out in it, ahead of time, and goes on from any place on any
number of ranks; `storage` is what they are read from, as a cluster to simulate; `cache` what a machine keeps of it.
"""

from d2lps.feeding.cache import Cache
from d2lps.feeding.loader import Loader, Stream
from d2lps.feeding.shuffle import Shuffle
from d2lps.feeding.storage import Storage

__all__ = ["Cache", "Loader", "Shuffle", "Storage", "Stream"]
