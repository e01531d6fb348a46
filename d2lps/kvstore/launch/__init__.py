"""Processes: a run on this machine, or inside a launcher's job; who starts, watches and ends them."""
