"""What is said of a checkpoint whose family has no builder: its name, why, and whether llama.cpp runs it."""

from __future__ import annotations

from edgeinfer.core.errors import UnsupportedArchitectureError
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig

_RUN_GGUF = "Run a GGUF of it, as llama.cpp has such models: -m OWNER/NAME:Q4_K_M"
_OTHERS = "Choose another model, such as those of: edgeinfer models --catalog"
# Drafters that no export can take with a model, by transformers' `model_type`.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
_ASSISTANT = (
    "Gemma 4's assistant model is not supported yet (its layers have no cache and read the one of the model that it "
    "drafts for)."
)
_ALONE = "Export that model without it: lookups of earlier text draft for it."
# What no builder makes, by transformers' `model_type`; of others it would take too long to name.
REFUSED = {
    "deepseek_v32": "attention to tokens that an indexer chooses",
    "falcon_mamba": "recurrent layers of the first Mamba",
    "glm_moe_dsa": "attention to tokens that an indexer chooses",
    "jamba": "recurrent layers of the first Mamba",
    "kimi_linear": "delta rules with a gate for each channel",
    "laguna": "gates of a softplus, and layers with different numbers of heads",
    "mamba": "recurrent layers of the first Mamba",
    "minimax": "lightning attention",
    "muse_glimmer": "norms without weights of embeddings, queries and keys",
    "nanochat": "norms without weights",
    "olmo_hybrid": "delta rules of negative eigenvalues, and norms behind attention in some layers alone",
    "qwen4_exp": "attention to tokens that an indexer chooses, and embeddings of n-grams",
    "recurrent_gemma": "gated linear recurrences",
    "rwkv": "recurrent layers of RWKV",
    "xlstm": "recurrent layers of xLSTM",
    "zamba": "recurrent layers of the first Mamba, and layers that share their weights",
    "zamba2": "layers that share their weights",
}
# Classes of decoders without a builder that llama.cpp's converter reads (conversion/__init__.py of the version that
# llama-cpp-python 0.3.36 brings); of those that also see or hear, it runs the language model.
_LLAMA_CPP = """
ArcticForCausalLM BaiChuanForCausalLM BaichuanForCausalLM BailingMoeForCausalLM
BailingMoeV2ForCausalLM BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration BloomForCausalLM
ChameleonForConditionalGeneration ChatGLMForConditionalGeneration ChatGLMModel CodeShellForCausalLM CogVLMForCausalLM
DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM
Dots3NoteForCausalLM Dots3NoteForConditionalGeneration Ernie4_5_ForCausalLM Exaone4_5_ForConditionalGeneration
ExaoneForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconMambaForCausalLM GPT2LMHeadModel
GPTBigCodeForCausalLM GPTNeoXForCausalLM GPTRefactForCausalLM Gemma4UnifiedForConditionalGeneration
Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM
GlmOcrForConditionalGeneration GraniteSwitchForCausalLM Grok1ForCausalLM GrokForCausalLM GroveMoeForCausalLM
HYV3ForCausalLM HYV4ForCausalLM HrmTextForCausalLM HunYuanVLForConditionalGeneration IQuestCoderForCausalLM
InternLM2ForCausalLM InternLM3ForCausalLM JAISLMHeadModel Jais2ForCausalLM JambaForCausalLM KORMoForCausalLM
KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM KimiVLForConditionalGeneration
LagunaForCausalLM Llama4ForCausalLM Llama4ForConditionalGeneration LlavaForConditionalGeneration
LlavaStableLMEpochForCausalLM MPTForCausalLM MaincoderForCausalLM MambaForCausalLM MambaLMHeadModel MapleForCausalLM
MellumForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiniCPMV4_6ForConditionalGeneration MiniMaxM1ForCausalLM
MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration MiniMaxText01ForCausalLM
MuseGlimmerForConditionalGeneration NanbeigeForCausalLM NemotronHPuzzleForCausalLM OLMoForCausalLM OlmoForCausalLM
OpenELMForCausalLM OrionForCausalLM PLMForCausalLM PLaMo2ForCausalLM PLaMo3ForCausalLM PanguEmbeddedForCausalLM
Phi4ForCausalLMV Plamo2ForCausalLM Plamo3ForCausalLM PlamoForCausalLM QWenLMHeadModel
Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration RWForCausalLM RWKV6Qwen2ForCausalLM RWKV7ForCausalLM
RuGPT3XLForCausalLM Rwkv6ForCausalLM Rwkv7ForCausalLM RwkvHybridForCausalLM SarvamMoEForCausalLM
SmallThinkerForCausalLM SolarOpenForCausalLM StableLMEpochForCausalLM Step3p5ForCausalLM
Step3p7ForConditionalGeneration StepVLForConditionalGeneration TalkieForCausalLM XverseForCausalLM
YoutuVLForConditionalGeneration
"""


def refusal(config: HFConfig) -> UnsupportedArchitectureError:
    """The error of a checkpoint without a builder."""
    if config.model_type in ASSISTANTS:
        return UnsupportedArchitectureError(_ASSISTANT, _ALONE)
    named = config.architecture or config.model_type
    if not named:
        return UnsupportedArchitectureError("config.json names no model class.", _OTHERS)
    why = REFUSED.get(config.model_type)
    reason = f" ({why})" if why else ""
    message = f"Models of the class {named} are not supported{reason}"
    if config.architecture in _LLAMA_CPP.split():
        return UnsupportedArchitectureError(f"{message}.", f"{_RUN_GGUF}. {OPTIMUM_HINT}")
    if config.architecture:
        message += ", and llama.cpp does not have them either"
    return UnsupportedArchitectureError(f"{message}.", f"{_OTHERS}. {OPTIMUM_HINT}")
