"""What an export may be asked for, and what of it cannot be."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import EdgeInferError, UsageError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.options import ExportConfig, StaticOptions
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.export.training.drafter import DrafterOptions, StudentSize
from edgeinfer.export.training.exits import ExitsOptions
from edgeinfer.export.training.heads import MedusaOptions
from edgeinfer.export.training.samples import SampleOptions
from edgeinfer.export.training.trainer import TrainOptions
from edgeinfer.quant.calibration import CalibrationOptions
from edgeinfer.quant.gptq import GptqOptions
from edgeinfer.quant.policy import QuantScheme
from tests.bounds import bounds, facts, near, told
from tests.export.families.table import FAMILIES
from tests.factories import COMMON, make_config
from tests.recorded import check_recorded
from tests.tables import each_row

NOT_OF_GGUF = {"exporter": "optimum", "layout": "portable", "group_size": 32, "symmetric": True, "keep_small": False}
WITHOUT_DRAFTERS = ({"format": "gguf"}, {"layout": "portable"}, {"exporter": "optimum"})


@each_row(
    ("options", "says"),
    [
        ({"group_size": 16}, "group_size"),
        ({"layout": "upright"}, "layout"),
        ({"exporter": "other"}, "exporter"),
        ({"name": " "}, "name"),
        ({"bits": True}, "bits"),
        ({"method": "magic"}, "method"),
        ({"method": "gptq", "calibration": "none"}, "no-calibration"),
        ({"calibration": "text"}, "calibration"),
        ({"bits": 3.5, "target_size": 10**6}, "target_size"),
        ({"bits": float("nan")}, "bits"),
        ({"bits": 3.5, "calibration": "none"}, "bits"),
        ({"max_divergence": 0.0}, "max_divergence"),
        ({"bits_for": (("head", 7),)}, "7"),
        ({"bits": 5, "calibration": "none", "layout": "portable"}, "5 bits is not supported in the portable layout"),
        ({"head_bits": 6, "exporter": "optimum"}, "6 bits is not supported by the optimum exporter"),
        ({"minima": True, "layout": "portable"}, "minima is not supported in the portable layout"),
        ({"minima": True, "symmetric": True}, "minima and symmetric"),
        ({"bits": 6, "static": StaticOptions()}, "6 bits is not supported for static models"),
        ({"bits_for": (("", 4),)}, "pattern"),
        ({"exporter": "optimum", "bits": 4.5}, "bits"),
        ({"static": StaticOptions(), "bits": 4.5}, "bits=4.5"),
        ({"format": "mlx"}, "format='mlx'"),
        ({"format": "onnx", "gguf_type": "Q8_0"}, "GGUF type"),
        ({"format": "onnx", "bits": 16}, "bits=16"),
        ({"format": "gguf", "gguf_type": "Q9_9"}, "Q9_9"),
        *(({"format": "gguf", **{name: value}}, name) for name, value in NOT_OF_GGUF.items()),
        *(({"drafter": Path("x"), **other}, "not supported with a drafter") for other in WITHOUT_DRAFTERS),
    ],
)
def test_impossible_options_are_usage_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ExportConfig(**options)


def test_bits_stand_for_types_of_gguf() -> None:
    found = {bits: ExportConfig(format="gguf", bits=bits).gguf_kind for bits in (2, 4, 5, 6, 8, 16, 32)}
    assert found == {2: "Q2_K", 4: "Q4_0", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0", 16: "F16", 32: "F32"}
    assert ExportConfig(format="gguf", gguf_type="q4_k_m").gguf_kind == "Q4_K_M"


# Those whose descriptions have parts that others lack.
PARTS = ("Llama", "Gemma2", "Qwen3Moe", "Dots1", "NemotronH", "Qwen3Next", "MiniCPM3", "Gemma3n", "Lfm2", "GptOss")


def read(values: dict[str, Any]) -> tuple[DecoderSpec, int, int]:
    """The decoder of a config.json, how many tensors it has, and numbers in them."""
    config = HFConfig(values)
    family = find_architecture(config)
    spec = family.read(config, bool(values.get("tie_word_embeddings")))
    shapes = [plan.shape for plan in family.tensors(config, spec)]
    return spec, len(shapes), sum(map(len, shapes))


def difference(values: dict[str, Any], usual: DecoderSpec) -> object:
    """What another configuration changes of a decoder, or what is said of it."""
    try:
        spec, *_ = read(values)
    except EdgeInferError as error:
        return str(error.message)
    fields = [field.name for field in dataclasses.fields(spec)]
    return {name: told(getattr(spec, name)) for name in fields if getattr(spec, name) != getattr(usual, name)}


def test_configurations_one_step_away_read_as_they_did() -> None:
    found = {}
    for family in FAMILIES:
        for place, settings in enumerate(family.settings):
            values = make_config(family.name, **settings).to_dict()
            spec, tensors, sides = read(values)
            found[f"{family.name} {place}"] = [told(spec), facts(spec), tensors, sides]
            if not place:
                changed = {
                    f"{name}={value!r}": difference(values | {name: value}, spec)
                    for name in sorted({*settings, *(COMMON if family.name in PARTS else ())})
                    for value in near(values.get(name))[-3:]
                }
                found[family.name] = [{name: said for name, said in changed.items() if said != {}}]
    check_recorded("families", found)


def test_descriptions_one_step_away_are_refused_as_they_were() -> None:
    found: dict[str, Any] = {}
    families = {family.name: family for family in FAMILIES}
    for name in PARTS:
        if name in families:
            spec, *_ = read(make_config(name, **families[name].settings[-1]).to_dict())
            for part in (spec, *(getattr(spec, field.name) for field in dataclasses.fields(spec))):
                if dataclasses.is_dataclass(part):
                    found[f"{name} {type(part).__name__}"] = [bounds(part), {} if part is spec else facts(part)]
    check_recorded("bounds-decoders", found)


def test_options_one_step_away_are_refused_as_they_were() -> None:
    sound = (
        *(
            ExportConfig(bits=4, calibration="none"),
            ExportConfig(method="gptq", calibration=Path("text")),
            ExportConfig(target_size=9_000_000, calibration="none"),
        ),
        *(
            ExportConfig(format="gguf"),
            ExportConfig(static=StaticOptions(48, 16, (1, 4))),
            StaticOptions(48, 16, (1, 4)),
        ),
        *(QuantScheme(4, 32), GptqOptions(), CalibrationOptions()),
        *(TrainOptions(4), ExitsOptions(), MedusaOptions(samples=0), SampleOptions(9), StudentSize(64, 2, 96, 4, 2)),
        DrafterOptions(size=StudentSize(64, 2, 96, 4, 2), nested=True),
    )
    check_recorded("bounds-options", {f"{n} {type(each).__name__}": bounds(each) for n, each in enumerate(sound)})


def test_static_graphs_fit_a_decoder_or_are_refused() -> None:
    """A decoder of 3 layers and 128 positions: contexts, chunks and layers up to these and beyond."""
    spec, *_ = read(make_config("Llama").to_dict())
    found = {}
    for context, chunk, layers in product((None, 64, 127, 128, 129), (None, 8, 64), ((), (1,), (2,), (3,))):
        try:
            said = told(StaticOptions(context, chunk, layers=layers).graphs(spec))
        except EdgeInferError as error:
            said = str(error)
        found[f"{context} {chunk} {layers}"] = said
    check_recorded("static-graphs", found)
