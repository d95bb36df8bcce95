"""Chi-square tests at 100,000 draws: the sampler, and rejection sampling with and without a drafter's distributions."""

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward.rejection import rejection_draws, target_probabilities
from config.speculation import EagleOptions, SpeculationOptions
from config.strategy import Strategy
from drafter.build import build_drafters
from drafter.protocol import BatchView, Drafter, Drafts
from models import ops
from policies.speculation.policy import FixedPolicy
from tests.engine.support import VOCAB, DrafterBase, logits_of, make_requests, options_of, rollouts
from tests.engine.support import drain as drain_engine
from tests.params import long
from tests.speculation.support import model_of

DRAWS = 100_000
TOKENS = 24
SAMPLINGS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 8, 1.0), (0.7, 0, 0.8), (1.0, 12, 0.9)]  # temperature, top-k, top-p
LEAST_P = 1e-4  # The draws are fixed by seeds: a test that passed once passes always.


def p_value(observed: Tensor, probability: Tensor) -> float:
    """Of counts [V] under `probability` [V]: the chi-square tail, rare tokens (fewer than 5 expected) as one.

    Tail of chi-square with k degrees of freedom at x: the regularised upper incomplete gamma Q(k / 2, x / 2)."""
    wanted = probability.double() * observed.sum()
    assert int(observed[wanted == 0].sum()) == 0, "drew what has no probability"
    common = wanted >= 5
    cells = [(observed[common].double(), wanted[common])]
    if float(wanted[~common].sum()) > 0:
        cells.append((observed[~common].sum().double()[None], wanted[~common].sum()[None]))
    seen, expected = (torch.cat(part) for part in zip(*cells, strict=True))
    statistic = ((seen - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    assert freedom > 0
    return float(torch.special.gammaincc(freedom, statistic / 2))


def target(seed: int, sampling: tuple[float, int, float], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [columns, V], cutoffs [columns], what is drawn from [columns, V]) of one random target."""
    temperature, top_k, top_p = sampling
    logits = 1.2 * torch.randn(columns, TOKENS, generator=torch.Generator().manual_seed(seed))
    each = torch.full((columns,), temperature)
    least = ops.cutoff(logits, each, torch.full((columns,), top_k), torch.full((columns,), top_p))
    kept = logits.double().masked_fill(logits < least[:, None], -torch.inf)
    return logits, least, (kept / temperature).softmax(1)


def keys_of(seed: int) -> Tensor:
    return torch.randint(0, 2**62, (DRAWS,), generator=torch.Generator().manual_seed(seed))


def test_the_p_value_is_the_chi_square_tail() -> None:
    # 5 % points of chi-square with 1, 2 and 10 degrees of freedom, from any table.
    for freedom, point in ((1, 3.841), (2, 5.991), (10, 18.307)):
        tail = torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(point / 2))
        assert float(tail) == pytest.approx(0.05, abs=2e-4)
    assert p_value(torch.tensor([500, 500]), torch.tensor([0.5, 0.5])) == 1.0
    assert p_value(torch.tensor([600, 400]), torch.tensor([0.5, 0.5])) < 1e-9


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("noise", ["of many keys", "of one key"])
def test_the_sampler_draws_from_the_target(sampling: tuple[float, int, float], noise: str) -> None:
    logits, least, probability = target(1, sampling, 1)
    many = noise == "of many keys"
    keys = keys_of(2) if many else torch.full((DRAWS,), 77)
    positions = torch.full((DRAWS,), 5) if many else torch.arange(DRAWS)
    temperature = torch.full((DRAWS,), sampling[0])
    tokens, logprobs, _ = ops.sample(logits.expand(DRAWS, -1), least.expand(DRAWS), temperature, keys, positions)
    counts = tokens.bincount(minlength=TOKENS)
    assert p_value(counts, probability[0]) > LEAST_P
    torch.testing.assert_close(logprobs, probability[0].log()[tokens].float(), rtol=1e-4, atol=1e-4)
    other = target(1, (sampling[0] * 1.05, *sampling[1:]), 1)[2][0]
    if sampling[2] == 1.0:  # The test tells a temperature five percent off.
        assert p_value(counts, other) < 1e-6


def drafter_rows(kind: str, probability: Tensor) -> Tensor:
    """q [V] of a drafter for a target that draws from `probability`."""
    generator = torch.Generator().manual_seed(9)
    if kind == "near":
        q = (probability.clamp(min=1e-4).log() + 0.7 * torch.randn(TOKENS, generator=generator)).softmax(0)
    elif kind == "far":
        q = torch.randn(TOKENS, generator=generator).mul(2).softmax(0).double()
    elif kind == "equal":
        q = probability.clone()
    else:  # few: a drafter that truncates more than the target
        q = torch.where(torch.arange(TOKENS) % 5 == 0, 1.0, 0.0).double()
    return (q / q.sum()).float()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", ["near", "few", "one-hot", *long("far", "equal")])
def test_rejection_sampling_draws_from_the_target(sampling: tuple[float, int, float], kind: str) -> None:
    """At both drafted places and behind them; and as many drafts stand as can: sum of min(p, q)."""
    logits, least, p = target(3, sampling, 3)
    generator = torch.Generator().manual_seed(4)
    q, drafts = None, torch.empty(DRAWS, 2, dtype=torch.int64)
    wanted = torch.empty(2, dtype=torch.float64)  # acceptance at either place
    if kind == "one-hot":
        drafts[:, 0], drafts[:, 1] = p[0].argmax(), p[1].argsort()[-2]
        wanted[:] = torch.stack((p[0, drafts[0, 0]], p[1, drafts[0, 1]]))
    else:
        rows = torch.stack([drafter_rows(kind, p[i]) for i in range(2)])
        for i in range(2):
            drafts[:, i] = rows[i].multinomial(DRAWS, replacement=True, generator=generator)
        q = rows.expand(DRAWS, 2, TOKENS)
        wanted[:] = torch.minimum(p[:2], rows.double()).sum(1)
    draws = rejection_draws(
        logits.expand(DRAWS, 3, TOKENS),
        least.expand(DRAWS, 3),
        torch.full((DRAWS,), sampling[0]),
        keys_of(5),
        torch.full((DRAWS,), 11),
        drafts,
        q,
    )
    first = draws[:, 0] == drafts[:, 0]
    second = first & (draws[:, 1] == drafts[:, 1])
    assert p_value(draws[:, 0].bincount(minlength=TOKENS), p[0]) > LEAST_P
    for standing, column in ((first, 1), (second, 2)):
        count = int(standing.sum())
        if count > 1000:
            assert p_value(draws[standing, column].bincount(minlength=TOKENS), p[column]) > LEAST_P
    accepted = float(first.double().mean())
    assert accepted == pytest.approx(float(wanted[0]), abs=5 * (0.25 / DRAWS) ** 0.5)
    given = float(second.sum() / first.sum())
    assert given == pytest.approx(float(wanted[1]), abs=5 * (0.25 / int(first.sum())) ** 0.5)


def test_a_wrong_claim_about_the_drafts_would_be_seen() -> None:
    """Power: drafts drawn from q, verified as if from another, do not give the target's distribution."""
    logits, least, p = target(3, SAMPLINGS[0], 2)
    q, claimed = drafter_rows("near", p[0]), drafter_rows("far", p[0])
    drafts = q.multinomial(DRAWS, replacement=True, generator=torch.Generator().manual_seed(4))[:, None]
    shape = (DRAWS, 2, TOKENS)
    arguments = (logits.expand(shape), least.expand(DRAWS, 2), torch.ones(DRAWS), keys_of(5), torch.zeros(DRAWS).long())
    for rows, honest in ((q, True), (claimed, False)):
        draws = rejection_draws(*arguments, drafts, rows.expand(DRAWS, 1, TOKENS))
        assert (p_value(draws[:, 0].bincount(minlength=TOKENS), p[0]) > LEAST_P) == honest


def test_at_temperature_0_rejection_sampling_is_greedy() -> None:
    logits, least, _ = target(6, (1.0, 0, 1.0), 3)
    best = logits.argmax(1)
    drafts = torch.stack((best[0].expand(2), torch.stack((best[1], (best[1] + 1) % TOKENS))), 1)
    draws = rejection_draws(
        logits.expand(2, 3, TOKENS),
        least.expand(2, 3),
        torch.zeros(2),
        keys_of(7)[:2],
        torch.zeros(2).long(),
        drafts,
        None,
    )
    assert draws[0].tolist() == best.tolist()
    assert draws[1, :2].tolist() == best[:2].tolist()
    one_hot = torch.nn.functional.one_hot(best[0], TOKENS).double()
    assert torch.equal(target_probabilities(logits[:1], least[:1], torch.zeros(1))[0], one_hot)


class Sampling(DrafterBase):
    """Draws chains from one distribution, with randomness of its own; or always drafts the same token (one-hot)."""

    def __init__(self, rows: Tensor | int) -> None:
        self.rows, self.generator = rows, torch.Generator().manual_seed(3)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        count, depth = len(batch.slots), strategy.depth
        counts = np.minimum(depth, batch.room)
        if isinstance(self.rows, int):
            return Drafts(np.full((count, depth), self.rows), counts)
        drawn = self.rows.multinomial(count * depth, replacement=True, generator=self.generator).view(count, depth)
        return Drafts(drawn.numpy(), counts, None, self.rows.expand(count, depth, -1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampled", "one-hot", "eagle"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [pytest.param(1.0, 0, 1.0, marks=pytest.mark.long), (0.7, 9, 0.95)]
)
def test_pairs_of_tokens_through_the_engine(
    tmp_path_factory: pytest.TempPathFactory, kind: str, temperature: float, top_k: int, top_p: float
) -> None:
    """Joint distribution of the first two tokens that were drafted, in 100,000 / 5 responses to one prompt."""
    count = DRAWS // 5
    model = model_of(tmp_path_factory.mktemp("pairs"), "llama")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    requests = make_requests(count, prompts=1, seed=8, max_new_tokens=4, **sampling)
    prompt = requests[0].prompt_tokens.tolist()

    def distribution(context: list[int]) -> Tensor:
        logits = logits_of(model, context)[-1:]
        least = ops.cutoff(logits, torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]))
        return target_probabilities(logits, least, torch.tensor([temperature]))[0]

    # The first token comes with the prompt and is never drafted: the pairs are those behind the most probable one.
    first = int(distribution(prompt).argmax())
    second = distribution([*prompt, first])
    q = (1.2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))).softmax(0)
    records: list[EngineStepRecord] = []
    shape = options_of(max_running=500, kv_tokens=65_536)
    drafter: Drafter = Sampling(q if kind == "sampled" else int(second.argmax()))
    if kind == "eagle":
        options = SpeculationOptions(
            verification="rejection", strategies=("eagle:2",), eagle=EagleOptions(path="random")
        )
        drafter = build_drafters(options, model, shape)["eagle"]
    core = NativeEngine(
        model,
        shape,
        drafters={"test": drafter},
        policy=FixedPolicy(Strategy.parse("test:2")),
        verification="rejection",
        steps=records,
    )
    core.submit(requests)
    responses = np.stack([rollout.tokens for rollout in rollouts(drain_engine(core)).values()])
    assert sum(record.drafted for record in records) > count
    assert sum(record.accepted for record in records) > count / 50
    pairs = responses[responses[:, 0] == first, 1:3]
    assert len(pairs) > 2000
    joint = torch.cat([second[t] * distribution([*prompt, first, t]) for t in range(VOCAB)])
    observed = torch.from_numpy(pairs[:, 0].astype(np.int64) * VOCAB + pairs[:, 1]).bincount(minlength=VOCAB**2)
    assert p_value(observed, joint) > LEAST_P
