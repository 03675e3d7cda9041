"""Training in an arena: no tensor is overwritten too early, whatever shares it."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any, Callable, Iterator

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.schedules.execution.executor import POISON
from memonger.schedules.execution.symbol import scheduled
from memonger.support.kernels import compiled

import networks
from drawn_schedules import LEVELS, work_of
from zoo import drawn
from interrupting import interrupted
from planned import elsewhere, process_mb

S = mx.sym


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each tensor overwritten once it is dead: who reads it then, shows."""
    monkeypatch.setenv(POISON, "1")


def planned(network: Any, level: str, seed: int = 0) -> Any:
    return scheduled(network[0], LEVELS[level](work_of(*network), seed))


def chain(batch: int = 8, layers: int = 3) -> Any:
    x = S.Variable("data")
    for k in range(layers):
        x = S.tanh(S.FullyConnected(x, num_hidden=16, name=f"fc{k}"))
    return S.SoftmaxOutput(x, name="softmax"), {"data": (batch, 16), "softmax_label": (batch,)}


def test_a_block_that_dies_too_early_changes_results(
    poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block in turn is said to be dead one row before it is: what reads it there, shows."""
    network, usual = chain(), compiled.lifetimes
    shared = planned(network, "three levels").shared
    ends: list[int] = []

    def shortened(block: int, *arguments: Any) -> Any:
        alive, outputs, lives = usual(*arguments)
        ends[:] = np.flatnonzero(~lives.of_caller & (lives.stop > lives.start)).tolist()
        stop = lives.stop.copy()
        stop[ends[block]] -= 1
        return alive, outputs, lives.replace(stop=stop)

    block = 0
    while block == 0 or block < len(ends):
        monkeypatch.setattr(compiled, "lifetimes", functools.partial(shortened, block))
        symbol = scheduled(network[0], shared.schedule)
        assert not memonger.check(network[0], symbol, network[1], steps=1), f"block {block}"
        block += 1
    assert block > 6


def bound(symbol: Any, batch: int, **options: Any) -> Any:
    executor = symbol.simple_bind(
        mx.cpu(),
        {n: "write" if n[:2] == "fc" else "null" for n in symbol.list_arguments()},
        data=(batch, 16),
        softmax_label=(batch,),
        **options,
    )
    for array in executor.arg_arrays:
        array[:] = 0.1
    return executor


def test_executors_of_all_shapes_share_one_arena_that_is_freed_with_the_last() -> None:
    """The largest step says how large; with the last of its executors it is freed."""
    symbol = planned(chain(), "plain")
    first = bound(symbol, 8)
    small = first.arena.nbytes
    others = [
        first.reshape(data=(n, 16), softmax_label=(n,), allow_up_sizing=True) for n in (4, 64)
    ]
    assert all(other.arena is first.arena for other in others) and first.arena.nbytes > small
    assert bound(symbol, 64).arena.nbytes == first.arena.nbytes
    for executor in (others[1], first, others[0], first):
        executor.forward(is_train=True)
        executor.backward()
        executor.outputs[0].wait_to_read()
    arena = weakref.ref(first.arena)
    del first, executor
    gc.collect()
    assert arena() is not None
    del others[:]
    gc.collect()
    assert arena() is None


def test_an_executor_whose_arena_another_has_used_says_so() -> None:
    symbol = planned(chain(), "three levels")
    one = bound(symbol, 8)
    other = one.reshape(data=(4, 16), softmax_label=(4,))
    one.forward(is_train=True)
    other.forward(is_train=True)
    with pytest.raises(memonger.MemongerError, match="another executor that shares the memory"):
        one.backward()
    other.backward()
    one.forward(is_train=True)
    one.backward()


def predicted_and_taken() -> list[tuple[int, int, int]]:
    """Return the bytes of plans for any device: as planned, as predicted, and as bound."""
    found = []
    lstm = networks.lstm(layers=2, steps=12, hidden=64, batch=8, labels=50)
    resnet = networks.resnet((1, 1, 1, 1), batch=4, image=64, classes=10, filters=16)
    for symbol, shapes in (lstm, resnet):
        plan = memonger.plan(symbol, shapes, how="schedule", work=2, ctx="any")
        executor = plan.symbol.simple_bind(mx.cpu(), **shapes)
        taken = executor.arena.nbytes + sum(4 * output.size for output in executor.outputs)
        found.append((plan.pool_bytes, memonger.pool_bytes(plan.symbol, shapes=shapes), taken))
    return found


@pytest.mark.parametrize("mkldnn", "01")
def test_a_plan_for_any_device_takes_what_this_process_predicts(mkldnn: str) -> None:
    """Also where MKLDNN is switched off, so that tensors of other shapes may share memory."""
    for told, predicted, taken in elsewhere(predicted_and_taken, MXNET_MKLDNN_ENABLED=mkldnn)[0]:
        assert told == predicted == taken


def grown_by_arenas() -> list[tuple[float, float]]:
    """Return the MB predicted and those that a process grew by: an arena, a larger one, none."""
    network, larger = chain(batch=200_000, layers=6), chain(batch=300_000, layers=6)
    symbol = planned(network, "plain")
    for _ in range(2):  # MXNet keeps temporary space that the first has asked for
        executors: list[Any] = []
        sizes: list[tuple[float, float]] = []
        for _, shapes in network, larger:
            lent = executors[-1] if executors else None
            executors.append(symbol.simple_bind(mx.cpu(), "write", shared_exec=lent, **shapes))
            predicted = executors[0].arena.nbytes / 2**20 - sum(predicted for predicted, _ in sizes)
            mx.nd.waitall()
            before = process_mb()
            executors[-1].forward(is_train=True)
            executors[-1].backward()
            mx.nd.waitall()
            sizes.append((predicted, process_mb() - before))
        memory = weakref.ref(executors[0].arena)
        before = process_mb()
        del executors, lent
        gc.collect()
        mx.nd.waitall()
        assert memory() is None
        sizes.append((-sum(predicted for predicted, _ in sizes), process_mb() - before))
    return sizes


@pytest.mark.slow
def test_an_arena_is_as_large_as_told_and_freed_when_it_grows_and_in_the_end() -> None:
    (one, larger, none), _ = elsewhere(grown_by_arenas)
    assert one[0] > 60 and larger[0] > 30
    assert all(predicted - 2 < grown < predicted + 20 for predicted, grown in (one, larger)), (
        one,
        larger,
    )
    assert none[1] < none[0] + 5


def differing(rounds: int, threads: int = 0, size: int = 0, device: int = 0) -> list[str]:
    """Train networks by schedules, again and again, beside other threads; what differs."""
    differences: list[str] = []

    def train(seed: int) -> None:
        context = mx.cpu((device + seed) % 2 if device else 0)
        for k in range(rounds):
            network = drawn(seed + 2 * k)
            try:
                report = memonger.check(
                    network[0], planned(network, "one level", k), network[1], ctx=context
                )
            except memonger.MemongerError as error:
                differences.append(str(error))
            else:
                differences.extend([] if report else [str(report)])

    others = [threading.Thread(target=train, args=(k + 1,)) for k in range(threads)]
    for other in others:
        other.start()
    with mx.engine.bulk(size):
        train(0)
    for other in others:
        other.join()
    return differences


THREADS = {"MXNET_CPU_WORKER_NTHREADS": "4"}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "naive": ({}, {"MXNET_ENGINE_TYPE": "NaiveEngine"}),
    "threaded, one bulk, another thread": (
        {"threads": 1, "size": 5},
        {"MXNET_ENGINE_TYPE": "ThreadedEngine", **THREADS},
    ),
    "no bulks of MXNet's, two devices": (
        {"threads": 1, "device": 1},
        {
            **THREADS,
            "MXNET_EXEC_BULK_EXEC_TRAIN": "0",
            "MXNET_EXEC_BULK_EXEC_INFERENCE": "0",
            "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN": "2",
        },
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_no_engine_nor_thread_changes_a_bit(name: str) -> None:
    options, environment = ENGINES[name]
    work = functools.partial(differing, 2, **options)
    assert elsewhere(work, **environment)[0] == []


def passes(executor: Any) -> Iterator[list[Any]]:
    """Train for twelve steps; what has been computed after each pass."""
    random = np.random.RandomState(0)
    for array in executor.arg_arrays:
        array[:] = random.uniform(-0.5, 0.5, array.shape)
    grads = [array for array in executor.grad_arrays if array is not None]
    for _ in range(12):
        executor.forward(is_train=True)
        yield [array.asnumpy() for array in executor.outputs]
        executor.backward()
        for weight, gradient in zip(executor.arg_arrays, executor.grad_arrays):
            if gradient is not None:
                weight -= 0.01 * gradient
        yield [array.asnumpy() for array in (*grads, *executor.aux_arrays)]


def disturbed(file: str) -> list[Any]:
    """Change MXNet's settings while a schedule trains, between passes and between steps.

    What differs from an unplanned training, the size of bulks, and the results that were told.
    """
    symbol, shapes = drawn(2)
    requests = {n: "null" if n in shapes else "write" for n in symbol.list_arguments()}
    usual, ours = (
        network.simple_bind(mx.cpu(), requests, **shapes)
        for network in (symbol, planned((symbol, shapes), "three levels"))
    )
    profiler, names = mx.profiler, set()
    settings = {"profile_imperative": True, "continuous_dump": False, "filename": file}
    changes: dict[int, list[Callable[[], Any]]] = {
        1: [lambda: mx.engine.set_bulk_size(7)],
        2: [lambda: profiler.set_config(**settings), lambda: profiler.set_state("run")],
        5: [lambda: profiler.set_config(**settings, aggregate_stats=True)],  # no bulks from here on
        20: [lambda: profiler.set_config(**settings), lambda: profiler.set_state("stop")],
        21: [lambda: ours.set_monitor_callback(lambda name, _: names.add(name))],
    }
    unequal: list[Any] = []
    for number, (expected, result) in enumerate(zip(passes(usual), passes(ours))):
        if not all(map(np.array_equal, expected, result)):
            unequal.append(number)
        for change in changes.get(number, ()):
            change()
    profiler.dump()  # it raises an error if somebody else has ended it
    return [*unequal, mx.engine.set_bulk_size(0), len(names) > 10]


def test_profiler_bulks_and_monitor_may_come_and_go(tmp_path: Any) -> None:
    assert elsewhere(disturbed, str(tmp_path / "profile.json"), **THREADS)[0] == [7, True]


def test_a_larger_step_that_is_bound_between_the_passes_changes_nothing() -> None:
    """The arena grows for it at a forward pass, and not under the backward pass of another."""
    net = S.var("data")
    for k in range(12):
        net = S.Activation(S.FullyConnected(net, num_hidden=32, name=f"f{k}"), act_type="tanh")
    symbol = memonger.plan(
        S.MakeLoss(S.mean(net)), data=(64, 32), how="schedule", work=2.0, patience=0.05
    ).symbol
    gradients = []
    for between in (False, True):
        random = np.random.RandomState(0)
        executor = symbol.simple_bind(mx.cpu(), data=(64, 32))
        for array in executor.arg_arrays:
            array[:] = random.randn(*array.shape) * 0.3
        executor.forward(is_train=True)
        larger = executor.reshape(allow_up_sizing=True, data=(256, 32)) if between else None
        executor.backward()
        gradients.append([array.asnumpy() for array in executor.grad_arrays])
        if larger is not None:
            executor.forward(is_train=True)
            larger.forward(is_train=True)
            with pytest.raises(memonger.MemongerError, match="has overwritten its results"):
                executor.backward()
    assert all(map(np.array_equal, *gradients))


def test_an_interrupted_step_writes_to_no_memory_that_is_free() -> None:
    """Ctrl-C at entries of functions in a second step, whose memory is dropped after it."""
    x = S.Variable("data")
    for _ in range(3):
        x = S.L2Normalization(S.tanh(x))  # whose gradient autograd computes
    network, shapes = S.MakeLoss(S.sum(x)), {"data": (512, 512)}
    symbol, moment, entered = planned((network, shapes), "plain"), 0, 1
    while moment < entered:
        executor = symbol.simple_bind(mx.cpu(), **shapes)

        def step(executor: Any = executor) -> None:
            executor.forward(is_train=True)
            executor.backward()

        step()
        raised, count = interrupted(step, moment)
        assert raised == (moment > 0)
        moment, entered = moment + 4, max(entered, count)
        del executor, step
        mx.nd.waitall()
    assert entered > 50
