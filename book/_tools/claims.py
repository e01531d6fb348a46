"""What chapters say of numbers that were drawn by chance, as questions that other draws can be asked: `make seeds` asks them.

A claim is a few words of a sentence, so that the sentence is found, and an expression of Python that is true where the sentence
is: in the names that the chapter has defined by then. Where a sentence speaks of the draw that the chapter shows, and says so,
`said` are the words that say it, in the same cell.
"""

from typing import NamedTuple


class Claim(NamedTuple):
    words: str
    holds: str
    said: str = ""


CLAIMS = {
    "the_machines": [
        Claim("in hardly any\" if alone < 20", "alone < 20"),
    ],
    "ring_synchronization": [
        Claim("agree to the digits shown", "d2lps.run(train, 4, ring).results == d2lps.run(train, 4, 'tree').results"),
    ],
    "training_together": [
        Claim("With unequal ones the plain mean is far off", "(plain - whole).norm() > 0.2 * whole.norm()"),
        Claim("in this run by eight or nine powers of ten",
              "8 < torch.log10(torch.div(*[(one - many).abs().max() for one, many in curves.values()])) < 9.5",
              said="in this run"),
        Claim("at the full rate it learns next to nothing", "fast[0].accuracy < 0.5"),
        Claim("the largest is the same, to three digits", "f'{apart[0]:.3f}' == f'{apart[110]:.3f}'"),
        Claim("each of them scores about nine in ten", "all(0.83 < rank.accuracy < 0.97 for rank in runs[110])"),
    ],
    "keys_and_values": [
        Claim("As predicted, but for the dice and the circle", "abs(busiest - spread) < 0.04"),
        Claim("Four lookups in ten are repeats", "0.38 < 1 - np.mean(counted) / LOOKUPS < 0.46"),
        Claim("serves nearly six reads in ten", "0.55 < hit_rate(100) < 0.61"),
        Claim("the blue prediction goes through the orange points",
              "all(abs(che(room) - hit_rate(room)) < 0.03 for room in (30, 100, 400))"),
    ],
    "consistency": [
        Claim("a bound of a few iterations wins back", "sometimes[4] - sometimes[0] > 0.5 * (asp - sometimes[0])"),
        Claim("At a rate of 2 the three rules are hard to tell apart against gradients",
              "(lambda until: max(until) < 1.12 * min(until))([count[(loss < 0.5).int().argmax(0)].median() "
              "for count, _, loss in (curves[10, 2.0, rule] for rule in PALETTE)])"),
        Claim("At a rate of 1 the four curves are one", "all(abs(settled(f, 1.0, rule).mean() - settled(1, 1.0, 'BSP').mean()) "
              "< 0.05 for rule, f in (('SSP(3)', 10), ('ASP', 10), ('ASP', 1)))"),
        Claim("and there ASP is at its best",
              "all(min(rates, key=lambda rate: settled(f, rate, 'ASP').mean()) == 2 for f in (1, 10))"),
        Claim("twice that rate costs BSP little, and ASP much",
              "all(settled(1, 4.0, 'BSP').mean() - settled(1, 2.0, 'BSP').mean() "
              "< (settled(f, 4.0, 'ASP').mean() - settled(f, 2.0, 'ASP').mean()) / 2 for f in (1, 10))"),
        Claim("SSP(3) at 3", "min(rates, key=lambda rate: settled(10, rate, 'SSP(3)').mean()) == 3"),
        Claim("BSP once at 2, three times at 3 and once at 4",
              "min(rates, key=lambda rate: settled(1, rate, 'BSP').mean()) >= 2"),
        Claim("but ASP with eight *equal* machines", "all(settled(1, rate, 'ASP').mean() > settled(10, rate, 'ASP').mean() "
              "for rate in (3.0, 4.0))"),
        Claim("wins back six sevenths of what BSP loses", "(lambda bsp, asp: 0.8 < (bsp - run.time) / (bsp - asp) < 0.9)("
              "*[virtual(go_through, rule, weather.tolist()).time for rule in ('BSP', 'ASP')])",
              said="with four other sets of dice, 53% to 88%"),
        Claim("less than half as stale as those of a fixed bound of 8", "average(run.staleness) < "
              "average(virtual(go_through, 'SSP(8)', weather.tolist()).staleness) / 2"),
    ],
    "when_machines_fail": [
        Claim("half the best interval or twice it costs two to four", "all(abs(exact[k] - dice[k]) < 0.02 for k in range(5))"),
        Claim("the filter makes it once, whatever the network does",
              "all(abs(n - 1) < 1e-9 for n in counts['repeated, and filtered']) and "
              "all(abs(n - 1 / (1 - q)) < 0.05 for n, q in zip(counts['repeated'], losses, strict=True))"),
        Claim("The weights are equal to the undisturbed run's", "all(torch.equal(run.values['w'], quiet.values['w']) "
              "for run in killed.values())"),
    ],
    "compression": [
        Claim("With one bit the error is as long as four fifths of the gradient",
              "(lambda one: 0.7 < sum((g - one.decode(one.encode(g), g)).square().sum() for g in gradients).sqrt() / "
              "sum(g.square().sum() for g in gradients).sqrt() < 0.9)(CODECS['1 bit'])"),
        Claim("The largest thousandth alone teaches the model next to nothing", "right[3] < 0.4"),
        Claim("it is late but gets there", "right[4] > 0.85"),
        Claim("One bit with feedback trains as well as 32 bits", "right[2] > right[0] - 0.015"),
        Claim("Random places need more patience", "right[5] < right[6] < right[0] - 0.03"),
        Claim("The warm start finds most of what can be found",
              "(lambda cold, warm, best: cold - warm > 0.6 * (cold - best))(*errors[10:].mean(0))"),
        Claim("even at best, rank 2 misses half of that one", "0.4 < errors[0, 2] < 0.6"),
    ],
    "mixed_precision": [
        Claim("more than one gradient in a hundred of this trained model becomes zero",
              "(late.half() == 0).float().mean() > 0.01", said="with other seeds it was less, or more"),
        Claim("Two cliffs", "np.array(window[torch.float16])[:, [0, 1, -2, -1]].max() < 0.3 and "
              "np.array(window[torch.float16])[:, 2:7].min() > 0.7"),
        Claim("BF16 has no cliffs", "np.array(window[torch.bfloat16]).min() > 0.7"),
        Claim("for four ranks by two stairs", "max(d2lps.run(climb, 1)[0]) >= 2 * max(run[0])"),
        Claim("random gradients lie on the lines for both formats",
              "all(abs(error(in_order(gradients(256, 0.0).to(dtype)), gradients(256, 0.0)) "
              "/ (c * unit * 129.5 ** 0.5) - 1) < 0.25 for dtype, unit in u.items())"),
        Claim("a thousand ranks lose about four percent in BF16",
              "0.03 < error(in_order(gradients(1024, 0.0).bfloat16()), gradients(1024, 0.0)) < 0.05"),
        Claim("pile up to a sum that is hundreds of times larger",
              "error(in_order(gradients(1024, 3.0).bfloat16()), gradients(1024, 3.0)) > 0.3"),
        Claim("With masters, 16 bits give what 32 give",
              "all((abs(got[:, 1:3] - got[:, :1]) < 0.025).all() for got in scores.values())"),
        Claim("At a rate of 0.001 next to nothing is lost", "(scores[0.001][:, 3] > scores[0.001][:, 0] - 0.03).all()"),
        Claim("and the model falls behind", "(small[:, 1] > small[:, 3] + 0.1).all()", said="with these seeds far behind"),
    ],
    "overlap_and_priority": [
        Claim("our replicas are equal:", "equal and close"),
    ],
    "sending_less_often": [
        Claim("At $H = 50$ DiLoCo pays some hundredths", "0 < worse(curves['DiLoCo', 50]).median() < 0.1"),
        Claim("local SGD more than a tenth", "worse(curves['local SGD', 50]).median() > 0.1"),
        Claim("DiLoCo has lost a good part of its lead",
              "((curves['local SGD', 150][300] - curves['DiLoCo', 150][300]).median() / "
              "(curves['local SGD', 50][300] - curves['DiLoCo', 50][300]).median()) < 0.9"),
        Claim("Local SGD hardly cares about $H$ between 10 and 50",
              "abs(worse(curves['local SGD', 50], curves['local SGD', 10])).max() < 0.05"),
        Claim("all three end lower, and most of DiLoCo's lead over local SGD is gone",
              "(lambda lead, ends: all((ends[k][300] < curves[k][300]).all() for k in ends) "
              "and (ends['local SGD', 50][300] - ends['DiLoCo', 50][300]).median() < 0.5 * lead)("
              "(curves['local SGD', 50][300] - curves['DiLoCo', 50][300]).median(), [setattr(adamw, '__defaults__', (0.012,)), "
              "d2lps.simulate(sweep, FOUR, {k: PLANS[k] for k in [('data parallel', 1), ('local SGD', 50), ('DiLoCo', 50)]}, "
              "trace=False)[0], setattr(adamw, '__defaults__', (0.006,))][1])"),
        Claim("DiLoCo's first round ends badly", "(curves['DiLoCo', 50][50] > curves['local SGD', 50][50]).all()"),
        Claim("plain asp jumps about and stays far above the rest",
              "end['asp'] > 0.2 + max(end[name] for name in ('bsp', 'asp, delayed', 'asp, both', 'asp, no momentum'))"),
        Claim("Delaying the momentum brings asp down to bsp, or a little below", "end['asp, delayed'] < end['bsp'] + 0.05"),
        Claim("Fewer local steps for the slow worker help little by themselves", "end['asp, fewer steps'] > end['bsp'] + 0.2"),
        Claim("the plainest remedy is the best", "end['asp, no momentum'] == min(end.values())"),
        Claim("the loss moves by less than 0.03", "off < 0.03 and (ends['half'][100] - exact).abs().max() < 0.03"),
        Claim("Own or averaged: no difference that five trainings could show", "abs(own - averaged).max() < 0.05"),
        Claim("What hurts is the third", "(thrown - own).min() > 0.05"),
        Claim("a warm start is better by more than",
              "all((curves['DiLoCo', 50][step] - curves['warm', 50][step]).min() > 0.02 for step in (100, 150))"),
    ],
    "data_parallelism": [
        Claim("75% and 300%", "abs(CASES['sums of losses, not means'] - 0.75) < 1e-6 and "
              "abs(CASES['gradients added, not averaged'] - 3) < 1e-6"),
        Claim("that something is off is not", "CASES.pop('nothing wrong') < 1e-9 and min(CASES.values()) > 0.02"),
        Claim("From 8 to 16, scaling is good", "1.4 < best[8] / best[16] < 2.3", said="Five sets of them, five seeds each"),
        Claim("Here even more than half", "best[8] / best[16] > 2", said="which is luck of the dice"),
        Claim("Above 64 it is nearly over", "best[64] / best[256] < 1.5"),
        Claim("the images read grow by two thirds or more", "256 * best[256] > 2.6 * 64 * best[64]"),
        Claim("scales between 10 and 100 images:", "all(10 < scale < 100 for scale in scales)"),
        Claim("dips to about 10 within a few steps", "all(4 < min(one[:30]) < 25 for one in heard)"),
        Claim("and then *rises* again", "all(max(one[30:]) > 2 * min(one[:30]) for one in heard)"),
        Claim("at half the rate, ranks hear about twice the scale",
              "1.4 < sum(sum(d2lps.simulate(listen, ring, seed, 0.45, trace=False)[0][10:]) for seed in range(3)) / 100 "
              "/ sum(scales) < 2.6"),
        Claim("For twice the batch all three arrive", "steps_to(0.1, 16, [rates[8] * k for k in (1, 2, 2 ** 0.5)], patience=3)"
              ".median(1).values.isfinite().all()", said="With other dice it is as high as 0.64: then the linear rule fails"),
        Claim("the linear rule asks for a rate at which no training arrives",
              "steps_to(0.1, 32, [4 * rates[8], rates[32]], patience=3).median(1).values[0].isinf()"),
        Claim("they are between 0.9 and 1.3 from 64 on", "all(0.9 < rates[size] < 1.3 for size in (64, 128, 256))"),
        Claim("at 128 some two to three times later", "1.5 < row[0] / best[128] < 3.5"),
    ],
    "experts": [
        Claim("Chance is enough: a queue of 8 on average", "abs(over / (2000 * 64) - lost(64, 8, 8)) < 0.01"),
        Claim("each dropped fewer with", "(lambda dropped: all(dropped(0.1, seed) < dropped(0, seed) for seed in range(3)))("
              "lambda alpha, seed: torch.tensor(trained(alpha, seed))[:, 8].mean())"),
        Claim("just hidden over four", "abs(ms[1] - 10.9) < 0.2 and abs(ms[2] - 8.1) < 0.2"),
    ],
    "six_architectures": [
        Claim("the mean of the eight models is as good as the exact one",
              "all(learned['alike', name][0] < learned['alike', 'all-reduce'][0] + 0.02 for name in GRAPHS)"),
        Claim("and the worst of them not far off",
              "all(learned['alike', name][1] < learned['alike', 'all-reduce'][0] + 0.15 for name in GRAPHS)"),
        Claim("a ring carries the others' opinion too slowly",
              "learned['sorted', 'ring'] == max(learned[key] for key in learned if key[0] == 'sorted')"),
        Claim("loses more than that of the exponential graph",
              "learned['sorted', 'one peer'][0] > learned['sorted', 'exponential'][0] + 0.02"),
        Claim("the worst of the seven is as good as the worst of eight was above",
              "len(alive) == 7 and max(alive) < learned['alike', 'one peer'][1] + 0.05"),
        Claim("All three train the same model", "all((curve - real).abs().max() < 1e-5 for curve in curves)"),
        Claim("the loss is lower at the same time", "run[0][1] < kvstore.simulate(two_levels, FIVE, *PLACES, trace=False, "
              "consistency='bsp')[0][1] - 0.2"),
    ],
    "topology_aware": [
        Claim("two and three times the time", "abs(predicted(orders['shuffled']) / predicted(by_rack) - 3) < 0.01"),
        Claim("All four searches end at 12 ms", "all(abs(found[-1] - 0.012) < 1e-9 for _, found in tries.values())",
              said="With other shuffles and other dice"),
        Claim("In {numref}`fig-adapt-regret` each dot is a job",
              "max(behind for _, behind in results) < 1.1 and max(differ) < 1"),
        Claim("The last two lines of the output show it broken", "worst > 1.1"),
        Claim("wins back a good part of that time for half of the staleness",
              "(lambda bsp, ssp, own: bsp.time - own.time > 0.5 * (bsp.time - ssp.time) and sum(k * v for k, v in "
              "own.staleness.items()) < 0.65 * sum(k * v for k, v in ssp.staleness.items()))(*stored.values())"),
        Claim("A least gain larger than the noise stops nearly all of it", "changes(0.1, 50)[0] < 0.15 * changes(0.0, 50)[0]"),
    ],
    "watching_and_debugging": [
        Claim("the straggler waits *least*", "traces['b'].time_waiting().argmin() == 2"),
        Claim("name nobody: nobody should be woken for a hiccup", "not stragglers(healthy)"),
        Claim("Job d has both faults, from some step on", "len(stragglers(traces['d'])) == 3"),
    ],
    "feeding_the_devices": [
        Claim("the line is unbroken:", "line == expected and Counting.loads > len(line)"),
        Claim("never to throw away the old for the new", "abs(hits('lru', 0.5) - lru_hits(0.5)) < 0.02"),
    ],
    "planning": [
        Claim("takes back more than half of the delay", "times[0] - times[1] > 0.5 * (times[0] - 0.002)"),
    ],
}  # fmt: skip

NONE = {  # chapters that draw numbers, and say nothing that depends on which: why
    "why_one_machine": "it counts operations and bytes",
    "eight_collectives": "what ranks end with is compared with what torch makes of the same numbers",
    "from_ring_to_server": "servers are compared with one process that has the same numbers",
    "sharding_the_state": "ranks are compared with one process",
    "memory_and_time": "ranks are compared with one process",
    "tensor_parallelism": "ranks are compared with one process",
    "pipeline_parallelism": "stages are compared with one process",
    "long_sequences": "what is computed in pieces is compared with the whole",
}
