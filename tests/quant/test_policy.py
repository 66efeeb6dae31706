"""Which scheme each tensor gets."""

from __future__ import annotations

from edgeinfer.quant.policy import QuantPolicy, QuantScheme, default_group_size, default_head_bits, effective_block
from tests.quant.samples import form
from tests.recorded import check_recorded
from tests.tables import each_row


@each_row(
    ("k", "requested", "block"),
    [(896, 128, 128), (896, 32, 32), (160, 128, 32), (192, 128, 64), (172, 128, 32), (176, 64, 32)],
)
def test_block_is_the_largest_that_divides(k: int, requested: int, block: int) -> None:
    assert effective_block(k, requested) == block


def test_schemes_are_what_they_were() -> None:
    sizes = ((1, 64), (256, 256), (257, 256), (511, 2048), (1024, 1025), (2048, 2048), (4096, 96))
    names = ("embed", "head", "layers.0.attn.qkv", "layers.1.mlp.router", "layers.1.mlp.shared.down")
    found = {}
    for bits in (2, 3, 4, 8):
        for block in (32, 128):
            policy = QuantPolicy(bits, default_head_bits(bits, 10**7), block, keep_small=block == 32)
            found[f"{bits} {block}"] = [[form(policy.scheme(name, shape)) for shape in sizes] for name in names]
    heads = [default_head_bits(bits, 2**power) for bits in (2, 4, 8, 32) for power in range(16, 34)]
    groups = [default_group_size(2**power) for power in range(16, 34)]
    check_recorded("quant-policy", found | {"heads": heads, "groups": groups})


def test_vectors_stay_float() -> None:
    policy = QuantPolicy(4, 4, 32)
    assert policy.scheme("final_norm", (4096,)) is None
    assert policy.scheme("layers.0.attn.qkv_bias", (4096,)) is None


def test_vocabulary_matrices_have_bits_of_their_own() -> None:
    policy = QuantPolicy(4, 8, 32)
    assert policy.scheme("embed", (1000, 1000)) == QuantScheme(8, 32)
    assert policy.scheme("head", (1000, 1000)) == QuantScheme(8, 32)
    assert policy.scheme("layers.0.mlp.down", (1024, 1024)) == QuantScheme(4, 32)


@each_row(("bits", "wider"), [(2, 8), (3, 8), (4, 8), (8, None)])
def test_small_linear_layers_stay_wider(bits: int, wider: int | None) -> None:
    shape = (256, 256)
    kept = QuantPolicy(bits, 4, 32).scheme("layers.0.attn.out", shape)
    assert (kept.bits if kept else None) == wider
    forced = QuantPolicy(bits, 4, 32, keep_small=False).scheme("layers.0.attn.out", shape)
    assert forced is not None
    assert forced.bits == bits


def test_large_eight_bit_matrices_have_no_zero_points() -> None:
    policy = QuantPolicy(8, 8, 32)
    large, medium = policy.scheme("layers.0.mlp.down", (2048, 2048)), policy.scheme("layers.0.mlp.down", (512, 512))
    assert large is not None and medium is not None
    assert (large.symmetric, medium.symmetric) == (True, False)


def test_thirty_two_bits_quantize_nothing() -> None:
    policy = QuantPolicy(32, 32, 32)
    assert policy.scheme("layers.0.mlp.down", (2048, 2048)) is None
    assert policy.scheme("embed", (2048, 2048)) is None
