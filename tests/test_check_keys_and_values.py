"""The exercises of *Keys and values*: what is wrong is refused, in words."""

import torch
from solutions import refusing, tried

SET, SQUARE = "self.eps = lr, alpha, eps -> self.eps = ", 'square = state["square"] -> square = '
STATE, STEP = '{"square": torch.zeros_like(value)} -> ', "value.addcdiv_(gradient, root, value=-self.lr) -> "
UPDATE = "square.lerp_(gradient.square(), 1 - self.alpha) -> square.mul_(self.alpha).add_((1 - self.alpha) * gradient**2)"
REMEMBERS = f"{SQUARE}vars(self).setdefault(str(value.shape), torch.zeros_like(value))"
MOST, BID, SORTED = "max(servers, key=bid) -> ", 'point(f"{server} bids for {key}") -> ', "sorted(servers, key=str)"
ORDER, SHARE, NONE = "named in another order", "its share is", "which is none of them"

test_refused = refusing({
    "ex-keys-memory memory": [
        ("(2.0, 15.9), (1.0, 9.5), ...", "not all"), ("(1.0, 8.0), (1.0, 9.5), 4.0", "all_reduce, a worker", "both moments"),
        ("(2.0, 15.9), (1.0, 8.0), 4.0", "servers, in all", "once"), ("(2.0, 15.9), (1.0, 9.5), 0.5", "aside", "by itself"),
        ("2.0, (1.0, 9.5), 4.0", "2 numbers are wanted"),
    ],
    "ex-keys-half slices": [
        ("8", "fullest server has 3.00 shares, and 0.000"), ("1", "8.00 shares"), ("80", "1.70 shares", "more slices"),
        ("50_000", "each is a message"), ("0", "no number of slices"), ("'many'", "no number of slices"),
    ],
    "ex-keys-break-even break_even": [
        ("1.0, 1.0", "64 bytes"), ("89, 33", "at most 1"), ("8 / 9, 'a third'", "4 bytes: not 'a third'"),
        ("0.8889, 0.5", "4 bytes", "with the push and again with the pull"), ("64 / 80, 4 / 20", "64 bytes"),
    ],
    "ex-keys-rows rows": [
        ("888_889, 888_889", "apart"), ("10.0, 888_889", "apart"), ("'always', 888_889", "apart"),
        ("1_555_556, 1_000_000", "colocated", "eighth"),
    ],
    "ex-keys-tiers tiers": [
        ("24, 72", "72 misses"), ("90, 6", "not 6 misses"), ("96, 0", "0 misses"), ("36, 12", "48 reads, not 96"),
    ],
    "ex-keys-scan tourist": [
        ("30, 186", "after reading"), ("186, 186", "after reading"), ("160, 160", "after peeking"), ("160, 270", "after peeking"),
        ("175, 175", "which pages are in memory"), ("180, 165", "which pages are in memory"),
    ],
    "ex-keys-optimizer rmsprop": [
        ("square.sqrt().add_(self.eps) -> (square + self.eps).sqrt()", "so near: where does epsilon stand"),
        (f"{STATE}torch.zeros_like(value)", "not a dictionary of tensors"),
        (f"{STATE}{{'square': 0.0}}", "{'square': 0.0}, not a dictionary of tensors"),  # which a server could not save
        ("gradient.square() -> gradient", "mean of squares"),
        (f"{SET}0.01, alpha, eps", "lr=0.5, alpha=0.99, step 0"),  # the rate that the exercise tried
        (f"{SET}lr, 0.9, eps", "alpha=0.99, step 0"),
        ("alpha=0.99 -> alpha=0.9", "lr=0.1, step 0"),
        ("square.sqrt() -> square.clone()", "step 0: element"),
        (f"{STEP}value -= gradient.mul_(self.lr).div_(root)", "the gradient was changed"),
        ((f"{STATE}{{'square': torch.zeros(value.shape)}}", UPDATE), "has the state the value's dtype"),
        ("value.addcdiv_ -> value = value.addcdiv", "in place"),
        ((f"{STATE}{{}}", REMEMBERS), "gives no tensors"),
        (REMEMBERS, "step 6", "is all in `state`"),
        ((f"{SQUARE}vars(self).setdefault('one', value.new_zeros(1))",  # the same numbers for all keys
          "gradient.square() -> gradient.square().mean()"), "step 0"),
        ("type('Stub', (), {})", "still empty"),
        (torch.optim.RMSprop, "no state yet"),
    ],
    "ex-keys-bidder owner": [
        (f"{MOST}servers[point(key) % len(servers)]", ORDER),
        (f"{MOST}{SORTED}[point(key) % len(servers)]", "not to the newcomer"),
        ("by_hash", "another process finds other owners"),
        (f'{BID}f"{{server}} {{key}}".__hash__()', "another process finds other owners"),
        (f"{MOST}servers[max(range(len(servers)), key=bid)]", ORDER),  # bids of places in a list, not of names
        (f"{MOST}{SORTED}[max(range(len(servers)), key=bid)]", "leaves, which never had it"),
        (f"{MOST}Ring(servers, points=1).owner(key)", SHARE), (f"{MOST}max(servers, key=str)", SHARE),
        (f'{BID}point(f"{{server}} bids")', SHARE),
        (f"{MOST}point(key) % 8", NONE), (f"{MOST}bid(0)", NONE),
    ],
})  # fmt: skip


def test_other_right_answers_pass() -> None:
    assert tried("ex-keys-optimizer rmsprop", (UPDATE, f"{STEP}value -= self.lr * gradient / root"))
    assert tried("ex-keys-bidder owner", f"{MOST}min(servers, key=bid)")
    ring = "(known.get(tuple(servers)) or known.setdefault(tuple(servers), Ring(servers, 400))).owner(key)"
    assert tried("ex-keys-bidder owner", ("def owner -> known = {}\n\ndef owner", f"{MOST}{ring}"))
