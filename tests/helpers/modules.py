"""Training by Module: a residual network, its plans, batches, and what a training leaves."""

from __future__ import annotations

import functools
from typing import Any, Callable

import memonger
import mxnet as mx
import numpy as np
from memonger.schedules.execution.symbol import scheduled

from drawn_schedules import nested, work_of

S = mx.sym
BATCH = 32
SHAPES: dict[str, Any] = {"data": (BATCH, 3, 8, 8), "softmax_label": (BATCH,)}
RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.normal(size=(72, 3, 8, 8)).astype("f")
LABELS = (IMAGES.mean((1, 2, 3)) * 200).astype("f") // 1 % 4
LEARNING = {"learning_rate": 0.05, "momentum": 0.9}


def net(loss: bool = True, stage: str = "") -> Any:
    """``stage``: which mirror_stage the sums get: none, 'one', or 'two', a label for each two."""
    size = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 16}  # MKLDNN lays it out in blocks
    with mx.name.NameManager():
        x = S.Convolution(S.Variable("data"), **size)
        for k in range(4):
            y = S.Activation(S.BatchNorm(x, fix_gamma=False), act_type="relu")
            y = S.Convolution(S.Dropout(y, p=0.2) if k == 1 else y, **size)
            x = S.broadcast_add(x, y, name=f"sum{k}")
            if stage:
                x._set_attr(mirror_stage="True" if stage == "one" else str(k // 2))
        x = S.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
        x = S.FullyConnected(S.Dropout(x, p=0.2), num_hidden=4, name="fc")
        return S.SoftmaxOutput(x, name="softmax") if loss else x


def with_schedule(symbol: Any) -> Any:
    shapes = {name: SHAPES[name] for name in symbol.list_arguments() if name in SHAPES}
    return scheduled(symbol, nested(work_of(symbol, shapes), 4, 1, 0.8))


def planned(loss: bool = True) -> Any:
    return with_schedule(net(loss))


@functools.lru_cache(None)
def with_marks(loss: bool = True) -> Any:
    plan = memonger.plan(net(loss), data=SHAPES["data"], how="marks")
    assert plan.recomputed and plan.pool_bytes < plan.unplanned_bytes
    return plan.symbol


def parameters(symbol: Any) -> dict[str, Any]:
    random = np.random.RandomState(1)
    shapes = zip(symbol.list_arguments(), symbol.infer_shape(data=SHAPES["data"])[0])
    return {n: mx.nd.array(random.normal(size=s) * 0.3) for n, s in shapes if n not in SHAPES}


class Batches(mx.io.DataIter):
    def __init__(self, batches: list[Any], *shapes: tuple[int, ...]) -> None:
        super().__init__(shapes[0][0])
        self.batches, self.default_bucket_key = batches, shapes[0][1]
        self.provide_data, self.provide_label = ([item] for item in zip(SHAPES, shapes))
        self.reset()

    def reset(self) -> None:
        self._left = list(self.batches)

    def next(self) -> Any:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)


def batch_of(images: Any, labels: Any, key: Any = None) -> Any:
    return mx.io.DataBatch(
        [mx.nd.array(images)],
        None if labels is None else [mx.nd.array(labels)],
        pad=0,
        bucket_key=key,
        provide_data=[("data", images.shape)],
        provide_label=None if labels is None else [("softmax_label", labels.shape)],
    )


def first(size: int, labels: bool = True) -> Any:
    return batch_of(IMAGES[:size], LABELS[:size] if labels else None)


def sized(size: int) -> tuple[list[Any], list[Any]]:
    return [("data", (size, 3, 8, 8))], [("softmax_label", (size,))]


def module_of(symbol: Any, size: int = BATCH, **more: Any) -> Any:
    """Return a Module that is bound, with parameters and an optimizer."""
    data, label = sized(size)
    labels = "softmax_label" in symbol.list_arguments()
    module = mx.mod.Module(symbol, label_names=["softmax_label"] if labels else None)
    module.bind(data, label if labels else None, **more)
    if not module.params_initialized:
        module.init_params(mx.init.One(), arg_params=parameters(symbol), allow_missing=True)
    module.init_optimizer(optimizer_params=LEARNING)
    return module


def trained(module: Any) -> dict[str, Any]:
    arguments, states = module.get_params()
    return {name: array.asnumpy() for name, array in {**arguments, **states}.items()}


def seed() -> None:
    mx.random.seed(3)
    np.random.seed(3)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys() and all(np.isfinite(array).all() for array in one.values())
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


def batch_arrays(size: int = BATCH) -> dict[str, Any]:
    return {"data": mx.nd.array(IMAGES[:size]), "softmax_label": mx.nd.array(LABELS[:size])}


def filled(executor: Any) -> Any:
    ones = {name: mx.nd.ones(array.shape) for name, array in executor.aux_dict.items()}
    executor.copy_params_from({**parameters(net()), **batch_arrays()}, ones)
    return executor


def bound(symbol: Any, request: Any) -> Any:
    shapes, _, states = symbol.infer_shape(data=(BATCH, 3, 8, 8))
    args = {n: mx.nd.zeros(shape) for n, shape in zip(symbol.list_arguments(), shapes)}
    grads = {n: mx.nd.zeros(array.shape) for n, array in args.items() if n != "data"}
    return symbol.bind(mx.cpu(), args, grads, request, list(map(mx.nd.zeros, states)))


def stepped(executor: Any, out_grads: Any = None) -> dict[str, Any]:
    mx.random.seed(7)
    arrays = {}
    for k in range(3):
        executor.forward(is_train=True)
        executor.backward(out_grads)
        mx.nd.waitall()
        for kind in ("output", "grad", "aux"):
            for name, array in getattr(executor, kind + "_dict").items():
                if array is not None:
                    arrays[f"{kind} {name} {k}"] = array.asnumpy()
    return arrays


def after_batch(param: Any) -> None:
    """Wait, for Module.fit reads BatchNorm's statistics before they are written; seed the next."""
    mx.nd.waitall()
    mx.random.seed(100 * param.epoch + param.nbatch)


def fit(module: Any, data: Any, **more: Any) -> Any:
    seed()
    chosen = {"num_epoch": 2, "optimizer_params": LEARNING, "batch_end_callback": after_batch}
    module.fit(data, **{**chosen, "arg_params": parameters(net()), **more})
    return module


def sentences(*lengths: int) -> Batches:
    random, batches = np.random.RandomState(0), []
    for _ in range(8):
        steps = lengths[random.randint(len(lengths))]
        words = random.randint(0, 20, (4, steps))
        batches.append(batch_of(words, (words + 1) % 20, steps))
    return Batches(batches, *[(4, max(lengths))] * 2)


def fitted_buckets(network: Callable[[int], Any], request: str) -> dict[str, Any]:
    seed()
    data = sentences(3, 5, 8)
    module = mx.mod.BucketingModule(
        lambda key: (network(key), ["data"], ["softmax_label"]), default_bucket_key=8
    )
    module.bind(data.provide_data, data.provide_label, grad_req=request)
    module.fit(
        data,
        num_epoch=2,
        eval_metric=mx.metric.Perplexity(None),
        initializer=mx.init.Xavier(),
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
    )
    arrays = trained(module)
    arrays["score"] = np.array(module.score(data, mx.metric.Perplexity(None))[0][1])
    return arrays
