"""Shapes of public models by name, from their config.json. Owns the table."""

from config.network import Network


def _shape(sizes: tuple[int, int, int, int, int, int, int], *, tied: bool = False, qkv_bias: bool = False) -> Network:
    vocab, hidden, inner, layers, heads, kv_heads, head = sizes
    return Network(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        tied=tied,
        qkv_bias=qkv_bias,
    )


# vocabulary, hidden, intermediate, layers, heads, key and value heads, head dimension
SHAPES: dict[str, Network] = {
    "Qwen2.5-0.5B": _shape((151936, 896, 4864, 24, 14, 2, 64), tied=True, qkv_bias=True),
    "Qwen2.5-1.5B": _shape((151936, 1536, 8960, 28, 12, 2, 128), tied=True, qkv_bias=True),
    "Qwen2.5-3B": _shape((151936, 2048, 11008, 36, 16, 2, 128), tied=True, qkv_bias=True),
    "Qwen2.5-7B": _shape((152064, 3584, 18944, 28, 28, 4, 128), qkv_bias=True),
    "Qwen2.5-14B": _shape((152064, 5120, 13824, 48, 40, 8, 128), qkv_bias=True),
    "Qwen2.5-32B": _shape((152064, 5120, 27648, 64, 40, 8, 128), qkv_bias=True),
    "Llama-3.1-8B": _shape((128256, 4096, 14336, 32, 32, 8, 128)),
    "Llama-3.3-70B": _shape((128256, 8192, 28672, 80, 64, 8, 128)),
}
