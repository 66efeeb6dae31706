"""Has OpenVINO GenAI's pipeline make an OpenVINO model of a GGUF file, and keeps it.

Run by path with an interpreter that has openvino-genai, so it imports nothing of edgeinfer.

    python openvino_genai_model.py MODEL.gguf FOLDER
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """The pipeline saves what it makes beside the file, so it is shown a link to it in the folder."""
    source, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    link = folder / source.name
    link.symlink_to(source)
    import_module("openvino_genai").LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()
    if not (folder / "openvino_model.xml").is_file():
        raise SystemExit(f"OpenVINO GenAI saved nothing in {folder}")


if __name__ == "__main__":
    main()
