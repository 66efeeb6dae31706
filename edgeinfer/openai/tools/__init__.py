"""Calls of functions: how models write them, grammars that make them valid, and reading them; knows no endpoint."""

from __future__ import annotations

from edgeinfer.openai.tools.choice import ToolChoice, read_choice
from edgeinfer.openai.tools.functions import Function, read_functions
from edgeinfer.openai.tools.registry import FORMATS, Dialect, dialect_of
from edgeinfer.openai.tools.use import ToolUse

__all__ = ["FORMATS", "Dialect", "Function", "ToolChoice", "ToolUse", "dialect_of", "read_choice", "read_functions"]
