"""Sizes of a decoder-only transformer and of its drafter, for plans of memory, time and captured graphs.

Has no names of weights. models.config reads it from a config.json and adds what the computation needs."""

from dataclasses import dataclass, replace

from config.formats import FORMATS, LowBitFormat

_LARGEST_HEAD = 0.5  # of the bytes of a copy's layers; above it, the copy's head is read in eight bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The sizes that determine a model's bytes and flops; `item_bytes` of a weight, an activation and a cached key."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = False  # the head shares the embedding's weights
    qkv_bias: bool = False
    qk_norm: bool = False
    item_bytes: int = 2
    low_bits: LowBitFormat | None = None  # of the engine's matrices

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
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a layer's four products, in order."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return (self.qkv_size, hidden), (hidden, self.query_size), (2 * inner, hidden), (hidden, inner)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of a layer's matrices."""
        return sum(outputs * inputs for outputs, inputs in self.matrices)

    @property
    def layer_parameters(self) -> int:
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        return self.matrix_parameters + norms + self.qkv_bias * self.qkv_size

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of one of `matrices` as an engine stores it: values, float32 scales, zero points of one byte."""
        low = self.low_bits
        if low is None:
            return outputs * inputs * self.item_bytes
        of_groups = (4 if low.group is None else 5) * low.groups(inputs)
        return outputs * (inputs // (1 if low.bits == 8 else 2) + of_groups)

    @property
    def matrices_bytes(self) -> int:
        """Bytes of a layer's matrices."""
        return sum(self.matrix_bytes(*matrix) for matrix in self.matrices)

    @property
    def rounds_tokens(self) -> bool:
        """Whether the layers' products take quantised (8-bit) activations."""
        return self.low_bits is not None and self.low_bits.activations != "none"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, as an engine stores them."""
        saved = self.matrix_parameters * self.item_bytes - self.matrices_bytes
        return self.parameters * self.item_bytes - self.num_layers * saved

    @property
    def read_bytes(self) -> int:
        """Bytes of `read_parameters`, as an engine stores them."""
        saved = self.matrix_parameters * self.item_bytes - self.matrices_bytes
        return self.read_parameters * self.item_bytes - self.num_layers * saved

    def copied(self, form: LowBitFormat | None) -> "Network":
        """Return the network of the self-drafter: the same matrices, in `form` (None: unchanged)."""
        return self if form is None else replace(self, low_bits=form)

    @property
    def head_bits(self) -> LowBitFormat | None:
        """Format of the head of a low-bit copy, as `models.low_bit_copy` makes it; None: the model's own head."""
        if self.low_bits is None or not self.rounds_tokens:
            return None
        layers = self.num_layers * self.matrix_parameters // (1 if self.low_bits.bits == 8 else 2)
        return FORMATS["w8a8"] if self.embedding_parameters * self.item_bytes > _LARGEST_HEAD * layers else None

    @property
    def copy_bytes(self) -> int:
        """Bytes of a low-bit copy that are not shared with its model."""
        head = 0
        if (form := self.head_bits) is not None:
            head = replace(self, low_bits=form).matrix_bytes(self.vocab_size, self.hidden_size)
        return self.num_layers * self.matrices_bytes + head

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        tables = 1 if self.tied else 2
        return self.num_layers * self.layer_parameters + tables * self.embedding_parameters + self.hidden_size

    @property
    def read_parameters(self) -> int:
        """Parameters that every step reads in full: all but the embedding, of which only rows are read."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.hidden_size

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest tensor that is sent at once; a fused tensor is sent whole."""
        return max(self.embedding_parameters, 2 * self.intermediate_size * self.hidden_size)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token, all layers."""
        return 2 * self.num_layers * self.kv_size * self.item_bytes

    @property
    def drafter_parameters(self) -> int:
        """Parameters of an EAGLE drafter: one block and the projection that fuses its two inputs.

        EAGLE-3 has up to three inputs and a wider first matrix, about as much. Embedding and head are the target's."""
        return self.layer_parameters + 2 * self.hidden_size**2
