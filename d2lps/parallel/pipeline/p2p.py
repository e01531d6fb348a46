"""What pipeline stages send one another, so that no send ever waits for a send, whatever the schedule."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from d2lps.comm import Communicator, Work
from d2lps.parallel.pipeline.schedules import Action, needs

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
NOTE = 10  # whole numbers that tell what will follow: the dtype, how many dimensions, the shape

Traffic = Mapping[tuple[int, int], Sequence[tuple[Action, int]]]  # see `schedules.traffic`


def awaited(action: Action, stages: int) -> Action | None:
    """Of what must have been done before, that which another stage makes: `awaited(Action("B", 3, 0), 4)` is None."""
    need = needs(action, stages)
    return need if need is not None and need.stage != action.stage else None


class Mail:
    """The messages of a rank: what an action makes goes to the rank of the next stage.

    Both ends of two ranks' messages post them in the order of `traffic`, all of a pair with one tag, as NCCL wants it, whose
    messages between two ranks go through one after another. Before the first output of a stage goes a note that tells its shape;
    a gradient has that of the output.
    ValueError if a later micro-batch makes another shape.
    """

    def __init__(self, comm: Communicator, traffic: Traffic) -> None:
        self.comm = comm
        self.queues = {sum(pair) - comm.rank: deque(order) for pair, order in traffic.items() if comm.rank in pair}
        self.like: dict[int, tuple[torch.dtype, torch.Size]] = {}  # what a stage makes
        self.coming: dict[Action, tuple[Tensor, Work | None]] = {}  # under way to this rank, or from its other stage
        self.leaving: list[tuple[Work, Tensor]] = []

    def send(self, action: Action, tensor: Tensor, dst: int) -> None:
        """Begin to send what an action has made."""
        if dst == self.comm.rank:
            self.coming[action] = tensor, None
            return
        queue = self.queues[dst]
        while queue[0][0] != action:
            self._post(dst)
        queue.popleft()
        self.leaving = [(work, sent) for work, sent in self.leaving if not work.test()]  # and let the others be freed
        if action.kind == "F":
            self._tell(action, tensor, dst)
        with self.comm.about(f"{'activation' if action.kind == 'F' else 'gradient'} {action.micro_batch} x", "B T D"):
            self.leaving.append((self.comm.isend(tensor, dst), tensor))

    def _tell(self, action: Action, tensor: Tensor, dst: int) -> None:
        first_of_all = action.stage not in self.like
        like = self.like.setdefault(action.stage, (tensor.dtype, tensor.shape))
        if like != (tensor.dtype, tensor.shape):
            made, first = (f"{dtype} {list(shape)}" for dtype, shape in ((tensor.dtype, tensor.shape), like))
            where = f"rank {self.comm.rank}, stage {action.stage}, micro-batch {action.micro_batch}"
            raise ValueError(f"{where}: it makes {made}, and the first micro-batch made {first}: they must be alike")
        if first_of_all:
            note = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
            told = torch.tensor(note + [0] * (NOTE - len(note)))
            with self.comm.about("the shape of what follows"):
                self.leaving.append((self.comm.isend(told, dst), told))

    def expect(self, action: Action, src: int) -> None:
        """Post the receive of what an action makes, and of what comes before it, unless that has to wait for something."""
        while src != self.comm.rank and action not in self.coming and self._free(*self.queues[src][0]):
            self._post(src)

    def _free(self, head: Action, sender: int) -> bool:
        return sender != self.comm.rank and (head.kind == "B" or head.stage in self.like)

    def get(self, action: Action, src: int) -> Tensor:
        """What an action has made, once it is there."""
        while action not in self.coming:
            self._post(src)
        tensor, work = self.coming.pop(action)
        if work is not None:
            work.wait()
        return tensor

    def _post(self, src: int) -> None:
        """Be ready for the next message from that rank."""
        action, _ = self.queues[src].popleft()
        stage = action.stage if action.kind == "F" else action.stage - 1
        if stage not in self.like:
            self.comm.recv(told := torch.zeros(NOTE, dtype=torch.long), src)
            number, ndim, *sizes = told.tolist()
            self.like[stage] = DTYPES[number], torch.Size(sizes[:ndim])
        dtype, shape = self.like[stage]
        room = torch.empty(shape, dtype=dtype, device=self.comm.device)
        self.coming[action] = room, self.comm.irecv(room, src)

    def finish(self) -> None:
        for work, _ in self.leaving:
            work.wait()
