"""Small networks that are trained and scored in turns, without and with a schedule.

``python scoring.py FIRST LAST`` tries one network for each seed, in a process of its own, for what
shares memory wrongly may end it, and prints for each ``equal``, or what is not.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable, Dict, List, Tuple

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"

import memonger
import mxnet as mx
import numpy as np
from memonger.schedules.schedule import Schedule
from memonger.schedules.execution.symbol import scheduled

import blocked_networks
from efforts import SHORT, use
from drawn_schedules import everything, nested, work_of
from modules import LEARNING, batch_of, trained

CLASSES = 5
Random = np.random.RandomState
Shapes = Dict[str, Tuple[int, ...]]
Found = List[Tuple[str, np.ndarray]]


def network(seed: int) -> Any:
    return blocked_networks.drawn(seed, blocked_networks.ANY_SIZE)[0]


def schedule_of(symbol: Any, shapes: Shapes, seed: int) -> Schedule:
    work, random = work_of(symbol, shapes), Random(seed)
    if random.rand() < 0.25:
        return everything(work)
    return nested(work, int(random.randint(1, 6)), seed, float(random.choice([0.3, 0.6, 0.9])))


def sized(batch: int, size: int) -> Shapes:
    return {"data": (batch, 3, size, size), "softmax_label": (batch,)}


def drawn(random: Random, batch: int, size: int, key: Any = None) -> Any:
    images = random.normal(size=(batch, 3, size, size))
    return batch_of(images, random.randint(CLASSES, size=batch), key)


def prepared(module: Any, symbol: Any, batch: int, size: int, random: Random) -> None:
    shapes = sized(batch, size)
    module.bind(*([item] for item in shapes.items()))
    names, (found, _, _) = symbol.list_arguments(), symbol.infer_shape(**shapes)
    given = {n: mx.nd.array(random.normal(size=s) * 0.3) for n, s in zip(names, found)}
    given = {n: a for n, a in given.items() if n not in shapes and not n.endswith("gamma")}
    module.init_params(mx.init.One(), given, allow_missing=True)
    module.init_optimizer(optimizer_params=LEARNING)


def gradients(module: Any, turn: str) -> Found:
    group = module._exec_group
    named = zip(group.param_names, group.grad_arrays)
    return [(turn + name, array.asnumpy()) for name, copies in named for array in copies]


def in_turns(
    planned: Callable[[Any, Shapes], Any], seed: int, wait: Callable[[], None], bucketed: bool
) -> Found:
    """Training steps and scores with batches of several sizes, on one device or two.

    Or with images of several sizes, each of which is a bucket.
    """
    random = Random(seed)
    batch, size = int(random.choice([4, 8, 16, 32])), int(random.choice([6, 8, 9]))
    devices = 2 if random.rand() < 0.3 and not bucketed else 1

    def of_size(size: int) -> Any:
        symbol = planned(network(seed), sized(batch // devices, size))
        return symbol, ("data",), ("softmax_label",)

    size = 9 if bucketed else size
    symbol = of_size(size)[0]
    if bucketed:
        module: Any = mx.mod.BucketingModule(of_size, default_bucket_key=size)
    else:
        module = mx.mod.Module(symbol, context=[mx.cpu(k) for k in range(devices)])
    prepared(module, symbol, batch, size, random)
    mx.random.seed(seed)
    found: Found = []
    for k in range(6):
        other = int(random.choice([batch, batch // 2, batch + 4])) if k else batch
        if bucketed:
            other, size = batch, int(random.choice([6, 8, 9]))
        data = drawn(random, other, size, size)
        turn = str(random.choice(["train", "train", "score", "both"])) if k else "train"
        if turn != "score":
            module.forward_backward(data)
            wait()
        if turn in ("score", "both"):  # of both the gradients are still needed
            module.forward(data, is_train=False)
        wait()
        if k % 2:
            found.append((f"{k}, {turn}: output", module.get_outputs()[0].asnumpy()))
            found += [] if bucketed else gradients(module, f"{k}, {turn}: ")
        if turn != "score":
            module.update()
        wait()
        if k % 3 == 2:
            found += trained(module).items()
    return [*found, *trained(module).items()]


def outcome(seed: int) -> str:
    """What differs of one network, the plain one waiting for all that it has started."""
    way = functools.partial(in_turns, bucketed=seed % 3 == 2)
    plain = way(lambda symbol, _: symbol, seed, mx.nd.waitall)

    def by_schedule(symbol: Any, shapes: Shapes) -> Any:
        return scheduled(symbol, schedule_of(symbol, shapes, seed))

    try:
        found = way(by_schedule, seed, lambda: None)
    except (memonger.MemongerError, mx.MXNetError) as error:
        return "failed: " + str(error).strip().splitlines()[-1]
    assert [name for name, _ in plain] == [name for name, _ in found]
    differ = [n for (n, a), (_, b) in zip(plain, found) if a.tobytes() != b.tobytes()]
    if not differ:
        return "equal"
    return f"{len(differ)} of {len(plain)} differ: {differ[:4]}"


if __name__ == "__main__":
    use(SHORT)
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        print(f"{number} {outcome(number)}", flush=True)
