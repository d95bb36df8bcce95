"""Drafters of the user's own: they draft, they never change a token, and their mistakes end with their own use."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from actors.engine.capabilities import BACKENDS
from actors.engine.native.engine import NativeEngine
from config.catalogue import at_hand
from config.import_path import OwnCodeError
from config.rollout import EngineOptions
from config.speculation import OwnDrafterOptions, SpeculationOptions
from config.strategy import Strategy
from contracts.rollout import DrafterFailed, Event, Request, Rollout
from drafter.build import build_drafters
from drafter.own import OwnDrafter, try_drafter
from drafter.protocol import BatchView, Drafts
from examples.own_parts.drafter import Echo
from launch.config import Issue
from launch.config.check import check_values
from launch.config.load import load_config
from models.transformer import Transformer
from policies.speculation.build import build_policy
from tests.engine.support import assert_same, engine, make_requests, options_of, rollouts, run, tiny_model

MODULE = """
from pathlib import Path
import numpy as np
from drafter.protocol import Drafter, Drafts

class Guess(Drafter):
    def __init__(self, slots, max_tokens, token=7):
        self.token, self.texts = token, 0

    def propose(self, batch, strategy):
        size = len(batch.slots)
        return Drafts(np.full((size, strategy.depth), self.token), np.full(size, strategy.depth))

    def remember(self, prompts, responses):
        self.texts += len(responses)

    def save(self, directory):
        Path(directory, "texts").write_text(str(self.texts))

    def load(self, directory):
        self.texts = int(Path(directory, "texts").read_text())

class Raises(Guess):
    def propose(self, batch, strategy):
        raise LookupError("no idea")

class Late(Guess):
    calls = 0

    def propose(self, batch, strategy):
        self.calls += 1
        return super().propose(batch, strategy) if self.calls < 5 else None

class TooMany(Guess):
    def propose(self, batch, strategy):
        return Drafts(np.zeros((len(batch.slots), 2), np.int64), np.full(len(batch.slots), 3))

class Floats(Guess):
    def propose(self, batch, strategy):
        return Drafts(np.zeros((len(batch.slots), 2)), np.ones(len(batch.slots), np.int64))

class Few(Guess):
    def propose(self, batch, strategy):
        return Drafts(np.zeros((1, 2), np.int64), np.ones(1, np.int64))

class Writes(Guess):
    def propose(self, batch, strategy):
        batch.history[:] = 0

class Ends(Guess):
    def end(self, slot, tokens, prompt_length, finished):
        raise KeyError(slot)

class Bare:
    def __init__(self, slots, max_tokens):
        pass

    def propose(self, batch, strategy):
        return None

class Argless(Drafter):
    pass
"""


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("drafters")
    (folder / "user_drafters.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def speculation(name: str, *strategies: str, **arguments: object) -> SpeculationOptions:
    one = {"name": "own", "function": f"user_drafters:{name}", "arguments": arguments}
    return SpeculationOptions.model_validate({"drafters": (one,), "strategies": strategies or ("own:3",)})


def drafted(
    model: Transformer, options: SpeculationOptions, requests: Sequence[Request]
) -> tuple[dict[int, Rollout], list[DrafterFailed]]:
    """The rollouts of an engine that drafts so in every step, and the drafters that failed."""
    options = options.model_copy(update={"mode": "fixed"})
    sizes = options_of(max_running=4)
    drafters = build_drafters(options, model, sizes)
    core = NativeEngine(model, sizes, drafters=drafters, policy=build_policy(options, list(drafters)))
    core.submit(requests)
    events: list[Event] = []
    while core.has_work:
        events += core.step()
    return rollouts(events), [event for event in events if isinstance(event, DrafterFailed)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Guess", ""),
        ("Raises", r"raised in propose: LookupError: no idea \(.*user_drafters\.py:\d+\)"),
        ("Late", "proposed NoneType, not Drafts"),
        ("TooMany", "proposed counts outside of 0 to 2, the width of its tokens"),
        ("Floats", "proposed tokens that are no integer array of 2 dimension"),
        ("Few", r"proposed tokens for 1 of \d requests"),
        ("Writes", "raised in propose: ValueError: assignment destination is read-only"),
        ("Ends", "KeyError"),
    ],
)
def test_no_token_depends_on_it_and_its_mistake_is_an_event(tmp_path: Path, name: str, said: str) -> None:
    model, requests = tiny_model(tmp_path), make_requests(10, prompts=4, seed=3, max_new_tokens=24)
    expected = run(engine(model, max_running=4), requests)
    found, failed = drafted(model, speculation(name), requests)
    assert_same(found, expected)
    assert len(failed) == bool(said)
    for event in failed:
        assert (event.name, event.final) == ("own", True)
        assert event.reason.startswith("OwnCodeError: rollout.speculation.drafters, own: ") or name == "Ends"
        assert re.search(said, event.reason)


def test_a_token_outside_of_the_vocabulary_switches_it_off(tmp_path: Path) -> None:
    model, requests = tiny_model(tmp_path), make_requests(6, seed=1)
    found, (failed,) = drafted(model, speculation("Guess", token=61), requests)
    assert_same(found, run(engine(model, max_running=4), requests))
    assert failed.reason.endswith("user_drafters:Guess proposed token 61; the vocabulary has 61")


def test_the_example_drafts_what_followed_before_and_is_accepted_where_texts_repeat(tmp_path: Path) -> None:
    history = np.array([[5, 6, 7, 8, 5, 6, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]], np.int32)
    two = np.arange(2)
    view = BatchView(
        request_ids=two, prompt_ids=two, slots=two, history=history, lengths=np.array([6, 3]),
        prompt_lengths=np.ones(2, np.int64), noise_keys=two, temperatures=np.ones(2, np.float32), vocab_size=9,
        top_k=np.zeros(2, np.int64), top_p=np.ones(2, np.float32), room=np.full(2, 8),
    )  # fmt: skip
    drafts: Drafts = Echo(2, 8).propose(view, Strategy("echo", 3))
    assert drafts.counts.tolist() == [3, 0]
    assert drafts.tokens[0].tolist() == [7, 8, 5]
    assert Echo(2, 8, window=4).propose(view, Strategy("echo", 3)).counts.tolist() == [0, 0]
    model, requests = tiny_model(tmp_path), make_requests(4, seed=2, max_new_tokens=80, temperature=0.05)
    echo = OwnDrafterOptions(name="own", function="examples.own_parts.drafter:Echo")
    options = SpeculationOptions(drafters=(echo,), strategies=("own:3",))
    found, failed = drafted(model, options, requests)
    assert_same(found, run(engine(model, max_running=4), requests))
    assert failed == []
    assert sum(rollout.verifications for rollout in found.values()) < sum(len(r.tokens) for r in found.values())


def test_its_state_has_a_folder_of_its_own(tmp_path: Path) -> None:
    options = speculation("Guess").drafters[0]
    first, second = OwnDrafter(options, 4, 64), OwnDrafter(options, 4, 64)
    first.remember([], [np.zeros(3, np.int32)] * 5)
    second.load(str(tmp_path))
    first.save(str(tmp_path))
    assert (tmp_path / "own" / "texts").read_text() == "5"
    second.load(str(tmp_path))
    second.save(str(tmp_path / "again"))
    assert (tmp_path / "again" / "own" / "texts").read_text() == "5"
    empty = OwnDrafter(options.model_copy(update={"function": "examples.own_parts.drafter:Echo"}), 4, 64)
    empty.save(str(tmp_path / "empty"))
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bare", "lacks begin, end, new_target, remember, save, load: derive it from paceline.extend.Drafter"),
        ("Argless", "cannot be made with slots and max_tokens: TypeError"),
        ("Missing", "has no 'Missing'"),
        ("Raises", "raised in propose: LookupError"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_a_run(name: str, said: str) -> None:
    with pytest.raises(OwnCodeError, match=f"rollout.speculation.drafters, own: .*{said}"):
        try_drafter("own", f"user_drafters:{name}", {})


def test_it_stands_beside_the_built_in_ones(tmp_path: Path) -> None:
    model, sizes = tiny_model(tmp_path), EngineOptions(max_running=3, kv_tokens=512)
    options = speculation("Guess").model_copy(update={"strategies": None})
    assert at_hand(options)[-1] == "own"
    drafters = build_drafters(options, model, sizes)
    assert list(drafters)[-1] == "own"
    policy = build_policy(options, list(drafters))
    assert policy is not None
    assert {Strategy("own", 4), Strategy("own", 2), Strategy("own", 8)} <= set(policy.arms_at(1))
    assert list(build_drafters(speculation("Guess"), model, sizes)) == ["own"]
    assert list(build_drafters(speculation("Guess", "suffix:4"), model, sizes)) == ["suffix"]
    with pytest.raises(ValueError, match=r"names the drafter 'other'; there are suffix, .*, own, and 'plain'"):
        build_drafters(speculation("Guess", "other:4"), model, sizes)


def faults(options: SpeculationOptions, backend: str = "native") -> list[Issue]:
    config = load_config(Path("examples/guess_and_check/config.yaml"), ["drafter.train=false"]).config
    engine_options = config.rollout.engine.model_copy(update={"backend": backend})
    rollout = config.rollout.model_copy(update={"speculation": options, "engine": engine_options})
    found = check_values(config.model_copy(update={"rollout": rollout}))
    return [issue for issue in found if issue.key.startswith("rollout.speculation")]


def test_where_it_cannot_run_and_what_it_may_be_called() -> None:
    assert faults(speculation("Guess")) == []
    assert faults(speculation("Guess", "own:4", "suffix:8")) == []
    (unnamed,) = faults(speculation("Guess", "suffix:8"))
    assert (unnamed.key, unnamed.message) == (
        "rollout.speculation.drafters.0",
        "rollout.speculation.strategies names no own",
    )
    refused = faults(speculation("Guess"), "vllm")
    assert [i.message for i in refused if i.key == "rollout.speculation.drafters"] == [
        "the vllm engine drafts with its own drafters only"
    ]
    assert not BACKENDS["vllm"].own_drafters
    one = speculation("Guess").drafters[0]
    taken = one.model_copy(update={"name": "suffix"})
    (clash,) = faults(SpeculationOptions(drafters=(taken,)))
    assert clash.message == "suffix is taken"
    (twice,) = faults(SpeculationOptions(drafters=(one, one)))
    assert twice.message == "two drafters are called own"
