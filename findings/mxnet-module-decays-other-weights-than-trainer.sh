#!/bin/bash
# Expected: {'learning_rate': 1, 'wd': 0.1} decays the same parameters in Module and in Gluon's Trainer.
# (Guess: all of them in both.)
# Seen: Trainer decays everything, biases and beta of BatchNorm too. Module decays only what is named ..._weight or ..._gamma:
# a weight that is called `embedding`, or the `parameters` of a fused RNN, never decays there. With zero gradients one step
# takes a weight from 1 to 0.9 or leaves it at 1, by its name.
# MXNet 1.9.1.
# Hurts: networks that move between the two, and symbols with own variables: a regularization that is set and does nothing.
# For Module set wd_mult by mx.sym.Variable(..., wd_mult=1); for Trainer
# net.collect_params('.*bias|.*beta').setattr('wd_mult', 0).
# Source: Optimizer.set_wd_mult looks at names where it is given param_idx2name; Trainer gives none
# (python/mxnet/optimizer/optimizer.py, gluon/trainer.py).
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
from mxnet import autograd, gluon, nd

options = {"learning_rate": 1.0, "wd": 0.1}
ones = {"fc_weight": nd.ones((2, 3)), "embedding": nd.ones((2, 2)), "fc_bias": nd.ones(2), "told": nd.ones((2, 2))}
net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
for name in ("embedding", "told"):
    weight = mx.sym.Variable(name, wd_mult=1 if name == "told" else None)
    net = mx.sym.FullyConnected(net, weight=weight, num_hidden=2, no_bias=True)
module = mx.mod.Module(mx.sym.MakeLoss(net * 0), label_names=[])
module.bind([("data", (2, 3))])
module.init_params(arg_params=ones, initializer=None)
module.init_optimizer(optimizer="sgd", optimizer_params=options)
module.forward_backward(mx.io.DataBatch([nd.ones((2, 3))]))
module.update()
by_module = {name: round(array.asnumpy().item(0), 3) for name, array in module.get_params()[0].items()}
block = gluon.nn.Dense(2, in_units=3, bias_initializer="ones", prefix="fc_")
block.initialize(mx.init.One())
trainer = gluon.Trainer(block.collect_params(), "sgd", options)
with autograd.record():
    loss = block(nd.ones((2, 3))) * 0
loss.backward()
trainer.step(1)
by_trainer = {name: round(param.data().asnumpy().item(0), 3) for name, param in block.collect_params().items()}
print("mxnet", mx.__version__, "| Module:", by_module, "| Trainer:", by_trainer)
assert by_module == {"fc_weight": 0.9, "fc_bias": 1, "embedding": 1, "told": 0.9}
assert by_trainer == {"fc_weight": 0.9, "fc_bias": 0.9}
EOF
