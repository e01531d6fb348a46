"""Planning a cluster and a job on it: what it needs, how often it stops, what it costs, before anything is bought.

`published.py` has what others measured; `failures.py` when to save; `fabric.py` clusters of pods; `shared.py` what a step takes
on them, up to 100,000 devices; `routing.py` who takes which way where there are several.
"""

from d2lps.planning import published
from d2lps.planning.fabric import Clos, clos, pods
from d2lps.planning.failures import daly, goodput, lives, mtbf, young
from d2lps.planning.routing import adaptive_routing, ecmp
from d2lps.planning.shared import predict_on_pods

__all__ = ["Clos", "adaptive_routing", "clos", "daly", "ecmp", "goodput", "lives", "mtbf", "pods", "predict_on_pods"]
__all__ += ["published", "young"]
