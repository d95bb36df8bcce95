"""What captured graphs cost in GPU memory. Pure arithmetic over shapes; measures nothing, knows no allocator.

    footprint = sum of retained outputs + workspace of the pool + fixed bytes per graph

*Outputs* (logits, hidden states) are what a replay leaves behind. An engine that keeps a tensor per graph, as those
that TLT builds on do, pays for each; Paceline's graphs copy into one buffer, so only the largest counts. *Workspace*
is what a forward needs and gives back: graphs of one pool share it, and the largest decides.

Table 5 of TLT (Llama-3-8B, TP=4; 7.81, 30.39, 10.69 GB) follows from the outputs alone, under a set-up that the paper
does not print: SGLang's capture sizes for speculation up to 32 requests, 48 rows to verify, float32 logits, and four
strategies that differ in top-k (4, 6, 8, 10; Table 1). tests/policies/test_graph_plan.py holds it within 3 %. That
set-up was chosen to fit; bytes per row are those of the model. Fixed bytes per graph are an estimate until measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from policies.speculation.graph_plan import CapturePlan, GraphShape

GRAPH_FIXED_BYTES = 1 << 20  # nodes, parameters and launch state of one instantiated graph; an estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a decoder-only transformer decides its activations. `shards`: tensor-parallel ranks."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    logit_bytes: int = 2  # 4: logits are kept in float32
    shards: int = 1

    @property
    def output_row_bytes(self) -> int:
        """Logits (gathered over the ranks) and the hidden state of one row."""
        return self.vocab_size * self.logit_bytes + self.hidden_size * self.dtype_bytes

    @property
    def workspace_row_bytes(self) -> int:
        """The widest moment of one row: residual stream, gate and up in float32, logits before they are copied."""
        stream = 4 * self.hidden_size * self.dtype_bytes
        mlp = self.intermediate_size // self.shards * (2 * self.dtype_bytes + 4 * 4)
        logits = self.vocab_size // self.shards * self.dtype_bytes
        return stream + max(mlp, logits)

    def attention_bytes(self, batch: int, rows: int, context_tokens: int) -> int:
        """Attention without a paged kernel: keys and values of every request side by side, and an additive mask."""
        kv = 2 * self.num_kv_heads // min(self.shards, self.num_kv_heads) * self.head_dim
        groups = self.num_heads // self.num_kv_heads
        return batch * context_tokens * self.dtype_bytes * (kv + rows * groups)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Predicted bytes of all graphs of a plan."""

    graphs: int
    output_bytes: int
    workspace_bytes: int
    fixed_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.output_bytes + self.workspace_bytes + self.fixed_bytes


def predict(
    plan: CapturePlan,
    model: ModelShape,
    *,
    one_output: bool,
    contexts: Iterable[int] = (),
    shared_pool: bool = True,
    fixed_graph_bytes: int = GRAPH_FIXED_BYTES,
) -> Footprint:
    """The footprint of `plan`. one_output: graphs copy into one output buffer, else each keeps its own.

    contexts: each shape is captured once for each of these context lengths, with attention in torch; empty: once, with
    a paged attention kernel, which needs no workspace to speak of. Drafter and target share vocabulary and width.
    """
    lengths = tuple(contexts)
    outputs, workspaces = [], []
    for graph in plan.graphs:
        for context in lengths or (0,):
            outputs.append(graph.total_rows * model.output_row_bytes)
            workspaces.append(_workspace_bytes(graph, model, context))
    return Footprint(
        len(outputs),
        max(outputs, default=0) if one_output else sum(outputs),
        max(workspaces, default=0) if shared_pool else sum(workspaces),
        len(outputs) * fixed_graph_bytes,
    )


def _workspace_bytes(graph: GraphShape, model: ModelShape, context: int) -> int:
    attention = model.attention_bytes(graph.batch, graph.rows, context)
    return graph.total_rows * model.workspace_row_bytes + attention
