"""Networks as symbols, for the examples, the tests and the benchmarks, in a file for each kind.

Every builder returns ``(symbol, shapes)``: the network with its loss, and the shape of every data
and label input by name, so that ``symbol.simple_bind(ctx, **shapes)`` works. All sizes are
parameters: the defaults are of a size that is trained, and a test can make them tiny. Bind data
and labels with grad_req 'null', as Module does: not every loss has a gradient for its label.

A builder names its nodes in a counter of its own, so the same call gives the same symbol however
many were built before. Its ``__wrapped__`` is the builder that counts on in the caller's
``mx.name.NameManager``.

`resnet` and `lstm` are the networks of the original memonger's ``example_resnet.py`` and
``example_lstm.py``, node for node. ``networks.mixed`` has more kinds, which need no such names.
"""

from .common import Network, Shape, freshly_named  # first: it imports memonger before MXNet
from .convolutional import mobilenet_v2, model_zoo, normalised_input, resnet, resnet_v2, two_heads
from .dense import chain, highway
from .detection import HardSwish, detection, rcnn
from .inception import googlenet, inception_v3
from .recurrent import lstm
from .segmentation import unet
from .text import embedding_net, transformer

__all__ = [
    "HardSwish",
    "Network",
    "Shape",
    "chain",
    "detection",
    "embedding_net",
    "freshly_named",
    "googlenet",
    "highway",
    "inception_v3",
    "lstm",
    "mobilenet_v2",
    "model_zoo",
    "normalised_input",
    "rcnn",
    "resnet",
    "resnet_v2",
    "transformer",
    "two_heads",
    "unet",
]
