"""A training step as each rank's program: what it computes and asks of its groups, one after another, whoever carries it out.

A `World` does: priced.py with prices, messages.py with a communicator. What is asked for, and in which order, is as `train` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from d2lps.parallel.pipeline.schedules import Action
from d2lps.parallel.prediction.parts import Around, Kernel, Message, Part, Step, stages
from d2lps.parallel.training.plan import PRECISIONS, Plan
from d2lps.parallel.transformer import Transformer
from d2lps.topology.device import Device, is_number
from d2lps.topology.published import MEMORY_REACHED

STATE = 12  # bytes of the optimizer's state for a weight: an FP32 master and Adam's two moments


class World(Protocol):
    """Where a program runs."""

    def compute(self, seconds: float, label: str = "compute") -> None: ...

    def collective(self, axis: str, collective: str, nbytes: float) -> None: ...

    def start(self, axis: str, collective: str, nbytes: float, behind: Any = None) -> Any:
        """A collective goes on beside what the rank does next; not before another one, if it is to come behind that."""

    def wait(self, started: Any) -> None: ...


@dataclass(frozen=True)
class Calibration:
    """How near one software comes to what one kind of device could do, which neither a plan nor a data sheet says.

    efficiency: the share of a device's `flops` that its matrix products reach. overhead: seconds that a layer's pass of one
    micro-batch takes besides, a backward pass twice as many (launches, Python). These two `calibrate` fits. memory: the share
    of its memory bandwidth that other operations reach. fused_attention: scores are never written to memory (FlashAttention).
    wide_gradients: in 16-bit training gradients are kept, and travel, in 32 bits, as Megatron-LM does.

    >>> Calibration(efficiency=0.7).memory
    0.8

    By default it is Megatron-LM of 2022 on A100: what `calibrate` makes of two rows, 22B and 1T with all recomputed, of table 5
    of Korthikanti et al. 2022.
    """

    efficiency: float = 0.83
    overhead: float = 0.0007
    memory: float = MEMORY_REACHED
    fused_attention: bool = False
    wide_gradients: bool = False

    def __post_init__(self) -> None:
        for name in ("efficiency", "memory"):
            if not (is_number(value := getattr(self, name)) and 0 < value <= 1):
                raise ValueError(f"{name}={value!r} is not a share: above 0, and at most 1")
        if not is_number(self.overhead):
            raise ValueError(f"overhead={self.overhead!r} is not a number of seconds from 0 up")


@dataclass(frozen=True)
class Job:
    """What is to be done: so many sequences a step, on devices that reach what the calibration says."""

    model: Transformer
    plan: Plan
    batch: int
    data_sheet: Device
    calibration: Calibration

    @cached_property
    def device(self) -> Device:
        reached = self.data_sheet.memory_bandwidth * self.calibration.memory
        return replace(self.data_sheet, efficiency=self.calibration.efficiency, memory_bandwidth=reached)

    @cached_property
    def stages(self) -> list[list[Part]]:
        return stages(self.model, self.plan, self.calibration.fused_attention)

    @cached_property
    def micro_batches(self) -> int:
        return self.plan.micro_batches(self.batch)

    @cached_property
    def width(self) -> int:
        """Bytes of a weight."""
        return PRECISIONS[self.plan.precision].itemsize

    @cached_property
    def gradient_width(self) -> int:
        return 4 if self.calibration.wide_gradients and self.width == 2 else self.width

    @cached_property
    def sum_width(self) -> int:
        """Bytes of a gradient to which micro-batches are added."""
        return 4 if self.plan.main_grads and self.micro_batches > 1 and self.width == 2 else self.gradient_width

    @cached_property
    def state_width(self) -> int:
        """Bytes of the optimizer's state for a weight: Adam's two moments, and an FP32 master of a 16-bit weight."""
        return STATE if self.width == 2 else 2 * self.width

    @cached_property
    def shards(self) -> int:
        """Among how many the state is shared out."""
        return (self.plan.zero_group or self.plan.dp * self.plan.cp) if self.plan.zero else 1

    def owned(self, weights: float, experts: float) -> float:
        """So many of a rank's weights, among which are experts', have their state on this rank."""
        return (weights - experts) / self.shards + experts / max(self.shards // self.plan.ep, 1)

    @cached_property
    def message(self) -> float:
        """Bytes from a stage to the next."""
        spread = self.plan.cp * (self.plan.tp if self.plan.sequence_parallel else 1)
        return self.plan.micro_batch * self.model.sequence // spread * self.model.hidden * self.width

    @cached_property
    def asks(self) -> set[tuple[str, str]]:
        """Axis and collective of all that a step may ask for."""
        plan, parts = self.plan, {part.name: part for stage in self.stages for part in stage}.values()
        steps = [step for part in parts for some in (part.forward, part.backward, part.again) for step in some]
        found = {step[:2] for step in steps if isinstance(step, Message)}
        if any(isinstance(step, Around) for step in steps):
            found.add(("cp", "pass_on"))
        for axis in ("dp", "edp") if any(part.experts for part in parts) else ("dp",):
            found |= {(axis, name) for name in (("reduce_scatter", "all_gather") if plan.zero else ("all_reduce",))}
        if plan.zero_group:
            found.add(("replicas", "all_reduce"))
        if any(part.ends for part in parts):
            found.add(("ends", "all_reduce"))
        return found

    def timed(self, steps: Sequence[Step], passes: int = 0) -> list[Any]:
        """Kernels in a row as their seconds, with the overhead of so many passes of a layer; messages as they are."""
        done: list[Any] = [passes * self.calibration.overhead]
        for step in steps:
            if isinstance(step, Kernel):
                done.append(self.seconds([step]) + (done.pop() if isinstance(done[-1], float) else 0.0))
            else:
                done.append((self.seconds(step.kernels), step.nbytes) if isinstance(step, Around) else step)
        return done

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        return sum(self.device.time_of(kernel.flops, kernel.nbytes) for kernel in kernels)


class Rank:
    """One rank's program, on a rank of the pipeline. Its parts are what ZeRO fetches and reduces at a time."""

    def __init__(self, job: Job, world: World, place: int, passes: dict[tuple[str, str], list[Any]]) -> None:
        self.job, self.plan, self.world, self.place, self.passes = job, job.plan, world, place, passes
        mine = range(place, len(job.stages), job.plan.pp)
        self.units = [(stage, number) for stage in mine for number in range(len(job.stages[stage]))]
        self.gathered: dict[tuple[int, int], list[Any]] = {}
        self.turn: dict[str, Any] = {}  # by axis, what was begun last to reduce gradients,
        self.reducing: dict[str, list[Any]] = {"dp": [], "edp": []}  # and the last of each unit's, that were not waited for

    def act(self, action: Action) -> None:
        parts = list(enumerate(self.job.stages[action.stage]))
        for number, part in parts if action.kind == "F" else reversed(parts):
            if action.kind == "F":
                self._fetch((action.stage, number), 1)
                self._fetch_tied(part)
                self._run(part, "forward")
                self.gathered.pop((action.stage, number), None)
                continue
            if action.kind == "B":
                self._fetch((action.stage, number), -1)
                self._run(part, "again")
                self._make_room()
                self._run(part, "backward")
            if action.kind == "W" or not self.plan.cuts_backward:
                self._run(part, "late")
                self._complete((action.stage, number), part, action.micro_batch == self.job.micro_batches - 1)

    def _run(self, part: Part, what: str) -> None:
        """A pass of a part: its steps are worked out once."""
        if (key := (part.name, what)) not in self.passes:
            layers = {"forward": 1, "backward": 2, "again": int(self.plan.recompute == "full"), "late": 0}[what]
            self.passes[key] = self.job.timed(getattr(part, what), layers if part.name == "block" else 0)
        for step in self.passes[key]:
            if isinstance(step, Message):
                self.world.collective(*step)
            elif isinstance(step, tuple):
                self._around(*step)
            else:
                self.world.compute(step)

    def _around(self, seconds: float, nbytes: float) -> None:
        """Attention around cp's ring: so much computing in all, and a message of so many bytes beside each piece but the last."""
        for piece in range(self.plan.cp):
            coming = self.world.start("cp", "pass_on", nbytes) if piece < self.plan.cp - 1 else None
            self.world.compute(seconds / self.plan.cp)
            self.world.wait(coming)

    # ---- weights come and go (zero=3) -----------------------------------------------------------------------------

    def _fetch(self, unit: tuple[int, int], towards: int) -> None:
        """A part's weights are needed now; with overlap, those of its neighbor next."""
        if self.plan.zero < 3:
            return
        self._gather(unit)
        for started in self.gathered[unit]:
            self.world.wait(started)
        following = self.units.index(unit) + towards
        if self.plan.overlap and 0 <= following < len(self.units):
            self._gather(self.units[following])

    def _fetch_tied(self, part: Part) -> None:
        """What another part has let go of; for the backward pass it is fetched once, and counted with that part."""
        if self.plan.zero == 3 and part.tied:
            self.world.collective("dp", "all_gather", part.tied * self.job.width)

    def _gather(self, unit: tuple[int, int]) -> None:
        if unit not in self.gathered:
            counts = self.job.stages[unit[0]][unit[1]].shared
            self.gathered[unit] = [self._begin(axis, "all_gather", n * self.job.width) for axis, n in counts]

    def _begin(self, axis: str, collective: str, nbytes: float, behind: Any = None) -> Any:
        if self.plan.overlap:
            return self.world.start(axis, collective, nbytes, behind)
        self.world.collective(axis, collective, nbytes)
        return None

    # ---- gradients ------------------------------------------------------------------------------------------------

    def _complete(self, unit: tuple[int, int], part: Part, last: bool) -> None:
        """A micro-batch's gradients of a part are there: they travel, if they are shared out, or if they are the last."""
        if self.plan.zero > 1 or (last and self.plan.overlap):
            for axis, weights in part.shared:
                self._reduce(weights, axis)
        self.gathered.pop(unit, None)

    def _reduce(self, weights: float, axis: str) -> None:
        """One behind the other; replicas of a shard meet when it is there."""
        nbytes = weights * self.job.gradient_width
        self._begin_in_turn(axis, axis, "reduce_scatter" if self.plan.zero else "all_reduce", nbytes)
        if self.plan.zero_group:
            self._begin_in_turn(axis, "replicas", "all_reduce", nbytes / self.job.shards)
        self.reducing[axis].append(self.turn[axis])

    def _begin_in_turn(self, order: str, axis: str, collective: str, nbytes: float) -> None:
        self.turn[order] = self._begin(axis, collective, nbytes, self.turn.get(order))

    def _make_room(self) -> None:
        """While a unit's whole gradient is made, at most one other is still to be reduced, if that makes it smaller."""
        for started in self.reducing.values() if self.plan.zero > 1 else ():
            while len(started) > 1:
                self.world.wait(started.pop(0))

    def _settle(self) -> None:
        for started in self.reducing.values():
            while started:
                self.world.wait(started.pop(0))

    def finish(self) -> None:
        """The backward passes are over: the last reductions, with any zero what both ends have, a step, the new weights."""
        self._settle()
        parts = [self.job.stages[stage][number] for stage, number in self.units]
        weights, experts, ends = (sum(getattr(part, name) for part in parts) for name in ("weights", "experts", "ends"))
        rest = [(axis, count) for axis, count in (("dp", weights - experts - ends), ("edp", experts)) if count]
        if self.plan.zero < 2 and not self.plan.overlap:
            for axis, count in rest:
                self._reduce(count, axis)
            self._settle()
        if ends:
            self.world.collective("ends", "all_reduce", ends * self.job.gradient_width)
            self._reduce(ends, "dp")
            self._settle()
        self.world.compute(self._step(self.job.owned(weights, experts)), "optimizer")
        if self.plan.zero:
            for axis, count in (*(rest if self.plan.zero < 3 else ()), *([("dp", ends)] if ends else ())):
                self.world.collective(axis, "all_gather", count * self.job.width)

    def _step(self, weights: float) -> float:
        """Seconds to read and write what the optimizer has of so many weights."""
        job = self.job
        own = job.width if job.width == 2 else 2 * job.width  # the weights are written, and read where they are their own masters
        return job.device.time_of(0, weights * (job.gradient_width + 2 * job.state_width + own))
