"""Watching a job while it trains, and finding out what is wrong with it."""

from d2lps.watch.metrics import Metrics

__all__ = ["Metrics"]
