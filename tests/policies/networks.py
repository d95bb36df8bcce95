"""Qwen2.5's shapes, as the predictor takes them."""

from policies.roofline.network import Network

NETWORKS = {
    "0.5b": Network(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        tied=True,
        qkv_bias=True,
    ),
    "1.5b": Network(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        tied=True,
        qkv_bias=True,
    ),
    "7b": Network(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        qkv_bias=True,
    ),
}
