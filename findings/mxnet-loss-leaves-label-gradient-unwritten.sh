#!/bin/bash
# Expected: with grad_req='write' for all arguments, backward writes every gradient; that of a label, which has none, is zero.
# (Guess: zeros.)
# Seen: SoftmaxOutput, SVMOutput and the three regression outputs leave the label's array as it was: 7 stays 7. A label that
# the symbol computes (label * 2) gets whatever lay in the pool's memory, 1e-42 here.
# MXNet 1.9.1.
# Hurts: gradient checks and norms over all of grad_dict, and networks whose targets are computed by layers that train
# (distillation in one symbol). Pass grad_req 'null' for labels, as Module does, and put BlockGrad on computed targets.
# Source: Backward of the operators, which fills the data's gradient alone (src/operator/softmax_output-inl.h,
# regression_output-inl.h, svm_output-inl.h).
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

print("mxnet", mx.__version__)
for name, label in (
    ("SoftmaxOutput", (2,)),
    ("SVMOutput", (2,)),
    ("LinearRegressionOutput", (2, 3)),
    ("LogisticRegressionOutput", (2, 3)),
    ("MAERegressionOutput", (2, 3)),
):
    net = getattr(mx.sym, name)(mx.sym.Variable("data"), mx.sym.Variable("label"))
    executor = net.simple_bind(mx.cpu(), grad_req="write", data=(2, 3), label=label)
    for array in executor.grad_dict.values():
        array[:] = 7
    executor.arg_dict["data"][:] = 2
    executor.forward(is_train=True)
    executor.backward()
    by_data, by_label = (executor.grad_dict[key].asnumpy() for key in ("data", "label"))
    print(name, "gradient of data", by_data[0].tolist(), "of label", by_label.ravel().tolist())
    assert (by_label == 7).all() and not np.any(by_data == 7)
EOF
