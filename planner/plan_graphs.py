"""`paceline plan-graphs`: the CUDA graphs that an engine of this configuration captures, and their memory.

Owns the table. Computes from the configuration and the model's config.json alone, so it works on any machine. The plan
is the engine's own (`policies.speculation.graph_plan`), and so is the plan that it is compared with.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from config.strategy import PLAIN, Strategy
from launch.config import Config
from launch.config.hub import require_shape
from launch.config.memory import drafters_of, gpu_costs
from launch.errors import UsageError
from models.config import ModelConfig, read_config
from models.manifest import ITEM_BYTES
from policies.roofline.graphs import Footprint, predict
from policies.speculation.build import build_policy
from policies.speculation.graph_plan import CapturePlan, batch_buckets, bucketed_plan, naive_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """Both plans of one engine, and their predicted footprints."""

    batches: tuple[int, ...]  # bucket i serves batches[i - 1] + 1 .. batches[i] running requests
    strategies: tuple[Strategy, ...]
    bucketed: CapturePlan
    naive: CapturePlan  # every strategy at every number of requests at which it may run
    bucketed_bytes: Footprint
    naive_bytes: Footprint


def graph_report(config: Config) -> GraphReport:
    """Return the plans of one engine, with every drafter that the configuration allows.

    Raises ModelConfigError for a model directory without a usable config.json, and UsageError for another backend.
    """
    engine, speculation = config.rollout.engine, config.speculation
    if engine.backend != "native":
        raise UsageError(
            f"rollout.engine.backend is {engine.backend}, which captures its graphs itself",
            remedy="set rollout.engine.backend=native",
        )
    require_shape(config.model.path)
    model = ModelConfig.from_hf(read_config(config.model.path))
    # As in NativeEngine: no sequence is longer than the cache plus one token.
    model_tokens = engine.max_model_tokens or model.max_position_embeddings
    max_tokens = min(model_tokens, engine.kv_tokens // engine.block_tokens * engine.block_tokens + 1)
    batches = batch_buckets(engine.max_running)
    trees = config.model.batch_invariant != "engine"  # as the engine builds it on a GPU
    policy = build_policy(speculation, drafters_of(config), trees=trees, costs=gpu_costs(config))
    reached = {n: tuple(policy.arms_at(n)) if policy else () for n in range(1, engine.max_running + 1)}
    strategies = tuple(dict.fromkeys(arm for arms in reached.values() for arm in arms))
    speculating = range(1, min(engine.max_running, speculation.running_limit) + 1)
    bucketed = bucketed_plan(reached.__getitem__, batches, chunk_tokens=engine.prefill_chunk_tokens)
    naive = CapturePlan(
        (
            *naive_plan([PLAIN], range(1, engine.max_running + 1)).graphs,
            *naive_plan([arm for arm in strategies if arm != PLAIN], speculating).graphs,
        )
    )
    net = replace(model, item_bytes=ITEM_BYTES[config.model.dtype])
    return GraphReport(
        batches=batches,
        strategies=strategies,
        bucketed=bucketed,
        naive=naive,
        bucketed_bytes=predict(bucketed, net, drawing=True, context_tokens=max_tokens),
        naive_bytes=predict(naive, net, drawing=False, context_tokens=max_tokens),
    )


def rendered(report: GraphReport) -> RenderableType:
    """Render the plan by batch bucket, and compare bucketed with naive."""
    arms = ", ".join(str(arm) for arm in report.strategies) or "none: plain decoding only"
    return Group(
        Text(f"strategies: {arms}"),
        _plan_table(report),
        Text(
            f"{report.bucketed.captures} graphs, captured when the engine starts, a drafter's with one for each number "
            "of requests to catch up; what draws with top-k or top-p when it comes up\n"
        ),
        _memory_table(report),
        Text(
            "rows: on average (t: trees, +: rows of prompts); naive: every strategy at every number of requests,"
            " outputs kept per graph\n"
            "predicted from shapes (docs/concepts/engine.md); used on CUDA only, with rollout.engine.cuda_graphs",
            style="dim",
        ),
    )


def _plan_table(report: GraphReport) -> Table:
    table = Table(title="Captured graphs, by running requests", title_justify="left")
    table.add_column("requests", justify="right")
    table.add_column("graph of", justify="right")
    table.add_column("target: rows per request")
    table.add_column("drafter")
    first = 1
    for batch in report.batches:
        served = str(batch) if first == batch else f"{first}-{batch}"
        drafts: dict[str, list[str]] = {}
        for arm in sorted(arm for at, arm in report.bucketed.drafts if at == batch):
            drafter, _, shape = str(arm).partition(":")
            drafts.setdefault(drafter, []).append(shape)
        text = " ".join(f"{drafter}:{','.join(shapes)}" for drafter, shapes in drafts.items()) or "-"
        table.add_row(served, str(batch), _rows(report.bucketed, batch), text)
        first = batch + 1
    return table


def _rows(plan: CapturePlan, batch: int) -> str:
    own = [graph for graph in plan.of("target") if graph.batch == batch]
    found = sorted((graph.rows, graph.tree) for graph in own if not graph.chunk)
    texts = [f"{rows}t" if tree else str(rows) for rows, tree in found]
    for rows in sorted({graph.rows for graph in own if graph.chunk}):
        chunks = [graph.chunk for graph in own if graph.chunk and graph.rows == rows]
        texts.append(f"{rows}+{min(chunks)}..{max(chunks)}")
    return " ".join(texts)


def _memory_table(report: GraphReport) -> Table:
    table = Table(title="Predicted memory", title_justify="left")
    table.add_column("plan")
    for name in ("graphs", "outputs", "workspace", "graphs themselves", "total"):
        table.add_column(name, justify="right")
    for name, footprint in (("bucketed", report.bucketed_bytes), ("naive", report.naive_bytes)):
        table.add_row(name, f"{footprint.graphs:,}", *_sizes(footprint))
    return table


def _sizes(footprint: Footprint) -> Iterable[str]:
    parts = footprint.output_bytes, footprint.workspace_bytes, footprint.fixed_bytes, footprint.total_bytes
    return [_size(part) for part in parts]


def _size(count: int) -> str:
    """Format as `512 MiB`, `7.8 GiB`."""
    return f"{count / 2**30:,.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:,.1f} MiB"
