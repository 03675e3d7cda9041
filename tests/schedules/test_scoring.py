"""Training and scoring in turns by a schedule: memory that both use, and states that both read."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Tuple

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.schedules.execution.symbol import scheduled
from memonger.schedules.schedule import Schedule

from drawn_schedules import everything, nested, work_of
from modules import LEARNING, SHAPES, batch_of, trained
from planned import elsewhere
from zoo import ANY_SIZE, drawn

CLASSES = 5
Random = np.random.RandomState
Shapes = Dict[str, Tuple[int, ...]]
Arrays = List[Tuple[str, np.ndarray]]


def schedule_of(symbol: Any, shapes: Shapes, seed: int) -> Schedule:
    work, random = work_of(symbol, shapes), Random(seed)
    if random.rand() < 0.25:
        return everything(work)
    return nested(work, int(random.randint(1, 6)), seed, float(random.choice([0.3, 0.6, 0.9])))


def shapes_of(batch: int, size: int) -> Shapes:
    return {"data": (batch, 3, size, size), "softmax_label": (batch,)}


def drawn_batch(random: Random, batch: int, size: int, key: Any = None) -> Any:
    images = random.normal(size=(batch, 3, size, size))
    return batch_of(images, random.randint(CLASSES, size=batch), key)


def prepared(module: Any, symbol: Any, batch: int, size: int, random: Random) -> None:
    shapes = shapes_of(batch, size)
    module.bind(*([item] for item in shapes.items()))
    names, (shapes_of_arguments, _, _) = symbol.list_arguments(), symbol.infer_shape(**shapes)
    values = {
        n: mx.nd.array(random.normal(size=s) * 0.3) for n, s in zip(names, shapes_of_arguments)
    }
    values = {n: a for n, a in values.items() if n not in shapes and not n.endswith("gamma")}
    module.init_params(mx.init.One(), values, allow_missing=True)
    module.init_optimizer(optimizer_params=LEARNING)


def gradients(module: Any, turn: str) -> Arrays:
    group = module._exec_group
    named = zip(group.param_names, group.grad_arrays)
    return [(turn + name, array.asnumpy()) for name, copies in named for array in copies]


def in_turns(
    planned: Callable[[Any, Shapes], Any], seed: int, wait: Callable[[], None], bucketed: bool
) -> Arrays:
    """Train and score in turns with batches of several sizes, on one device or two.

    Or with images of several sizes, each of which is a bucket.
    """
    random = Random(seed)
    batch, size = int(random.choice([4, 8, 16, 32])), int(random.choice([6, 8, 9]))
    devices = 2 if random.rand() < 0.3 and not bucketed else 1

    def of_size(size: int) -> Any:
        symbol = planned(drawn(seed, ANY_SIZE)[0], shapes_of(batch // devices, size))
        return symbol, ("data",), ("softmax_label",)

    size = 9 if bucketed else size
    symbol = of_size(size)[0]
    if bucketed:
        module: Any = mx.mod.BucketingModule(of_size, default_bucket_key=size)
    else:
        module = mx.mod.Module(symbol, context=[mx.cpu(k) for k in range(devices)])
    prepared(module, symbol, batch, size, random)
    mx.random.seed(seed)
    arrays: Arrays = []
    for k in range(6):
        other = int(random.choice([batch, batch // 2, batch + 4])) if k else batch
        if bucketed:
            other, size = batch, int(random.choice([6, 8, 9]))
        data = drawn_batch(random, other, size, size)
        turn = str(random.choice(["train", "train", "score", "both"])) if k else "train"
        if turn != "score":
            module.forward_backward(data)
            wait()
        if turn in ("score", "both"):  # of both the gradients are still needed
            module.forward(data, is_train=False)
        wait()
        if k % 2:
            arrays.append((f"{k}, {turn}: output", module.get_outputs()[0].asnumpy()))
            arrays += [] if bucketed else gradients(module, f"{k}, {turn}: ")
        if turn != "score":
            module.update()
        wait()
        if k % 3 == 2:
            arrays += trained(module).items()
    return [*arrays, *trained(module).items()]


def outcome(seed: int) -> str:
    """Return what differs of one network, the plain one waiting for all that it has started."""
    way = functools.partial(in_turns, bucketed=seed % 3 == 2)
    plain = way(lambda symbol, _: symbol, seed, mx.nd.waitall)

    def by_schedule(symbol: Any, shapes: Shapes) -> Any:
        return scheduled(symbol, schedule_of(symbol, shapes, seed))

    try:
        planned = way(by_schedule, seed, lambda: None)
    except (memonger.MemongerError, mx.MXNetError) as error:
        return "failed: " + str(error).strip().splitlines()[-1]
    assert [name for name, _ in plain] == [name for name, _ in planned]
    differ = [n for (n, a), (_, b) in zip(plain, planned) if a.tobytes() != b.tobytes()]
    if not differ:
        return "equal"
    return f"{len(differ)} of {len(plain)} differ: {differ[:4]}"


def outcomes_of(first: int, last: int) -> list[str]:
    """Try a network for each seed, in a process that wrongly shared memory may end."""
    return [outcome(seed) for seed in range(first, last)]


def by_schedule(symbol: Any) -> Any:
    return scheduled(symbol, everything(work_of(symbol, SHAPES)))


@pytest.mark.parametrize(
    ("engine", "first", "last"),
    [
        ("ThreadedEnginePerDevice", 36, 41),
        pytest.param("NaiveEngine", 0, 3, marks=pytest.mark.slow),
        pytest.param("ThreadedEnginePerDevice", 41, 72, marks=pytest.mark.exhaustive),
        pytest.param("NaiveEngine", 3, 24, marks=pytest.mark.exhaustive),
    ],
)
def test_training_and_scoring_in_turns_leave_the_bits_of_no_plan(
    engine: str, first: int, last: int
) -> None:
    outcomes, _ = elsewhere(outcomes_of, first, last, MXNET_ENGINE_TYPE=engine)
    assert outcomes == ["equal"] * (last - first)


def test_an_inference_that_cannot_be_run_again_is_refused_once() -> None:
    x = mx.sym.Variable("x")
    noise = mx.sym.random.normal(shape=(4, 4))
    network = mx.sym.tanh(mx.sym.tanh(mx.sym.tanh(x) * noise))
    executor = scheduled(network, everything(work_of(network, {"x": (4, 4)}, ["x"]))).simple_bind(
        mx.cpu(), x=(4, 4)
    )
    usual = network.simple_bind(mx.cpu(), x=(4, 4))
    for array in (executor.arg_dict["x"], usual.arg_dict["x"]):
        array[:] = 0.3
    executor.forward()
    with pytest.raises(memonger.MemongerError, match="call forward\\(is_train=False\\) again"):
        executor.backward(mx.nd.ones((4, 4)))
    results = []
    for each in (executor, usual):
        mx.random.seed(3)
        each.forward()
        each.backward(mx.nd.ones((4, 4)))
        results.append([each.outputs[0].asnumpy(), each.grad_dict["x"].asnumpy()])
    assert [a.tolist() for a in results[0]] == [a.tolist() for a in results[1]]
