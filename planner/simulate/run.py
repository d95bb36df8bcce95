"""A simulated run: RL steps in virtual time around the real ledger. Owns the workers' places, the phases of a step and
the worker-seconds. The policies decide.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from contracts.rollout import FinishReason, Request, Rollout, Sampled, SamplingParams
from launch.dispatch.ledger import Ledger
from planner.simulate.acceptance import AcceptanceState
from planner.simulate.clock import Clock
from planner.simulate.cloud import Cloud, SimulatedLearners
from planner.simulate.costs import SharedCosts, SimulatedCosts, costs_of
from planner.simulate.elastic import Elastic
from planner.simulate.engine import Engine, Running, SimulatedWorker
from planner.simulate.learner import LearnerTimes, learner_times
from planner.simulate.lookahead import EarlySamples
from planner.simulate.memory import check_learner, kv_tokens_of
from planner.simulate.outcome import Outcome, SimulatedStep, headroom_of, limit_of
from planner.simulate.progress import ProgressLine
from planner.simulate.scenario import Scenario
from planner.simulate.speculation import Adaptive, speculators
from planner.simulate.training import SpotTrainers
from planner.simulate.workload import Asked, Workload

_ROUGHLY = 8  # fraction of a mean response in which prefixes are reported while requests wait


class SimulatedRun:
    """See the module docstring. `line` shows how far it is."""

    def __init__(self, scenario: Scenario, line: ProgressLine | None = None) -> None:
        self.scenario, self._line = scenario, line
        self.clock = Clock()
        self.costs: SimulatedCosts = costs_of(scenario)
        self._kv_tokens = kv_tokens_of(scenario)
        check_learner(scenario)
        self.times: LearnerTimes = learner_times(scenario)
        self.early = EarlySamples(scenario=scenario, workload=Workload(scenario=scenario))
        self.acceptance = AcceptanceState(scenario.speculation.acceptance, scenario.speculation.training)
        fleet = scenario.fleet
        speculating = speculators(scenario.speculation, self.costs, self.acceptance, fleet.workers)
        self._adaptive = speculating[0] if isinstance(speculating[0], Adaptive) else None
        self.seats: dict[str, SimulatedWorker] = {}
        shared = scenario.costs.shared
        self._cores = [SharedCosts(self.costs, shared) for _ in range(fleet.nodes)] if shared else []
        for index in range(fleet.workers):
            node = index // fleet.workers_per_node
            engine = Engine(
                costs=self._cores[node] if self._cores else self.costs,
                speculator=speculating[index],
                slots=scenario.engine.max_running,
                kv_tokens=self._kv_tokens,
            )
            seat = SimulatedWorker(name=f"rollout-{index}", node=node, engine=engine)
            engine.on_end = partial(self._over, seat)
            self.seats[seat.name] = seat
        self._ended: list[tuple[SimulatedWorker, Running]] = []
        self.ledger: Ledger | None = None
        self.trainers: SpotTrainers | None = None
        if scenario.speculation.training.enabled and scenario.speculation.mode != "off":
            self.trainers = SpotTrainers(self.clock, scenario.speculation.training, scenario.coordinator)
            for seat in self.seats.values():
                self.trainers.join(seat.name, f"node-{seat.node}")
        longest = scenario.lengths.max_tokens + 1
        self._blank = np.zeros(longest, np.int32), np.zeros(longest, np.float32)  # of every response
        self._prompt = np.zeros(1, np.int32)
        self._sampling = SamplingParams(max_new_tokens=scenario.lengths.max_tokens)
        self._asked: list[Asked] = []
        self._tail_since_s = math.inf
        self._idle_s = self._worker_rollout_s = 0.0
        self._granule = float(scenario.engine.progress_every_tokens)
        self.moved = 0
        self.down_s = self.lost_s = 0.0
        self.learner = SimulatedLearners(scenario=scenario, clock=self.clock)
        self.elastic = Elastic(scenario=scenario, clock=self.clock, places=self)
        self._after_s = 0.0  # the last rollout, until the next began
        self.cloud = Cloud(scenario=scenario, clock=self.clock, places=self, learner=self.learner)

    # The loop.

    def outcome(self) -> Outcome:
        """Simulate the whole run."""
        scenario, steps = self.scenario, list[SimulatedStep]()
        end_s = math.inf if scenario.workload.hours is None else 3600 * scenario.workload.hours
        while len(steps) < scenario.workload.steps and self.clock.now_s < end_s:
            steps.append(self._step(len(steps) + 1))
            if self._line is not None:
                self._line.say(f"RL step {len(steps)}, {self.clock.now_s / 3600:.2f} h of cluster time")
        return self._summary(tuple(steps))

    def _step(self, number: int) -> SimulatedStep:
        scenario, clock, times = self.scenario, self.clock, self.times
        trained_before = 0.0 if self.trainers is None else self.trainers.micro_steps
        training_before = 0.0 if self.trainers is None else self.trainers.seconds
        idle_before, quality = self._idle_s, self.acceptance.quality
        begin_s = clock.now_s
        self.cloud.step_begins()
        self._rollout(number)
        rollout_s = clock.now_s - begin_s
        self.elastic.rollout_ends(float(sum(one.tokens for one in self._asked)))
        tail_s = max(clock.now_s - self._tail_since_s, 0.0)
        stop_s, training_s = 0.0, 0.0
        if (trainers := self.trainers) is not None:
            trainers.end(number)
            stopping_s = clock.now_s
            clock.run(lambda: not trainers.training)
            stop_s = clock.now_s - stopping_s
            self.acceptance.trained(trainers.micro_steps - trained_before)
            training_s = trainers.seconds - training_before
        learned = [one.tokens for one in self._asked if not one.put_off]
        tokens = sum(learned)
        self._pass(scenario.workload.grade_s)
        learn_s, stall_s = self.learner.learn(times, learned)
        self._pass(times.weights_s)
        checkpoint_s = 0.0
        every = scenario.learning.checkpoint_every
        if every and number % every == 0:
            checkpoint_s = scenario.learning.checkpoint_s
            self._pass(checkpoint_s)
            self.learner.checkpointed()
        self._after_s = clock.now_s - begin_s - rollout_s
        if number < scenario.workload.steps:
            self.early.look(self.seats.values(), stop_s + scenario.workload.grade_s + learn_s + stall_s)
        self.acceptance.updated()
        if self._adaptive is not None:
            self._adaptive.renewed()
        return SimulatedStep(
            rollout_s=rollout_s,
            tail_s=tail_s,
            stop_s=stop_s,
            grade_s=scenario.workload.grade_s,
            learn_s=learn_s,
            weights_s=times.weights_s,
            checkpoint_s=checkpoint_s,
            stall_s=stall_s,
            responses=len(learned),
            tokens=tokens,
            longest=max(learned),
            idle_s=max(self._idle_s - idle_before - training_s, 0.0),
            training_s=training_s,
            quality=quality,
        )

    def _pass(self, seconds: float) -> None:
        self.clock.run_to(self.clock.now_s + seconds)

    # The rollout.

    def _rollout(self, number: int) -> None:
        clock = self.clock
        self._asked = self.early.asked()
        requests = [
            Request(
                request_id=index,
                prompt_id=one.prompt,
                prompt_tokens=self._prompt,
                noise_key=index,
                sampling=self._sampling,
                expected_tokens=one.expected,
            )
            for index, one in enumerate(self._asked)
        ]
        mean = sum(one.tokens for one in self._asked) / len(self._asked)
        self._granule = max(float(self.scenario.engine.progress_every_tokens), mean / _ROUGHLY)
        probes = self.scenario.workload.probe_first
        self.ledger = ledger = Ledger(requests, max_retries=len(requests), probes=probes)
        self._tail_since_s = math.inf
        if self.trainers is not None:
            self.trainers.begin(number)
        begin_s, gone_s = clock.now_s, self.elastic.gone_s
        for seat in self.seats.values():
            seat.working, seat.idle_since_s = False, begin_s
            if seat.up:
                seat.engine.advance(begin_s)
            if seat.up and not seat.leaving:
                ledger.offer(seat.name, seat.engine.slots)
        self._settle(dict(self.seats))
        self.elastic.rollout_begins(self._after_s, max(self.scenario.workload.steps - number, 0))
        for seat in self.seats.values():
            if self.trainers is not None and seat.up and not seat.working:
                self.trainers.idle(seat.name)
        clock.run(lambda: ledger.done)
        for seat in self.seats.values():
            if seat.up and not seat.working:
                self._idle_s += seat.rested(clock.now_s)
        for seat in self.seats.values():
            if seat.working:
                seat.working, seat.idle_since_s = False, clock.now_s
        self._worker_rollout_s += len(self.seats) * (clock.now_s - begin_s) - (self.elastic.gone_s - gone_s)
        self.ledger = None

    def _over(self, seat: SimulatedWorker, running: Running) -> None:
        """An engine has ended a response; `_settle` follows."""
        del seat.told[running.request]
        self._ended.append((seat, running))

    def _settle(self, touched: dict[str, SimulatedWorker]) -> None:
        """Process all consequences of ended responses and arrivals."""
        ledger = self.ledger
        if ledger is None:
            return
        while True:
            ended, self._ended = self._ended, []
            for seat, running in ended:
                ledger.finish(seat.name, self._rollout_of(running.request, running.length))
            issued = ledger.assign() if ledger.waiting else {}
            if not issued and not self._ended and not self._crowd(touched):
                break
            for name, requests in issued.items():
                self._give(self.seats[name], requests)
                touched[name] = self.seats[name]
        for seat in touched.values():
            self._schedule(seat)

    def _crowd(self, touched: dict[str, SimulatedWorker]) -> bool:
        """Adjust the speed of all engines of a node after the number of computing ones changed. Returns whether one of
        them has ended a response meanwhile."""
        for node in {seat.node for seat in touched.values()} if self._cores else ():
            own = [seat for seat in self.seats.values() if seat.node == node and seat.engine.running]
            if self._cores[node].take(len(own)):
                for seat in own:
                    seat.engine.advance(self.clock.now_s)
                    seat.engine.refresh()
                    touched[seat.name] = seat
        return bool(self._ended)

    def _give(self, seat: SimulatedWorker, requests: list[Request]) -> None:
        engine = seat.engine
        engine.advance(self.clock.now_s)
        for request in requests:
            asked = self._asked[request.request_id]
            known = 0 if request.prefix is None else len(request.prefix)
            seat.told[request.request_id] = known
            running = Running(
                request=request.request_id,
                prompt=request.prompt_id,
                prompt_tokens=self.scenario.workload.prompt_tokens,
                tokens=max(float(known), self.early.known[request.request_id]),
                length=asked.tokens,
                moved=request.prefix is not None,
            )
            engine.admit(running)

    def _schedule(self, seat: SimulatedWorker) -> None:
        seat.version += 1
        working, now_s = seat.engine.running > 0, self.clock.now_s
        if working != seat.working:
            seat.working = working
            if working:
                self._idle_s += seat.rested(now_s)
                if self.trainers is not None:
                    self.trainers.busy(seat.name, seat.engine.running)
            else:
                seat.idle_since_s = now_s
                if self.trainers is not None:
                    self.trainers.idle(seat.name)
        assert self.ledger is not None
        if not working:
            if not self.ledger.waiting and seat.up and not seat.leaving:
                self._tail_since_s = min(self._tail_since_s, now_s)
            return
        self.clock.at(seat.engine.next_s(), self._wake, seat, seat.version)

    def _wake(self, seat: SimulatedWorker, version: int) -> None:
        if seat.version != version:
            return
        seat.engine.advance(self.clock.now_s)
        if self.ledger is not None and self.ledger.waiting:
            self._tell(seat, self._granule)
        self._settle({seat.name: seat})

    def _tell(self, seat: SimulatedWorker, granule: float) -> None:
        """Report the prefixes of running requests to the driver, in whole granules."""
        assert self.ledger is not None
        for request, known in seat.told.items():
            tokens = seat.engine.tokens_of(request)
            whole = int((tokens - known) // granule * granule)
            if whole > 0:
                seat.told[request] = known + whole
                self.ledger.progress(seat.name, request, self._sampled(whole))

    def _sampled(self, tokens: int) -> Sampled:
        return Sampled(self._blank[0][:tokens], self._blank[1][:tokens])

    def _rollout_of(self, request: int, tokens: int, reason: FinishReason = FinishReason.STOP) -> Rollout:
        return Rollout(
            request_id=request,
            sampled=self._sampled(tokens),
            finish_reason=reason,
            weights_version=0,
            started_s=0.0,
            finished_s=self.clock.now_s,
        )

    # See planner.simulate.places.

    def up(self) -> list[list[str]]:
        """Return the places by node, or alone, as spot.takes says."""
        if self.scenario.spot.takes == "worker":
            return [[seat.name] for seat in self.seats.values() if seat.up and not seat.leaving]
        nodes: dict[int, list[str]] = {}
        for seat in self.seats.values():
            if seat.up and not seat.leaving:
                nodes.setdefault(seat.node, []).append(seat.name)
        return list(nodes.values())

    def withhold(self, name: str) -> None:
        """Give it nothing more."""
        self.seats[name].leaving = True
        if self.ledger is not None:
            self.ledger.withdraw(name)

    def drain(self, name: str) -> None:
        """Take everything back, with every token it has."""
        seat = self.seats[name]
        self._leave(seat)
        ledger = self.ledger
        if ledger is not None:
            for request in list(seat.told):
                if tokens := int(seat.engine.tokens_of(request)):
                    ledger.hand_back(name, self._rollout_of(request, tokens, FinishReason.ABORT))
            self._give_up(seat, handed_over=True)

    def fall_silent(self, name: str) -> None:
        """It is lost without the driver's knowledge: its requests stop."""
        seat = self.seats[name]
        self._leave(seat)
        if self.ledger is not None:
            self._settle({})  # what it had finished before

    def lose(self, name: str) -> None:
        """The driver detects the loss: unreported tokens are to be sampled again."""
        seat = self.seats[name]
        if self.ledger is not None and seat.told:
            self.ledger.withdraw(name)
            self._tell(seat, float(self.scenario.engine.progress_every_tokens))
            untold = sum(seat.engine.tokens_of(request) - known for request, known in seat.told.items())
            spent = seat.engine.spent
            self.lost_s += untold * spent.decode_s / max(spent.tokens, 1.0)
            self._give_up(seat, handed_over=False)

    def let_go(self, name: str) -> None:
        """Release it; it has not failed."""
        self.withhold(name)
        self.drain(name)
        self.seats[name].let_go = True

    def standing(self) -> tuple[list[str], list[tuple[float, str]]]:
        """Return the places that are up, and those of them without requests."""
        now_s = self.clock.now_s
        up = [seat for seat in self.seats.values() if seat.up and not seat.leaving]
        idle = [(now_s - seat.idle_since_s, seat.name) for seat in up if not seat.working]
        return [seat.name for seat in up], sorted(idle, reverse=True)

    def waiting(self) -> tuple[int, float]:
        """Return the number of requests that no worker has, and their expected tokens."""
        waiting = 0 if self.ledger is None else self.ledger.waiting
        return waiting, waiting * sum(one.expected for one in self._asked) / max(len(self._asked), 1)

    def tokens_per_s(self) -> float:
        """Return the speed of one decoding worker up to now."""
        spent = [seat.engine.spent for seat in self.seats.values()]
        return sum(one.tokens for one in spent) / max(sum(one.decode_s for one in spent), 1e-9)

    def node_of(self, name: str) -> int:
        return self.seats[name].node

    def ready(self, name: str) -> None:
        """A successor is in the place, with the present weights."""
        seat, now_s = self.seats[name], self.clock.now_s
        if not seat.let_go:
            self.down_s += now_s - seat.down_since_s
        seat.up, seat.leaving, seat.let_go, seat.idle_since_s = True, False, False, now_s
        if self.trainers is not None:
            self.trainers.join(name, f"node-{seat.node}")
        if self.ledger is not None:
            seat.engine.advance(now_s)
            self.ledger.offer(name, seat.engine.slots)
            self._settle({name: seat})
        if self.trainers is not None and not seat.working:
            self.trainers.idle(name)

    def _leave(self, seat: SimulatedWorker) -> None:
        """Stop it for good."""
        now_s = self.clock.now_s
        if self.ledger is not None:
            seat.engine.advance(now_s)
            self.ledger.withdraw(seat.name)
            if not seat.working:
                self._idle_s += seat.rested(now_s)
        seat.version += 1
        seat.up, seat.leaving, seat.working, seat.down_since_s = False, True, False, now_s
        if self.trainers is not None:
            self.trainers.lose(seat.name)

    def _give_up(self, seat: SimulatedWorker, *, handed_over: bool) -> None:
        """Give its requests to others."""
        assert self.ledger is not None
        self._settle({})  # what it had finished goes first
        loss = self.ledger.lose(
            seat.name, "it is gone", now_s=self.clock.now_s, weights_version=0, handed_over=handed_over
        )
        self.moved += len(loss.reissued)
        seat.engine.take_back()
        seat.told.clear()
        self._settle({})

    # Accounting.

    def _summary(self, steps: tuple[SimulatedStep, ...]) -> Outcome:
        scenario, fleet = self.scenario, self.scenario.fleet
        wall_s = self.clock.now_s
        places = len(self.seats)
        missed = [seat for seat in self.seats.values() if not (seat.up or seat.let_go)]
        down_s = self.down_s + sum(wall_s - seat.down_since_s for seat in missed)
        self.elastic.finish()
        worker_s = places * wall_s - self.elastic.away_s
        tokens = sum(one.tokens for one in steps)
        decode_s = sum(seat.engine.spent.decode_s for seat in self.seats.values())
        speculating_s = sum(seat.engine.spent.speculating_s for seat in self.seats.values())
        again_s = self.lost_s + sum(seat.engine.spent.again_s for seat in self.seats.values())
        held_s = places * sum(one.checkpoint_s + one.stall_s for one in steps)
        rollout_gpus = fleet.nodes * fleet.gpus_per_node
        learner_gpus = fleet.learner_nodes * fleet.gpus_per_node if fleet.layout == "disaggregated" else 0
        spot_price = scenario.prices.spot if fleet.layout == "disaggregated" else scenario.prices.on_demand
        paid_s = wall_s * rollout_gpus + self.cloud.paid_s - self.elastic.saved_s
        cost = paid_s / 3600 * spot_price + wall_s / 3600 * learner_gpus * scenario.prices.on_demand
        count = len(steps)
        inside_s = max(self._worker_rollout_s, 1e-12)
        return Outcome(
            name=scenario.name,
            gpus=rollout_gpus + learner_gpus,
            workers=places,
            steps=steps,
            wall_s=wall_s,
            step_s=wall_s / count,
            rollout_s=sum(one.rollout_s for one in steps) / count,
            tail_s=sum(one.tail_s for one in steps) / count,
            learn_s=sum(one.learn_s for one in steps) / count,
            weights_s=sum(one.weights_s for one in steps) / count,
            tokens=tokens,
            tokens_s=tokens / wall_s,
            idle_share=sum(one.idle_s for one in steps) / inside_s,
            training_share=sum(one.training_s for one in steps) / inside_s,
            speculating_share=speculating_s / max(decode_s, 1e-12),
            worker_hours=worker_s / 3600,
            gpu_hours=(paid_s + learner_gpus * wall_s) / 3600,
            cost=cost,
            cost_per_million=cost / tokens * 1e6,
            interruptions=self.cloud.interruptions,
            moved=self.moved,
            learner_failures=self.learner.failures,
            down_s=down_s,
            again_s=again_s,
            held_s=held_s,
            ettr=1 - (down_s + again_s + held_s) / worker_s,
            goodput=None,
            limit=limit_of(steps),
            headroom=headroom_of(steps, inside_s),
            events=self.clock.events,
        )


def simulate(scenario: Scenario, line: ProgressLine | None = None) -> Outcome:
    """Simulate a run: its duration and costs. The same scenario gives the same outcome.

    Raises ConfigError for a model that does not fit its GPUs and for an unknown GPU, OSError for files."""
    return SimulatedRun(scenario, line).outcome()


def simulate_beside(scenario: Scenario, line: ProgressLine | None = None) -> Outcome:
    """`simulate`, and where something disturbs the run, the same run undisturbed beside it: `goodput`."""
    outcome = simulate(scenario, line)
    if not scenario.disturbed:
        return outcome
    # As many steps as the disturbed run made: both have the same work to do.
    calm = simulate(scenario.undisturbed(len(outcome.steps)), line)
    return replace(outcome, goodput=outcome.tokens_s / calm.tokens_s)
