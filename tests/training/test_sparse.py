"""Networks of Symbol with sparse arrays: marks leave the operators of these alone."""

from __future__ import annotations

from typing import Any, Callable

import pytest

import memonger
import mxnet as mx
import numpy as np
from memonger import MemongerError

from planned import marked

S = mx.sym
BATCH, WORDS, COLUMNS = 64, 4, 3000


def layers(x: Any) -> Any:
    for k in range(6):
        x = S.tanh(S.FullyConnected(x, num_hidden=64, flatten=False, name=f"fc{k}") * 2)
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=5), name="softmax")


def looked_up(sparse_grad: bool = True) -> Any:
    """Look up words twice, of a dense weight whose gradient has rows."""
    words, weight = S.var("data"), S.var("words_weight")
    sizes = {"input_dim": COLUMNS, "output_dim": 64, "sparse_grad": sparse_grad}
    first, other = (S.Embedding(x, weight, **sizes) for x in (words, S.reverse(words, axis=1)))
    return layers(first * other)


def of_row_sparse_weights() -> Any:
    """Look up words of a weight that is stored by rows."""
    weight = S.var("words_weight", stype="row_sparse")
    sizes = {"input_dim": COLUMNS, "output_dim": 64, "sparse_grad": True}
    return layers(S.sparse.Embedding(S.var("data"), weight, **sizes, name="words0"))


def factorized() -> Any:
    """Make a factorization machine: csr data, weights by rows, sparse results."""
    x = S.var("data", stype="csr")
    weight, bias = (
        S.var(f"{name}_weight", stype="row_sparse", shape=(COLUMNS, n))
        for name, n in (("v", 64), ("w", 1))
    )
    squares = S.sparse.dot(S.square(x), S.square(weight), name="squares")
    product = S.square(S.sparse.dot(x, weight, name="product"), name="of_product")
    return layers(S.broadcast_add(product - squares, S.sparse.dot(x, bias, name="linear")))


#: What is trained, and the operators that read or make sparse arrays.
NETWORKS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a dense weight": (looked_up, []),
    "a sparse weight": (of_row_sparse_weights, ["words0"]),
    "sparse results": (factorized, ["square0", "square1", "squares", "product", "linear"]),
}


def batch(network: Any, k: int) -> Any:
    random = np.random.RandomState(k)
    words = mx.nd.array(random.randint(0, COLUMNS, (BATCH, WORDS)))
    if network.attr_dict().get("data", {}).get("__storage_type__") == "2":
        words = mx.nd.array(random.rand(BATCH, COLUMNS) < 0.03).tostype("csr")
    return mx.io.DataBatch([words], [mx.nd.array(random.randint(0, 5, BATCH))])


def learned(network: Any) -> dict[str, str]:
    """Ask for gradients as Module does."""
    inputs = ("data", "softmax_label")
    return {name: "write" for name in network.list_arguments() if name not in inputs}


def trained(network: Any, planned: Any) -> list[Any]:
    """Train three steps with Module; return outputs, gradients with their rows, parameters."""
    first = batch(network, 0)
    module = mx.mod.Module(planned)
    module.bind([("data", first.data[0].shape)], [("softmax_label", (BATCH,))])
    mx.random.seed(1)
    np.random.seed(1)
    module.init_params(mx.init.Uniform(0.5))
    module.init_optimizer(None, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01})
    left = []
    for k in range(3):
        module.forward_backward(batch(network, k))
        left += module.get_outputs()
        executor = module._exec_group.execs[0]
        for array in [array for array in executor.grad_arrays if array is not None]:
            left += [array, array.stype, array.indices if array.stype == "row_sparse" else 0]
        module.update()
        left += [array.copy() for array in module.get_params()[0].values()]
    return [array.asnumpy() if isinstance(array, mx.nd.NDArray) else array for array in left]


@pytest.mark.parametrize("name", NETWORKS)
def test_sparse_operators_train_by_marks_as_they_are(name: str, tmp_path: Any) -> None:
    make, kept = NETWORKS[name]
    with mx.name.NameManager():
        network = make()
    shapes = {"data": batch(network, 0).data[0].shape}
    options: Any = {"how": "auto", "budget": "97%", "patience": 0.05}
    plan = memonger.plan(network, shapes, grad_req=learned(network), **options)
    assert plan.schedule is None and plan.exact
    assert plan.pool_bytes < plan.unplanned_bytes
    assert marked(plan.symbol) and not {*marked(plan.symbol)} & {*kept}
    alive = [t for t in memonger.explain(network, shapes).tensors if t.kind == "result"]
    assert all("sparse array" in t.rule for t in alive if t.name in kept)
    assert all(map(np.array_equal, trained(network, network), trained(network, plan.symbol)))
    assert memonger.check(network, plan.symbol, shapes, steps=1)
    plan.save(tmp_path / "plan.json")
    assert memonger.load_plan(tmp_path / "plan.json").symbol.tojson() == plan.symbol.tojson()


@pytest.mark.parametrize("name", NETWORKS)
def test_memory_is_replayed_without_sparse_arrays(name: str) -> None:
    """MXNet tells its MB; dense data, or the terms of a gradient, would take more of them."""
    network = NETWORKS[name][0]()
    shapes = {"data": (4096, batch(network, 0).data[0].shape[1])}
    for grad_req in ("write", learned(network)):
        assert memonger.plan(network, shapes, grad_req=grad_req, patience=0.05, how="marks").exact


def test_a_gradient_in_rows_takes_no_memory_that_is_known() -> None:
    size = 4 * COLUMNS * 64
    plans = [
        memonger.plan(
            looked_up(sparse_grad), {"data": (BATCH, WORDS)}, patience=0.05, ctx="cpu", how="marks"
        )
        for sparse_grad in (False, True)
    ]
    dense, sparse = [plan.unplanned_device_bytes - plan.unplanned_bytes for plan in plans]
    assert dense - sparse == size
    assert plans[1].unplanned_bytes < plans[0].unplanned_bytes  # by terms of its sum


@pytest.mark.parametrize("name", NETWORKS)
def test_no_schedule_holds_sparse_arrays(name: str) -> None:
    network = NETWORKS[name][0]()
    shapes = {"data": batch(network, 0).data[0].shape}
    with pytest.raises(MemongerError, match="how='marks'"):
        memonger.plan(network, shapes, how="schedule", work=2.0)


def test_a_schedule_holds_no_sparse_array_of_its_own() -> None:
    dense = S.BlockGrad(S.tanh(S.var("data")))
    network = layers(S.sparse.dot(S.cast_storage(dense, stype="csr", name="cast"), S.var("w")))
    with pytest.raises(MemongerError, match="'cast' .* makes a sparse array.*how='marks'"):
        memonger.plan(network, {"data": (8, 20), "w": (20, 64)}, how="schedule", work=2.0)


def bound(by_type: bool) -> Any:
    """Bind a network whose variables do not say that they are sparse; return its executor."""
    with mx.name.NameManager():
        network = layers(S.sparse.dot(S.var("data"), S.var("weight"), name="product"))
    shapes = {"data": (BATCH, COLUMNS), "weight": (COLUMNS, 64)}
    stypes = {**dict.fromkeys(network.list_arguments(), "default"), "data": "csr"}
    stypes["weight"] = "row_sparse"
    if by_type:
        return network.simple_bind(mx.cpu(), stype_dict=stypes, **shapes)
    sizes = dict(zip(network.list_arguments(), network.infer_shape(**shapes)[0]))
    arrays = {n: mx.nd.zeros(sizes[n], stype=stype) for n, stype in stypes.items()}
    gradients = {n: array for n, array in arrays.items() if n not in ("data", "softmax_label")}
    return network.bind(mx.cpu(), arrays, {n: a.copy() for n, a in gradients.items()})


@pytest.mark.parametrize("by_type", [True, False])
def test_a_session_sees_how_a_bind_stores_its_arrays(by_type: bool) -> None:
    with memonger.enable(how="marks", cache=False, patience=0.05) as session:
        executor = bound(by_type)
    (plan,) = session.plans
    assert plan.recomputed and "product" not in plan.recomputed
    assert executor.grad_dict["weight"].stype == "row_sparse"
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
