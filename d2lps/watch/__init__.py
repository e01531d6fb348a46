"""Watching a job: how it is getting on, who is slow, who hangs, whose numbers are wrong, and what all have said, in order."""

from d2lps.watch.corruption import checked_all_reduce, checksum, damaged
from d2lps.watch.flight import Absent, Entry, FlightRecorder, absent, flights
from d2lps.watch.logs import Log, merged
from d2lps.watch.metrics import Metrics
from d2lps.watch.stragglers import Straggler, Suspicion, false_alarms, stragglers

__all__ = [
    "Absent", "Entry", "FlightRecorder", "Log", "Metrics", "Straggler", "Suspicion", "absent", "checked_all_reduce", "checksum",
    "damaged", "false_alarms", "flights", "merged", "stragglers",
]
