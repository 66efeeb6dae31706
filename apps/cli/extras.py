"""Which extra brings a module that is missing; knows nothing of the commands that need it."""

from __future__ import annotations

from edgeinfer.errors import UsageError

__all__ = ["missing_extra"]

# What the extras bring.
_EXTRAS = {
    "onnx": "export",
    "safetensors": "export",
    "ml_dtypes": "export",
    "scipy": "export",
    "starlette": "server",
    "uvicorn": "server",
    "llguidance": "structured",
    "markdown_it": "desktop",
    "gguf": "gguf",
    "llama_cpp": "gguf",
    "optimum": "optimum",
    "torch": "optimum",
    "transformers": "optimum",
}


def missing_extra(error: ModuleNotFoundError) -> Exception:
    """The error to raise for a module that is not there: a missing extra is the user's to add, any other is our bug."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return error
    return UsageError(f"This needs {error.name}, which is not installed.", f"pip install 'edgeinfer[{extra}]'")
