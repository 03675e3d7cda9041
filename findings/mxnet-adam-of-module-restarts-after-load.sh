#!/bin/bash
# Expected: Module.save_checkpoint(save_optimizer_states=True) and Module.load(load_optimizer_states=True) go on as if nothing
# happened; that is what the states are for.
# (Guess: bit for bit.)
# Seen: the states hold Adam's two means, but not the number of updates. After loading it counts from 1 again, so the
# correction for the first steps is applied to means that are warm: the first weight here is at 0.994 after 10 steps, and at
# 1.097 after 5, loading and 5. Trainer.save_states of Gluon keeps the number: it goes on bit for bit.
# MXNet 1.9.1. A learning rate schedule of Module starts again too.
# Hurts: training that is interrupted and resumed: a jump of the loss that looks like a bad batch. Pass
# optimizer_params={'begin_num_update': n} with n the updates done.
# Source: Updater.get_states(dump_optimizer=False) in Module.save_optimizer_states (python/mxnet/module/module.py), True in
# gluon/trainer.py.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 MXNET_SUBGRAPH_VERBOSE=0
python=
for version in 3.8 3.9 3.10 3.11; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break 2
        fi
    done
done
[ -n "$python" ] || { echo "needs one of Python 3.8, 3.9, 3.10, 3.11" >&2; exit 2; }
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-compile mxnet==1.9.1 numpy==1.23.5 graphviz==0.8.4 'requests<3'
venv/bin/python - <<'EOF'
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

data = nd.array([[0.1, 0.5, 0.9], [0.4, 0.3, 0.2]])
target = nd.array([[0.2], [0.7]])
net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")
net = mx.sym.LinearRegressionOutput(net, mx.sym.Variable("target"))
options = {"learning_rate": 0.1}


def ready(module, **more):
    module.bind([("data", (2, 3))], [("target", (2, 1))])
    if not module.params_initialized:
        module.init_params(mx.init.One())
    module.init_optimizer(kvstore=None, optimizer="adam", optimizer_params={**options, **more})
    return module


def train(module, steps):
    for _ in range(steps):
        module.forward_backward(mx.io.DataBatch([data], [target]))
        module.update()
    return module.get_params()[0]["fc_weight"].asnumpy()


straight = train(ready(mx.mod.Module(net, label_names=["target"])), 10)
first = ready(mx.mod.Module(net, label_names=["target"]))
train(first, 5)
first.save_checkpoint("kept", 5, save_optimizer_states=True)


def resumed(**more):
    module = mx.mod.Module.load("kept", 5, load_optimizer_states=True, label_names=["target"])
    return train(ready(module, **more), 5)


def by_gluon(saves):
    block = gluon.nn.Dense(1, in_units=3)
    block.initialize(mx.init.One())
    trainer = gluon.Trainer(block.collect_params(), "adam", dict(options))
    for step in range(10):
        if step == 5 and saves:
            trainer.save_states("kept.states")
            trainer = gluon.Trainer(block.collect_params(), "adam", dict(options))
            trainer.load_states("kept.states")
        with autograd.record():
            loss = nd.square(block(data) - target)
        loss.backward()
        trainer.step(2)
    return block.weight.data().asnumpy()


again, with_number = resumed(), resumed(begin_num_update=5)
print("mxnet", mx.__version__, "| 10 steps", straight, "| 5, load, 5", again, "| with begin_num_update", with_number)
assert np.abs(straight - again).max() > 0.02 and np.array_equal(straight, with_number)
print("Gluon's Trainer: equal", np.array_equal(by_gluon(saves=False), by_gluon(saves=True)))
assert np.array_equal(by_gluon(saves=False), by_gluon(saves=True))
EOF
