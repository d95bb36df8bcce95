"""The shape of a decoder-only transformer and of its drafter, as counts. Owns no name of any weight."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What of a model decides bytes and flops; `item_bytes` of a weight, an activation and a cached key."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    item_bytes: int = 2

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.query_size + 2 * self.kv_size

    @property
    def layer_parameters(self) -> int:
        hidden, inner = self.hidden_size, self.intermediate_size
        matrices = hidden * self.qkv_size + self.query_size * hidden + 3 * hidden * inner
        return matrices + 2 * hidden + self.qkv_bias * self.qkv_size + self.qk_norm * 2 * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Tied ones count once."""
        tables = 1 if self.tied else 2
        return self.num_layers * self.layer_parameters + tables * self.embedding_parameters + self.hidden_size

    @property
    def read_parameters(self) -> int:
        """Those that a step reads whatever it decodes: all but the embedding, of which it takes rows."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.hidden_size

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest tensor that is handed over at once, fused ones whole."""
        return max(self.embedding_parameters, 2 * self.intermediate_size * self.hidden_size)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.num_layers * self.kv_size * self.item_bytes

    @property
    def drafter_parameters(self) -> int:
        """Of an EAGLE drafter: one block and the projection that fuses its two inputs (EAGLE-3: up to three and a wider
        first matrix, about as much). Embedding and head are the target's."""
        return self.layer_parameters + 2 * self.hidden_size**2
