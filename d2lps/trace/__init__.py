"""What happened in a run, message by message: recorded by the ranks, joined to a Trace, replayed and drawn from it."""

from d2lps.trace.buffers import Buffer
from d2lps.trace.origins import Change, Origins, Piece
from d2lps.trace.recorder import About, Recorder
from d2lps.trace.replay import Event, Part, Replay
from d2lps.trace.trace import Trace

__all__ = ["About", "Buffer", "Change", "Event", "Origins", "Part", "Piece", "Recorder", "Replay", "Trace"]
