"""How many bits each weight gets and how they are chosen; knows nothing of graphs, checkpoints or decoding."""

from edgeinfer.quant.policy import QuantPolicy, default_group_size, default_head_bits
from edgeinfer.quant.rtn import quantize
from edgeinfer.quant.scheme import QuantScheme

__all__ = ["QuantPolicy", "QuantScheme", "default_group_size", "default_head_bits", "quantize"]
