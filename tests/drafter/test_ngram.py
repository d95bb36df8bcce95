"""The n-gram drafter against a search of the texts by hand, and what it forgets."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.strategy import Strategy
from drafter.ngram import NgramDrafter
from drafter.protocol import BatchView, Drafts
from tests.native import needs_native

pytestmark = needs_native
SLOTS, MAX_TOKENS = 4, 48


def view(history: np.ndarray, lengths: dict[int, int], prompt_lengths: dict[int, int], room: int = 99) -> BatchView:
    """A batch of the slots in `lengths`, in its order."""
    slots = np.array(list(lengths), np.int64)
    count = len(slots)
    shown = history.view()
    shown.flags.writeable = False
    return BatchView(
        request_ids=slots,
        prompt_ids=slots,
        slots=slots,
        history=shown,
        lengths=np.array(list(lengths.values()), np.int64),
        prompt_lengths=np.array([prompt_lengths[int(s)] for s in slots], np.int64),
        noise_keys=slots,
        temperatures=np.ones(count, np.float32),
        vocab_size=100,
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count, np.float32),
        room=np.full(count, room, np.int64),
    )


@dataclass
class Text:
    tokens: list[int]
    seen: int = 0  # tokens whose contexts can be found
    state: str = "running"


@dataclass
class Group:
    """One prompt. `sightings`: (context end in text, text number) of every token, in the order of their entry."""

    prompt: list[int]
    texts: list[Text] = field(default_factory=list)
    waiting: list[Text] = field(default_factory=list)
    sightings: list[tuple[int, Text]] = field(default_factory=list)


class BruteForce:
    """Same rules, by reading everything. Contexts of responses may reach at most max_n tokens into the prompt."""

    def __init__(self, max_n: int, min_n: int) -> None:
        self.max_n, self.min_n = max_n, min_n
        self.groups: dict[tuple[int, ...], Group] = {}
        self.running: dict[int, tuple[Group, Text]] = {}

    def begin(self, slot: int, prompt: list[int], response: list[int]) -> None:
        group = self.groups.setdefault(tuple(prompt), Group(prompt))
        left = [t for t in group.texts if t.state == "left" and response and t.tokens == response[: len(t.tokens)]]
        text = left[0] if left else Text([])
        text.state = "running"
        if not left:
            group.texts.append(text)
        self.running[slot] = group, text
        self.learn(slot, response)

    def learn(self, slot: int, response: list[int]) -> None:
        group, text = self.running[slot]
        if len(response) > len(text.tokens):
            text.tokens = list(response)
            if text not in group.waiting:
                group.waiting.append(text)

    def end(self, slot: int, response: list[int], finished: bool) -> None:
        self.learn(slot, response)
        self.running.pop(slot)[1].state = "finished" if finished else "left"

    def enter(self, slot: int) -> None:
        group = self.running[slot][0]
        for text in group.waiting:
            group.sightings += [(place, text) for place in range(text.seen, len(text.tokens))]
            text.seen = len(text.tokens)
        group.waiting.clear()

    def matches(self, slot: int) -> list[tuple[int, Text | None, int]]:
        """(n, text or None for the prompt, place of the token that follows), best first; at most two siblings per n."""
        group, own = self.running[slot]
        tail = group.prompt[-self.max_n :]
        context = tail + own.tokens
        found: list[tuple[int, Text | None, int]] = []
        for n in range(min(self.max_n, len(context)), self.min_n - 1, -1):
            wanted = context[len(context) - n :]

            def fits(text: Text, place: int, n: int = n, wanted: list[int] = wanted, tail: list[int] = tail) -> bool:
                end = len(tail) + place
                return end >= n and (tail + text.tokens)[end - n : end] == wanted

            here = [(text, place) for place, text in reversed(group.sightings) if fits(text, place)]
            found += [(n, text, place) for text, place in here if text is own][:1]
            recent: list[Text] = []
            for text, place in here:  # the last places in the last two texts that had it, own included
                if not any(text is other for other in recent) and len(recent) < 2:
                    recent.append(text)
                    if text is not own:
                        found.append((n, text, place))
            ends = [p for p in range(len(group.prompt) - 1, n - 1, -1) if group.prompt[p - n : p] == wanted]
            found += [(n, None, place) for place in ends[:1]]
        return found

    def paths(self, slot: int, depth: int) -> list[list[int]]:
        group, own = self.running[slot]
        sequence = group.prompt + own.tokens
        paths = []
        for n, text, place in self.matches(slot):
            length = min(depth, 2) if n == 1 else depth
            if text is None or text is own:
                start = place if text is None else len(group.prompt) + place
                path: list[int] = []
                while len(path) < length:
                    path.append((sequence + path)[start + len(path)])
                paths.append(path)
            else:
                paths.append(text.tokens[place : place + length])
        return paths


def tree_of(paths: list[list[int]], strategy: Strategy) -> list[tuple[int, ...]]:
    """Paths from the root of every node, in the order they were entered."""
    nodes: list[tuple[int, ...]] = []
    for path in paths[: None if strategy.is_tree else 1]:
        if len(nodes) >= strategy.tokens_to_verify:
            break
        for i in range(len(path)):
            node = tuple(path[: i + 1])
            if node in nodes:
                continue
            siblings = [other for other in nodes if len(other) == len(node) and other[:-1] == node[:-1]]
            if len(siblings) >= strategy.top_k or len(nodes) >= strategy.tokens_to_verify:
                break
            nodes.append(node)
    return nodes


def paths_of(drafts: Drafts, r: int) -> list[tuple[int, ...]]:
    nodes: list[tuple[int, ...]] = []
    for i in range(int(drafts.counts[r])):
        parent = i - 1 if drafts.parents is None else int(drafts.parents[r, i])
        assert -1 <= parent < i
        nodes.append((*(nodes[parent] if parent >= 0 else ()), int(drafts.tokens[r, i])))
    return nodes


PROMPTS = [[0, 1, 0, 1, 2], [1], [2, 2, 2, 0]]
STRATEGIES = [Strategy("ngram", 4), Strategy("ngram", 1), Strategy("ngram", 3, 2, 6), Strategy("ngram", 4, 3, 4)]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "grow", "grow", "propose", "propose", "finish", "preempt"]),
        st.integers(0, SLOTS - 1),
        st.lists(st.integers(0, 2), min_size=1, max_size=5),
        st.integers(0, 3),
    ),
    min_size=5,
    max_size=60,
)


@given(ACTIONS, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=400, deadline=None)
def test_drafts_are_those_of_a_search_by_hand(actions: list, max_n: int, min_n: int) -> None:
    min_n = min(min_n, max_n)
    drafter, oracle = NgramDrafter(SLOTS, MAX_TOKENS, max_n=max_n, min_n=min_n), BruteForce(max_n, min_n)
    history = np.zeros((SLOTS, MAX_TOKENS), np.int32)
    lengths: dict[int, int] = {}
    prompts: dict[int, int] = {}
    preempted: list[tuple[list[int], list[int]]] = []
    for action, slot, tokens, number in actions:
        if action == "begin" and slot not in lengths:
            prompt, response = preempted.pop() if preempted and number else (PROMPTS[number % 3], [])
            text = prompt + response
            history[slot, : len(text)] = text
            lengths[slot], prompts[slot] = len(text), len(prompt)
            drafter.begin(slot, np.array(prompt, np.int32), np.array(response, np.int32))
            oracle.begin(slot, prompt, response)
        elif action == "grow" and slot in lengths and lengths[slot] + len(tokens) <= MAX_TOKENS:
            history[slot, lengths[slot] : lengths[slot] + len(tokens)] = tokens
            lengths[slot] += len(tokens)
        elif action in ("finish", "preempt") and slot in lengths:
            length, start = lengths.pop(slot), prompts.pop(slot)
            text = history[slot, :length].tolist()
            drafter.end(slot, history[slot, :length], start, action == "finish")
            oracle.end(slot, text[start:], action == "finish")
            if action == "preempt":
                preempted.append((text[:start], text[start:]))
        elif action == "propose" and lengths:
            strategy = STRATEGIES[number]
            batch = dict(sorted(lengths.items(), key=lambda item: (item[0] + number) % SLOTS))
            drafts = drafter.propose(view(history, batch, prompts), strategy)
            for s, length in batch.items():
                oracle.learn(s, history[s, prompts[s] : length].tolist())
                oracle.enter(s)
            for r, s in enumerate(batch):
                assert paths_of(drafts, r) == tree_of(oracle.paths(s, strategy.depth), strategy)


def test_a_sibling_that_runs_beside_is_seen_up_to_the_last_token() -> None:
    drafter = NgramDrafter(SLOTS, MAX_TOKENS)
    history = np.zeros((SLOTS, MAX_TOKENS), np.int32)
    history[0, :9] = [9, 8, 7, 1, 2, 3, 4, 5, 6]
    history[1, :6] = [9, 8, 7, 1, 2, 3]
    for slot in (0, 1):
        drafter.begin(slot, history[slot, :3], np.zeros(0, np.int32))
    drafts = drafter.propose(view(history, {1: 6, 0: 9}, {0: 3, 1: 3}), Strategy("ngram", 8))
    assert drafts.counts.tolist() == [3, 0]
    assert drafts.tokens[0, :3].tolist() == [4, 5, 6]


def test_a_tree_holds_the_continuations_of_the_last_two_siblings() -> None:
    drafter = NgramDrafter(SLOTS, MAX_TOKENS)
    history = np.zeros((SLOTS, MAX_TOKENS), np.int32)
    for slot, token in enumerate((30, 40, 50)):
        history[slot, :6] = [9, 8, 1, 2, token, token + 1]
    history[3, :4] = [9, 8, 1, 2]
    for slot in range(4):
        drafter.begin(slot, history[slot, :2], np.zeros(0, np.int32))
    batch = view(history, {0: 6, 1: 6, 2: 6, 3: 4}, dict.fromkeys(range(4), 2))
    assert paths_of(drafter.propose(batch, Strategy("ngram", 2)), 3) == [(50,), (50, 51)]
    wide = drafter.propose(batch, Strategy("ngram", 2, 3, 9))
    assert paths_of(wide, 3) == [(50,), (50, 51), (40,), (40, 41)]
    assert paths_of(drafter.propose(batch, Strategy("ngram", 2, 3, 3)), 3) == [(50,), (50, 51), (40,)]


def test_room_bounds_the_draft_and_a_repetition_goes_on() -> None:
    drafter = NgramDrafter(SLOTS, MAX_TOKENS)
    history = np.zeros((SLOTS, MAX_TOKENS), np.int32)
    history[0, :8] = [7, 5, 3, 4, 5, 3, 4, 5]
    drafter.begin(0, history[0, :1], np.zeros(0, np.int32))
    for room, wanted in ((99, [3, 4, 5, 3, 4, 5]), (2, [3, 4]), (0, [])):
        drafts = drafter.propose(view(history, {0: 8}, {0: 1}, room), Strategy("ngram", 6))
        assert drafts.tokens[0, : drafts.counts[0]].tolist() == wanted


def test_rollouts_of_other_workers_serve_prompts_that_run_here() -> None:
    drafter = NgramDrafter(SLOTS, MAX_TOKENS)
    prompt, other = np.array([1, 2, 3], np.int32), np.array([3, 2, 1], np.int32)
    history = np.zeros((SLOTS, MAX_TOKENS), np.int32)
    history[0, :5] = [1, 2, 3, 4, 5]
    drafter.begin(0, prompt, np.zeros(0, np.int32))
    drafter.remember([prompt, other], [np.array([4, 5, 6, 7], np.int32), np.array([1], np.int32)])
    drafts = drafter.propose(view(history, {0: 5}, {0: 3}), Strategy("ngram", 4))
    assert drafts.tokens[0, : drafts.counts[0]].tolist() == [6, 7]
    assert drafter.groups == 1


def sample(drafter: NgramDrafter, prompt: int, seed: int, tokens: int = 1000) -> None:
    """One request of `tokens` random tokens, proposed for at its end."""
    text = np.random.default_rng(seed).integers(0, 50, tokens).astype(np.int32)
    text[0] = prompt
    drafter.begin(0, text[:1], np.zeros(0, np.int32))
    history = np.zeros((1, 1000), np.int32)
    history[0, :tokens] = text
    drafter.propose(view(history, {0: tokens}, {0: 1}), Strategy("ngram", 4))
    drafter.end(0, text, 1, True)


def test_memory_is_bounded_and_the_least_recently_used_prompts_leave() -> None:
    limit = 1 << 20
    drafter = NgramDrafter(1, 1000, max_bytes=limit)
    for prompt in range(40):
        sample(drafter, prompt, prompt)
        assert drafter.bytes <= limit
    assert 2 <= drafter.groups < 40
    kept = drafter.groups
    sample(drafter, 39, 99)  # the last prompt is there: no new group
    assert drafter.groups <= kept
    assert drafter.bytes <= 350 * 1000 * (drafter.groups + 1)


def test_of_one_prompt_the_last_responses_stay() -> None:
    drafter = NgramDrafter(1, 1000, kept_texts=2)
    sizes = []
    for seed in range(30):
        sample(drafter, 7, seed)
        sizes.append(drafter.bytes)
    assert drafter.groups == 1
    assert max(sizes[10:]) <= max(sizes[:10])
    # The newest is found, the oldest is not.
    for seed, known in ((29, True), (0, False)):
        text = np.random.default_rng(seed).integers(0, 50, 1000).astype(np.int32)
        text[0] = 7
        history = text[None].copy()
        drafter.begin(0, text[:1], np.zeros(0, np.int32))
        drafts = drafter.propose(view(history, {0: 500}, {0: 1}), Strategy("ngram", 8))
        assert (drafts.tokens[0, : drafts.counts[0]].tolist() == text[500:508].tolist()) == known
        drafter.end(0, text[:1], 1, False)


def test_prompts_that_nobody_samples_leave_after_some_versions() -> None:
    drafter = NgramDrafter(2, 1000, kept_versions=2)
    drafter.begin(0, np.array([5], np.int32), np.zeros(0, np.int32))
    drafter.begin(1, np.array([6], np.int32), np.zeros(0, np.int32))
    drafter.end(1, np.array([6, 1, 2], np.int32), 1, True)
    for version, groups in ((1, 2), (2, 2), (3, 1), (9, 1)):  # the running one stays
        drafter.new_target(version)
        assert drafter.groups == groups


def test_what_the_engine_must_not_ask() -> None:
    drafter = NgramDrafter(SLOTS, MAX_TOKENS)
    history = np.zeros((SLOTS, MAX_TOKENS), np.int32)
    with pytest.raises(ValueError, match="without a request"):
        drafter.propose(view(history, {2: 5}, {2: 1}), Strategy("ngram", 4))
    with pytest.raises(ValueError, match="this drafter was made for"):
        drafter.propose(view(history[:2], {0: 5}, {0: 1}), Strategy("ngram", 4))
    drafter.begin(0, history[0, :1], history[0, :9])
    with pytest.raises(ValueError, match="shorter"):
        drafter.propose(view(history, {0: 5}, {0: 1}), Strategy("ngram", 4))
    with pytest.raises(ValueError, match="n-grams"):
        NgramDrafter(SLOTS, MAX_TOKENS, max_n=2, min_n=3)
