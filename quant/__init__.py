"""How many bits each weight gets and how they are chosen; knows nothing of graphs, checkpoints or decoding."""

from edgeinfer.quant.awq import scale_search
from edgeinfer.quant.blocks import Grid, dequantized
from edgeinfer.quant.codebook import CodebookMatrix, quantize_codebook
from edgeinfer.quant.gptq import GptqOptions
from edgeinfer.quant.methods import METHODS, Method, approximate, method_for, quantize, solver_for
from edgeinfer.quant.policy import QuantPolicy, default_group_size, default_head_bits
from edgeinfer.quant.scheme import QuantScheme
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator, output_error

__all__ = [
    "METHODS",
    "CodebookMatrix",
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
    "quantize_codebook",
    "scale_search",
    "solver_for",
]
