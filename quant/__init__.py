"""How many bits each weight gets and how its values are quantized; knows nothing of graphs or checkpoints."""

from edgeinfer.quant.awq import scale_search
from edgeinfer.quant.blocks import Grid, dequantized
from edgeinfer.quant.gptq import GptqOptions
from edgeinfer.quant.methods import METHODS, Method, approximate, method_for, quantize, solver_for
from edgeinfer.quant.policy import QuantPolicy, QuantScheme, default_group_size, default_head_bits
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator, output_error

__all__ = [
    "METHODS",
    "GptqOptions",
    "Grid",
    "InputStatistics",
    "Method",
    "QuantPolicy",
    "QuantScheme",
    "StatisticsAccumulator",
    "approximate",
    "default_group_size",
    "default_head_bits",
    "dequantized",
    "method_for",
    "output_error",
    "quantize",
    "scale_search",
    "solver_for",
]
