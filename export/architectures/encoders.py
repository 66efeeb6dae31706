"""Encoders: BERT (MiniLM, BGE, E5), RoBERTa and XLM-R, ModernBERT, EmbeddingGemma; embedders and rerankers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from edgeinfer.bundle.embedding import EmbeddingUse
from edgeinfer.bundle.parts import DenseSpec, EncoderSpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import POSITIONS, TOKEN_TYPES
from edgeinfer.core.errors import UnsupportedArchitectureError
from edgeinfer.export.architectures.base import Architecture, Naming, common_spec
from edgeinfer.export.architectures.gemma import GEMMA3
from edgeinfer.export.architectures.tensors import TensorPlan, plan
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import OPTIMUM_HINT, HFConfig
from edgeinfer.export.source.sentence_transformers import Modules

_SCORING = "ForSequenceClassification"
# Position 0 of RoBERTa's table is that of the padding token, after which text begins.
_PADDED = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert")


@dataclass(frozen=True)
class EncoderArchitecture(Architecture):
    """A family of encoders. Names of the tables after the root of the embedding, and of the products behind the pooling
    and their norms, by which those of rerankers are found."""

    tables: tuple[tuple[str, str], ...] = ()
    embed_norm: str = ""
    dense: tuple[str, ...] = ()
    dense_norm: str = ""

    def tensors(self, config: HFConfig, spec: DecoderSpec, stored: Collection[str] = ()) -> tuple[TensorPlan, ...]:
        encoder, names = spec.encoder, self.naming
        assert encoder is not None, "its `read` describes one"
        plans = [
            plan("embed", (names.embed, (spec.vocab_size, spec.hidden_size))),
            *self._tables(spec, encoder),
        ]
        for layer in range(spec.num_layers):
            plans += self._layer(spec, layer, stored)
        if spec.pre_norm:
            plans.append(plan("final_norm", (names.final_norm, (spec.hidden_size,))))
            plans += [plan("final_norm_bias", (f"{names.final_norm[:-6]}bias", (spec.hidden_size,)))] * spec.norm_bias
        # ModernBERT's first layer reads embeddings that were normed.
        plans = [each for each in plans if each.name != "layers.0.attn_norm" or each.sources[0].name in stored]
        plans += self._dense(spec, encoder)
        refine = self.refine
        return tuple(plans if refine is None else (refine(config, spec, each) for each in plans))

    def _tables(self, spec: DecoderSpec, encoder: EncoderSpec) -> Iterator[TensorPlan]:
        root, hidden = self.naming.embed.removesuffix("weight").rpartition(".")[0].rpartition(".")[0], spec.hidden_size
        named = dict(self.tables)
        if encoder.positions:
            yield plan(POSITIONS, (f"{root}.{named[POSITIONS]}", (encoder.positions, hidden)))
        if encoder.token_types:
            yield plan(TOKEN_TYPES, (f"{root}.{named[TOKEN_TYPES]}", (encoder.token_types, hidden)))
        if encoder.embed_norm:
            yield plan("embed_norm", (f"{root}.{self.embed_norm}.weight", (hidden,)))
            if spec.norm_bias:
                yield plan("embed_norm_bias", (f"{root}.{self.embed_norm}.bias", (hidden,)))

    def _dense(self, spec: DecoderSpec, encoder: EncoderSpec) -> Iterator[TensorPlan]:
        inputs = spec.hidden_size
        for place, each in enumerate(encoder.dense):
            name = self.dense[place]
            yield plan(f"dense.{place}", (f"{name}.weight", (each.size, inputs)))
            if each.bias:
                yield plan(f"dense.{place}_bias", (f"{name}.bias", (each.size,)))
            if each.norm:
                yield plan(f"dense.{place}_norm", (f"{self.dense_norm}.weight", (each.size,)))
            inputs = each.size


def _labels(config: HFConfig) -> int:
    """Scores of a reranker; 0 of an embedder."""
    if not config.architecture.endswith(_SCORING):
        return 0
    named = config.get("id2label")
    count = len(named) if isinstance(named, dict) else config.integer("num_labels", 2)
    if count != 1:
        message = f"A classifier of {count} classes is not supported: rerankers give one score."
        raise UnsupportedArchitectureError(message, OPTIMUM_HINT)
    return count


def _read_bert(config: HFConfig, tied: bool) -> DecoderSpec:
    """Norms of sums, learned positions, biases everywhere, MLPs without a gate."""
    kind = config.get("position_embedding_type")
    if kind not in (None, "absolute"):
        raise UnsupportedArchitectureError(f"Positions of the kind {kind!r} are not supported.", OPTIMUM_HINT)
    padding = config.get("pad_token_id")
    first = (padding if isinstance(padding, int) else 1) + 1 if config.model_type in _PADDED else 0
    hidden, labels = config.integer("hidden_size"), _labels(config)
    encoder = EncoderSpec(
        positions=config.integer("max_position_embeddings"),
        first_position=first,
        token_types=config.integer("type_vocab_size", 2),
        embed_norm=True,
        sums_normed=True,
        dense=(DenseSpec(hidden, "tanh"), DenseSpec(labels)) if labels else (),
        scores=bool(labels),
    )
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias", "post_norm"), True)
    plain: dict[str, Any] = {"norm_eps": "layer_norm_eps", "norm": "layer", "pre_norm": False, "gated": False}
    rope = RopeSpec("default", 1e4, config.head_dim())
    still = (-1,) * config.integer("num_hidden_layers")
    spec = common_spec(config, True, **biases, **plain, rope=rope, rope_layers=still, encoder=encoder)
    return dataclasses.replace(spec, max_positions=encoder.positions - first)


def _read_modernbert(config: HFConfig, tied: bool) -> DecoderSpec:
    """Norms without biases before gated MLPs and attention, two rotations, two of three layers with a window."""
    hidden, labels, head_dim = config.integer("hidden_size"), _labels(config), config.head_dim()
    layers, every = config.integer("num_hidden_layers"), config.integer("global_attn_every_n_layers", 3)
    given = config.get("layer_types")
    slides = [kind == "sliding_attention" for kind in given] if given else [bool(i % every) for i in range(layers)]
    # A token sees half of the window on each side.
    window = config.integer("local_attention", 128) // 2
    whole = config.rope(head_dim, "full_attention")
    local = config.rope(head_dim, "sliding_attention")
    if not config.get("rope_parameters"):
        whole = RopeSpec("default", config.number("global_rope_theta", 160000.0), head_dim)
        local = RopeSpec("default", config.number("local_rope_theta", 10000.0), head_dim)
    for name in ("attention_bias", "mlp_bias", "norm_bias"):
        if config.flag(name):
            raise UnsupportedArchitectureError(f"ModernBERT with {name} is not supported yet.", OPTIMUM_HINT)
    head = DenseSpec(hidden, "gelu", bias=config.flag("classifier_bias"), norm=True)
    encoder = EncoderSpec(embed_norm=True, dense=(head, DenseSpec(labels)) if labels else (), scores=bool(labels))
    return common_spec(
        config,
        True,
        norm_eps="norm_eps",
        norm="layer",
        activation=config.activation("hidden_activation"),
        rope=whole,
        more_ropes=(local,),
        rope_layers=tuple(map(int, slides)),
        windows=tuple(window * slide for slide in slides),
        encoder=encoder,
    )


def _read_gemma(config: HFConfig, tied: bool) -> DecoderSpec:
    """Gemma 3's layers, whose tokens see the whole text, or half of the window on each side."""
    spec = GEMMA3.read(config, True)
    windows = tuple(window // 2 for window in spec.windows)
    return dataclasses.replace(spec, tied=True, windows=windows, encoder=EncoderSpec())


def _refine_gemma(config: HFConfig, spec: DecoderSpec, plan: TensorPlan) -> TensorPlan:
    """As for a decoder with a head of its own: nothing undoes the factor of the embedding but norms."""
    assert GEMMA3.refine is not None, "its norms are stored minus one"
    return GEMMA3.refine(config, dataclasses.replace(spec, tied=False), plan)


_BERT_NAMES = Naming(
    embed="model.embeddings.word_embeddings.weight",
    layer="model.encoder.layer.{layer}.",
    attn_post_norm="attention.output.LayerNorm.weight",
    mlp_post_norm="output.LayerNorm.weight",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
)
_BERT: dict[str, Any] = {
    "read": _read_bert,
    "naming": _BERT_NAMES,
    "tables": ((POSITIONS, "position_embeddings.weight"), (TOKEN_TYPES, "token_type_embeddings.weight")),
    "embed_norm": "LayerNorm",
}
_UNREAD = ("*position_ids", "*pooler.*", "cls.*", "lm_head.*", "*.rotary_emb.inv_freq")
BERT = EncoderArchitecture(
    classes=("BertModel", "BertForMaskedLM"), model_types=("bert",), roots=(("bert.", ""),), ignorable=_UNREAD, **_BERT
)
BERT_RERANKER = EncoderArchitecture(
    classes=("BertForSequenceClassification",),
    model_types=(),
    roots=(("bert.", ""),),
    ignorable=("*position_ids",),
    dense=("bert.pooler.dense", "classifier"),
    **_BERT,
)
ROBERTA = EncoderArchitecture(
    classes=("RobertaModel", "XLMRobertaModel", "RobertaForMaskedLM", "XLMRobertaForMaskedLM"),
    model_types=("roberta", "xlm-roberta"),
    roots=(("roberta.", ""),),
    ignorable=_UNREAD,
    **_BERT,
)
ROBERTA_RERANKER = EncoderArchitecture(
    classes=("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
    model_types=(),
    roots=(("roberta.", ""),),
    ignorable=("*position_ids",),
    dense=("classifier.dense", "classifier.out_proj"),
    **_BERT,
)
_MODERNBERT: dict[str, Any] = {
    "read": _read_modernbert,
    "naming": Naming(
        embed="model.embeddings.tok_embeddings.weight",
        final_norm="model.final_norm.weight",
        attn_norm="attn_norm.weight",
        mlp_norm="mlp_norm.weight",
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
    ),
    "embed_norm": "norm",
}
MODERNBERT = EncoderArchitecture(
    classes=("ModernBertModel", "ModernBertForMaskedLM"),
    model_types=("modernbert",),
    ignorable=("head.*", "decoder.*", "*.rotary_emb.inv_freq"),
    **_MODERNBERT,
)
MODERNBERT_RERANKER = EncoderArchitecture(
    classes=("ModernBertForSequenceClassification",),
    model_types=(),
    dense=("head.dense", "classifier"),
    dense_norm="head.norm",
    **_MODERNBERT,
)
EMBEDDING_GEMMA = EncoderArchitecture(
    classes=("Gemma3TextModel",), model_types=(), read=_read_gemma, naming=GEMMA3.naming, refine=_refine_gemma
)
# Embedders and rerankers, by their classes.
ENCODERS = (
    *(BERT, BERT_RERANKER, ROBERTA, ROBERTA_RERANKER),
    *(MODERNBERT, MODERNBERT_RERANKER, EMBEDDING_GEMMA),
)


def find_encoder(config: HFConfig) -> EncoderArchitecture | None:
    """The family of an encoder, by its model class or type; None where the config describes another model."""
    for family in ENCODERS:
        if family is EMBEDDING_GEMMA and config.get("use_bidirectional_attention") is not True:
            continue
        if config.architecture in family.classes or (
            not config.architecture and config.model_type in family.model_types
        ):
            return family
    return None


def with_modules(
    family: Architecture, spec: DecoderSpec, checkpoint: Checkpoint, modules: Modules | None
) -> tuple[Architecture, DecoderSpec]:
    """A family and its description with the length and the products that sentence-transformers' modules add."""
    if spec.encoder is None or spec.encoder.scores or modules is None:
        if modules is not None and modules.dense:
            raise UnsupportedArchitectureError("Products behind the pooling need an encoder.", OPTIMUM_HINT)
        return family, spec
    assert isinstance(family, EncoderArchitecture), "it is an encoder's"
    for folder, _ in modules.dense:
        checkpoint.include(folder)
    encoder = dataclasses.replace(spec.encoder, dense=tuple(dense for _, dense in modules.dense))
    most = min(spec.max_positions, modules.max_tokens or spec.max_positions)
    family = dataclasses.replace(family, dense=tuple(f"{folder}/linear" for folder, _ in modules.dense))
    return family, dataclasses.replace(spec, encoder=encoder, max_positions=most)


def use_of(config: HFConfig, spec: DecoderSpec, modules: Modules | None) -> EmbeddingUse | None:
    """How texts become vectors or scores; None where nothing says that the model is for that."""
    if spec.encoder is not None and spec.encoder.scores:
        return EmbeddingUse("mean" if config.get("classifier_pooling") == "mean" else "cls", normalize=False)
    if modules is not None:
        return modules.use
    return None if spec.encoder is None else EmbeddingUse()
