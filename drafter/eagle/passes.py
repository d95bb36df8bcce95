"""The arithmetic of drafts on a device: passes of the drafter, draws, and trees between them, without the host.

Every shape follows from the draft's, and every address is fixed (frames, outputs, the cache, and `Passes.caught`, the
result of catching up). So the same calls run eagerly or in the capture of a graph. Computes what `EagleDrafter` does on
the CPU, to rounding; owns no graph and fills no frame.
"""

import torch
from torch import Tensor

from drafter.eagle.cache import EagleCache
from drafter.eagle.frames import Frame, Outputs
from drafter.eagle.model import Drafting, EagleModel, draft_logits
from drafter.eagle.shapes import DraftShape
from models import ops
from models.ops.triton import draft_operators, operators
from models.transformer import Transformer

Rows = dict[str, Tensor]


class Passes:
    """Passes of `model` for `target` through `cache`.

    max_context: most tokens of a request. most_draws: most rows drawn from at once. noise: draws have the target's
    noise; sampled, scale: see `EagleDrafter`.
    """

    def __init__(
        self,
        model: Drafting,
        target: Transformer,
        cache: EagleCache,
        max_context: int,
        most_draws: int,
        *,
        noise: bool,
        sampled: bool,
        scale: float,
    ) -> None:
        self._model, self._target, self._cache, self._max_context = model, target, cache, max_context
        self.noise, self.sampled, self._scale = noise, sampled, scale
        device = cache.keys.device
        # By slot of a batch: features of the last known position, and the head's input for them.
        features = self.features(cache.slots)
        self.caught = features, features if isinstance(model, EagleModel) else self.features(cache.slots)
        self._no_cutoff = torch.full((most_draws,), -torch.inf, device=device)
        self._angles = (model.rope or target.rope).table(device)  # made once, outside of any capture

    def features(self, rows: int, layers: int = 1) -> Tensor:
        """Return buffers for the target's outputs of `layers` layers at `rows` positions: zeros [rows, layers * H]."""
        weight = self._target.embed_tokens.weight
        return torch.zeros(rows, layers * weight.shape[1], dtype=weight.dtype, device=weight.device)

    def catch_up(self, frame: Frame, rows: Tensor) -> None:
        """Feed the target's outputs, rows [T, width], and keep the result of each request's last row."""
        tensors, size = frame.tensors, frame.size
        features = self._model.features(rows[: size.rows])
        found = self._pass(tensors["tokens"], features, tensors, tensors["tables"], size.rows)
        for out, place in {id(place): (out, place) for out, place in zip(found, self.caught, strict=True)}.values():
            torch.index_select(out, 0, tensors["last"], out=place[: size.requests])

    def draft(self, frame: Frame, plain: bool, outputs: Outputs) -> None:
        """Draft the frame's shape from the caught-up state. plain: nothing is truncated, and no temperature of sampled
        chains is 0."""
        shape = frame.size.shape
        assert shape is not None
        if shape.k > 1:
            self._tree(frame, shape, plain, outputs)
        else:
            self._chain(frame, shape, plain, outputs)

    def _pass(
        self, tokens: Tensor, features: Tensor, rows: Rows, tables: Tensor, most: int, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run rows [T], at most `most` per request. Returns features after them, and the head's input, [T, H]. Writes
        their K/V."""
        model, cache, block = self._model, self._cache, self._model.block
        config, norms = block.config, model.input_norms or (None, None)
        embedding = self._target.embed_tokens.weight
        joined = draft_operators.draft_inputs(tokens, embedding, features, *norms, config.rms_norm_eps)
        qkv, residual = model.enter(joined, features)
        q = operators.rope_write(
            qkv,
            self._angles.cos,
            self._angles.sin,
            rows["positions"],
            rows["slots"],
            None if block.q_norm is None else block.q_norm.weight,
            None if block.k_norm is None else block.k_norm.weight,
            config.rms_norm_eps,
            cache.keys,
            cache.values,
        )
        attended = operators.paged_attention(
            q,
            cache.keys,
            cache.values,
            tables,
            rows["offsets"],
            rows["lens"],
            mask,
            cache.block_tokens,
            most,
            self._max_context,
            q.shape[-1] ** -0.5,
        )
        out = block.o_proj(attended.view(len(attended), -1))
        normed, residual = ops.add_rms_norm(out, residual, block.mlp_norm.weight, block.mlp_norm.eps)
        return model.leave(block.down_proj(ops.swiglu(block.gate_up_proj(normed))), residual)

    def _chain(self, frame: Frame, shape: DraftShape, plain: bool, outputs: Outputs) -> None:
        (hidden, states), tables = (each[: shape.requests] for each in self.caught), frame.tensors["tables"]
        drawn: list[Tensor] = []
        scored: list[Tensor] = []
        for level in range(shape.levels):
            rows = frame.draft(level)
            if level:
                hidden, states = self._pass(drawn[-1].view(-1), hidden, rows, tables, 1)
            logits, cutoff = self._logits(states, rows, plain)
            if self.sampled:
                tokens, _, _ = ops.sample(logits, cutoff, rows["temperature"], rows["keys"], rows["noise_positions"])
                _distribution(logits, cutoff, rows, tokens, plain, outputs.soft(shape)[level])
                drawn.append(tokens[:, None])
            else:
                tokens, scores = self._top(logits, cutoff, rows, 1)
                drawn.append(tokens)
                scored.append(scores)
        tokens_out, _, scores_out = outputs.of(shape)
        torch.cat(drawn, dim=1, out=tokens_out)
        if scored:
            torch.cat(scored, dim=1, out=scores_out)

    def _tree(self, frame: Frame, shape: DraftShape, plain: bool, outputs: Outputs) -> None:
        requests, k, tables = shape.requests, shape.k, frame.tensors["tables"]
        hidden, states = (each[:requests] for each in self.caught)
        rows = frame.draft(0)
        drawn = self._top(*self._logits(states, rows, plain), rows, k)
        nodes = outputs.nodes(shape)
        newest: Tensor | None = None
        paths: Tensor | None = None
        out, first = hidden[:, None], 0
        fed = (drawn[0].new_empty(requests, 0), out[:, :0], drawn[0].new_empty(requests, 0, 0, dtype=torch.uint8))
        for level in range(1, shape.levels):
            rows = frame.draft(level)
            *fed, newest, paths = draft_operators.tree_feed(*drawn, newest, paths, first, k, out, *fed, *nodes)
            first += shape.candidates(level - 1)
            found = self._pass(
                fed[0].view(-1), fed[1].flatten(0, 1), rows, tables, shape.fed(level), fed[2].flatten(0, 1)
            )
            out, states = (each.view(requests, shape.fed(level), -1) for each in found)
            drawn = self._top(*self._logits(states[:, -k:].reshape(requests * k, -1), rows, plain), rows, k)
        draft_operators.tree_best(*drawn, newest, paths, first, *nodes, *outputs.of(shape))

    def _logits(self, states: Tensor, rows: Rows, plain: bool) -> tuple[Tensor, Tensor]:
        """Return logits [n, V], and the smallest logit that may be drawn, [n]."""
        logits = draft_logits(self._model, self._target, states)
        if plain:
            return logits, self._no_cutoff[: len(states)]
        return logits, ops.cutoff(logits, rows["temperature"], rows["top_k"], rows["top_p"])

    def _top(self, logits: Tensor, cutoff: Tensor, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best next tokens of each row and their log-probabilities, [n, k]."""
        return ops.sample_topk(
            logits,
            cutoff,
            rows["temperature"],
            rows["keys"],
            rows["noise_positions"],
            k,
            scale=self._scale,
            noise=self.noise,
        )


def _distribution(logits: Tensor, cutoff: Tensor, rows: Rows, tokens: Tensor, plain: bool, out: Tensor) -> None:
    """Write the distribution that `tokens` [n] were drawn from, float32 [n, V], to `out`; at temperature 0 it is
    one-hot."""
    scaled = logits.float() / rows["divisor"][:, None]
    if not plain:
        scaled = scaled.masked_fill(logits < cutoff[:, None], -torch.inf)
    torch.softmax(scaled, dim=1, out=out)
    if not plain:
        greedy = (rows["temperature"] == 0).float()[:, None]
        out.mul_(1 - greedy).scatter_add_(1, tokens[:, None], greedy)
