"""The checks of *Tensor parallelism*: wrong answers are refused in words."""

import torch
from solutions import refusing

from d2lps.collectives import all_gather, all_reduce
from d2lps.parallel import vocab_cross_entropy


def with_whole_weights_on_every_rank(mesh, x, up, down):
    """Right, and no tensor parallelism."""
    wholes = []
    for weight, dim in ((up, 1), (down, 0)):
        pieces = [torch.empty_like(weight).detach() for _ in range(mesh.tp.size)]
        all_gather(mesh.tp, pieces, weight.detach())
        wholes.append(torch.cat(pieces, dim).requires_grad_())
    (torch.nn.functional.gelu(x @ wholes[0]) @ wholes[1]).square().mean().backward()
    for weight, whole, dim in ((up, wholes[0], 1), (down, wholes[1], 0)):
        weight.grad = whole.grad.chunk(mesh.tp.size, dim)[mesh.tp.rank].contiguous()
        all_reduce(mesh.dp, weight.grad)
        weight.grad /= mesh.dp.size
    return up.grad, down.grad


def one_stream_at_several_places(seed, dp, tp, tp_size, sequence):
    generator = torch.Generator().manual_seed(seed)
    torch.rand(dp * tp_size + tp * sequence, generator=generator, dtype=torch.double)
    return generator


UP, SUMMED = "gradient of up is wrong", "which group adds up"
SEED = "seed * 10_000 * tp_size + place -> "

test_refused = refusing({
    "ex-tensor-row row": [
        ("weight.chunk(comm.size, 0) -> weight.chunk(comm.size, 1)", "mat1 and mat2"),
        (("y = x @ mine -> y = x @ mine + bias", "return y + bias -> return y"), "the bias is in y 2 times"),
        ("return y + bias -> return y", "the bias is missing"),
        ("all_reduce(comm, y) -> pass", "are the products added up"),
        ("[comm.rank] -> [comm.rank - 1]", "which rows"),
        ("all_reduce(comm, y) -> all_reduce(comm, y); all_reduce(comm, y.clone())", "one all-reduce of y takes"),
        ("y = x @ mine\n    all_reduce(comm, y) -> whole = x.new_empty(comm.size, *x.shape)\n"
         "    d2lps.collectives.all_gather_into_tensor(comm, whole, x)\n    y = torch.cat(list(whole), 1) @ weight",
         "one all-reduce of y takes"),
        (lambda *given: given[1].sum(), "gives no tensor of shape [4, 7]"),
        (lambda comm, x, weight, bias: torch.zeros(7, 4), "gives no tensor of shape [4, 7]"),
    ],
    "ex-tensor-entropy cross_entropy": [
        ("logits - top[:, None] -> logits", "an exponential overflows"),
        ("all_reduce(comm, top, ReduceOp.MAX) -> pass", "the maximum of its own piece"),
        ("[:, 0] * here -> [:, 0]", "the one rank that has it"),
        ("own)).sum() -> own)).mean()", "the mean over the targets"),
        ("own)).sum() -> own)).sum() / 7", "the loss is"),
        ("own)).sum() -> own)).sum() / len(targets) * 6", "the loss is"),
        (("import reduce -> import copy, reduce", "reduce(comm, own) -> reduce(comm, copy(comm, own))",
          "reduce(comm, logits.exp().sum(-1)) -> reduce(comm, copy(comm, logits.exp().sum(-1)))"), "as g does"),
        ("count = logits.shape[-1] -> count = 4", "out of bounds"),
        (".amax(-1) -> .amax(-1).clamp(min=0)", "all of them vanish"),
        ("own)).sum() -> own)).sum().detach()", "does not require grad"),
        ("count = logits.shape[-1] -> whole = logits.new_empty(comm.size, *logits.shape)\n"
         "    d2lps.collectives.all_gather_into_tensor(comm, whole, logits.detach()); whole[comm.rank] = logits\n"
         "    return torch.nn.functional.cross_entropy(torch.cat(list(whole), -1), targets, reduction='sum')\n"
         "    count = logits.shape[-1]", "three numbers a target take"),
        (lambda *given: vocab_cross_entropy(*given), "vocab_cross_entropy"),
    ],
    "ex-tensor-groups gradients": [
        (("y = reduce(mesh.tp -> y = reduce(mesh.dp", "copy(mesh.tp -> copy(mesh.dp", "all_reduce(mesh.dp -> all_reduce(mesh.tp",
          "grad /= mesh.dp.size -> grad /= mesh.tp.size"), UP, SUMMED),
        ("y = reduce(mesh.tp -> y = reduce(mesh.dp", UP, SUMMED),
        ("copy(mesh.tp -> copy(mesh.dp", "gradient of x is wrong", "what does f do on the way back"),
        (("all_reduce(mesh.dp -> all_reduce(mesh.tp", "grad /= mesh.dp.size -> grad /= mesh.tp.size"), UP, SUMMED),
        (("all_reduce(mesh.dp -> all_reduce(mesh.comm", "grad /= mesh.dp.size -> grad /= mesh.comm.size"), UP, SUMMED),
        ("grad /= mesh.dp.size -> grad /= 1", UP, SUMMED),
        (with_whole_weights_on_every_rank, "weights stay at home"),
        (lambda mesh, x, up, down: (None, None), "gradient of up has not the shape [5, 24]"),
    ],
    "ex-tensor-dropout generator": [
        (f"{SEED}seed", "drop the same places; do they hold"),
        (f"{SEED}seed * 10**6 + dp + tp * sequence", "drop the same places; do they hold"),
        (f"{SEED}seed * 10**6 + dp * tp_size + tp", "drop different places; do they hold"),
        (f"{SEED}seed * 10**6 + dp * tp_size + tp * (not sequence)", "drop different places"),
        (f"{SEED}seed * 1000 + place", "(0, 0) drops the same places as (125, 0)"),
        (f"{SEED}seed * 1000 + dp * 100 + tp * sequence", "(0, 0) drops the same places as (10, 0)"),
        (f"{SEED}place", "with seed 1 the rank (dp, tp) (0, 0) drops the same"),
        (f"{SEED}seed + place", "with seed 1 the rank (dp, tp) (0, 7) drops the"),
        (f"{SEED}seed * 10**6 + dp * 4 + tp * sequence", "8 along tp, sequence=True: the ranks"),
        (one_stream_at_several_places, "from the same numbers, some steps apart"),
    ],
    "ex-tensor-missing missing": [
        ("{'norm2'}", "3 are missing"), ("{'embed', 'norm1', 'attention', 'norm2', 'up'}", "do not pass it"),
        ("{'embed', 'norm1', 'attention', 'norm2', 'head'}", "comes after"), ("{'mlp'}", "are none of"),
        ("set()", "4 are missing"), ("{'embed', 'norm2', 'norm1'}", "1 is missing: what leaves"), ("'norm2'", "3 are missing"),
        ("'mlp'", "['mlp'] are none of"),
    ],
    "ex-tensor-cost cost": [
        ("(50.33, 0.587, 7.55)", "two backward"), ("(50.33, 1.174, 14.09)", "slowest link"), ("(25.2, 1.174, 15.1)", "Two bytes"),
        ("(50.33, 1.342, 16.1)", "2(p - 1)/p"), ("(50.33, 1.174)", "3 numbers are wanted"),
    ],
})  # fmt: skip
