"""How many bits each weight gets and how they are chosen; knows nothing of graphs, checkpoints or decoding."""

from edgeinfer.quant.policy import QuantPolicy
from edgeinfer.quant.rtn import QuantizedMatrix, quantize
from edgeinfer.quant.scheme import QuantScheme

__all__ = ["QuantPolicy", "QuantScheme", "QuantizedMatrix", "quantize"]
