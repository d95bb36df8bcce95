"""The GPU memory of captured graphs. Pure arithmetic over shapes; measures nothing, models no allocator.

    footprint = sum of retained outputs + workspace of the pool + fixed bytes per graph

*Outputs* are what a replay leaves in memory. An engine that keeps logits and hidden states per graph, like those that
TLT builds on, pays for each. Paceline's graphs draw tokens themselves and copy hidden states into one buffer, so logits
are workspace and only the largest graph counts. *Workspace* is what a forward needs temporarily. Graphs of one pool
share it, so the largest decides. Paged attention keeps partial sums of its splits of the context, up to a limit.

Table 5 of TLT (Llama-3-8B, TP=4; 7.81, 30.39, 10.69 GB) follows from the outputs alone, under a set-up that the paper
does not state: SGLang's capture sizes for speculation up to 32 requests, 48 rows to verify, float32 logits, and four
strategies that differ in top-k (4, 6, 8, 10; Table 1). tests/policies/test_graph_plan.py checks it within 3 %. This
set-up was chosen to fit; bytes per row are those of the model. Fixed bytes per graph are an estimate until measured.
"""

from dataclasses import dataclass

from config.network import Network
from policies.speculation.graph_plan import CapturePlan

_SPLIT_TOKENS, _PARTIAL_SUM_BYTES = 256, 256 << 20  # as in models.ops.triton
_LOGIT_BYTES = 4  # float32
GRAPH_FIXED_BYTES = 1 << 20  # nodes, parameters and launch state of one instantiated graph; an estimate


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


NOTHING_CAPTURED = Footprint(0, 0, 0, 0)


def predict(
    plan: CapturePlan,
    net: Network,
    *,
    drawing: bool,
    context_tokens: int = 0,
    shared_pool: bool = True,
    shards: int = 1,
    fixed_graph_bytes: int = GRAPH_FIXED_BYTES,
) -> Footprint:
    """The footprint of `plan` on one of `shards` tensor-parallel ranks.

    drawing: graphs draw tokens and share one buffer for hidden states, like Paceline's; otherwise each keeps logits and
    hidden states. context_tokens: the longest context. Drafter and target share vocabulary and width."""
    rows = [graph.total_rows for graph in plan.graphs]
    most, total = max(rows, default=0), sum(rows)
    workspaces = [
        (
            _drawing_bytes(net, shards, graph.total_rows, graph.drawn_rows)
            if drawing
            else graph.total_rows * _workspace_row_bytes(net, shards)
        )
        + _partial_sum_bytes(net, shards, graph.total_rows, context_tokens)
        for graph in plan.graphs
    ]
    graphs, passes = (plan.captures, plan.passes) if drawing else (len(rows), len(rows))
    return Footprint(
        graphs,
        most * kept_row_bytes(net) if drawing else total * output_row_bytes(net),
        max(workspaces, default=0) if shared_pool else sum(workspaces),
        passes * fixed_graph_bytes,
    )


def output_row_bytes(net: Network) -> int:
    """Return the bytes of one row's logits (gathered over the ranks) and hidden state."""
    return net.vocab_size * _LOGIT_BYTES + kept_row_bytes(net)


def kept_row_bytes(net: Network) -> int:
    """Return the bytes kept of a row whose token is drawn in the graph: its hidden state."""
    return net.hidden_size * net.item_bytes


def _workspace_row_bytes(net: Network, shards: int) -> int:
    """Return the peak bytes of one row in torch's operations: residual stream, gate and up in float32, logits."""
    mlp = net.intermediate_size // shards * (2 * net.item_bytes + 4 * 4)
    return _widest(net, shards, mlp, net.item_bytes)


def _drawing_bytes(net: Network, shards: int, rows: int, drawn_rows: int) -> int:
    """Return the peak bytes of fused kernels that also draw: residual stream, then MLP or float32 logits."""
    mlp = 3 * net.intermediate_size // shards * net.item_bytes
    logits = net.vocab_size // shards * _LOGIT_BYTES
    return 4 * rows * kept_row_bytes(net) + max(rows * mlp, drawn_rows * logits)


def _widest(net: Network, shards: int, mlp: int, logit_bytes: int) -> int:
    return 4 * kept_row_bytes(net) + max(mlp, net.vocab_size // shards * logit_bytes)


def _partial_sum_bytes(net: Network, shards: int, rows: int, context_tokens: int) -> int:
    """Return the bytes of attention's partial sums over splits of the context. Above the limit, a program walks all
    splits."""
    splits = -(-context_tokens // _SPLIT_TOKENS)
    size_bytes = splits * rows * net.num_heads // shards * net.head_dim * 4
    return size_bytes if splits > 1 and size_bytes <= _PARTIAL_SUM_BYTES else 0
