"""What captured graphs cost in GPU memory. Pure arithmetic over shapes; measures nothing, knows no allocator.

    footprint = sum of retained outputs + workspace of the pool + fixed bytes per graph

*Outputs* are what a replay leaves behind. An engine that keeps logits and hidden states per graph, as those that TLT
builds on do, pays for each; Paceline's graphs draw tokens themselves and copy hidden states into one buffer, so logits
are workspace and only the largest graph counts. *Workspace* is what a forward needs and gives back: graphs of one pool
share it, and the largest decides. Paged attention keeps partial sums of its splits of the context, up to a limit.

Table 5 of TLT (Llama-3-8B, TP=4; 7.81, 30.39, 10.69 GB) follows from the outputs alone, under a set-up that the paper
does not print: SGLang's capture sizes for speculation up to 32 requests, 48 rows to verify, float32 logits, and four
strategies that differ in top-k (4, 6, 8, 10; Table 1). tests/policies/test_graph_plan.py holds it within 3 %. That
set-up was chosen to fit; bytes per row are those of the model. Fixed bytes per graph are an estimate until measured.
"""

from dataclasses import dataclass

from policies.speculation.graph_plan import CapturePlan

_SPLIT_TOKENS, _PARTIAL_SUM_BYTES = 256, 256 << 20  # as in models.ops.triton
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
    logit_bytes: int = 4  # float32
    shards: int = 1

    @property
    def output_row_bytes(self) -> int:
        """Logits (gathered over the ranks) and the hidden state of one row."""
        return self.vocab_size * self.logit_bytes + self.kept_row_bytes

    @property
    def kept_row_bytes(self) -> int:
        """What is left of a row whose token is drawn in the graph: its hidden state."""
        return self.hidden_size * self.dtype_bytes

    @property
    def workspace_row_bytes(self) -> int:
        """The widest moment of one row in torch's operations: residual stream, gate and up in float32, logits."""
        mlp = self.intermediate_size // self.shards * (2 * self.dtype_bytes + 4 * 4)
        return self._widest(mlp, self.dtype_bytes)

    @property
    def drawing_row_bytes(self) -> int:
        """The widest moment of one row in fused kernels that draw too: residual stream, MLP, float32 logits."""
        return self._widest(3 * self.intermediate_size // self.shards * self.dtype_bytes, self.logit_bytes)

    def partial_sum_bytes(self, rows: int, context_tokens: int) -> int:
        """Of attention over splits of the context; where they were too many, a program goes through all splits."""
        splits = -(-context_tokens // _SPLIT_TOKENS)
        size_bytes = splits * rows * self.num_heads // self.shards * self.head_dim * 4
        return size_bytes if splits > 1 and size_bytes <= _PARTIAL_SUM_BYTES else 0

    def _widest(self, mlp: int, logit_bytes: int) -> int:
        return 4 * self.kept_row_bytes + max(mlp, self.vocab_size // self.shards * logit_bytes)


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
    drawing: bool,
    context_tokens: int = 0,
    shared_pool: bool = True,
    fixed_graph_bytes: int = GRAPH_FIXED_BYTES,
) -> Footprint:
    """The footprint of `plan`. drawing: graphs draw tokens and share one buffer for hidden states, as Paceline's; else
    each keeps logits and hidden states. context_tokens: the longest context. Drafter and target share vocabulary and
    width."""
    rows = [graph.total_rows for graph in plan.graphs]
    most, total = max(rows, default=0), sum(rows)
    row_bytes = model.drawing_row_bytes if drawing else model.workspace_row_bytes
    workspaces = [count * row_bytes + model.partial_sum_bytes(count, context_tokens) for count in rows]
    graphs, passes = (plan.captures, plan.passes) if drawing else (len(rows), len(rows))
    return Footprint(
        graphs,
        most * model.kept_row_bytes if drawing else total * model.output_row_bytes,
        max(workspaces, default=0) if shared_pool else sum(workspaces),
        passes * fixed_graph_bytes,
    )
