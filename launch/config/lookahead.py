"""Whether a configuration looks ahead (`rollout.lookahead`), and if not, why. Reads the tree and RAY_ADDRESS."""

from collections.abc import Iterator

from actors.engine.capabilities import BACKENDS
from config.tree import Config
from launch.cluster.address import attaches
from launch.config.issues import Issue

KEY = "rollout.lookahead"


def cannot_look_ahead(config: Config) -> str | None:
    """Return why this configuration cannot sample the next RL step early, whatever the key says; None: it can."""
    rollout, speculation, cluster = config.rollout, config.rollout.speculation, config.cluster
    if not BACKENDS[rollout.engine.backend].early_text:
        return f"the {rollout.engine.backend} engine cannot check text without changing tokens"
    if speculation.mode != "off" and speculation.verification == "rejection":
        return "rollout.speculation.verification=rejection draws other tokens where text is checked"
    if config.environment is not None:
        return "responses are episodes (environment), whose later turns nobody knows ahead"
    if rollout.staleness:
        return "rollout.staleness has the next step sampled while this one is learned already"
    if rollout.partial.tokens_per_step is not None:
        return "rollout.partial decides by this step's responses what is sampled in the next"
    if rollout.rounds.factor is not None:
        return "rollout.rounds decides by this step's lengths which prompts come next, and keeps their text"
    if rollout.skip.after is not None or rollout.skip.target is not None:
        return "rollout.skip decides by this step's rewards which prompts come next"
    if rollout.workers.max == 1 and not ahead_meanwhile(config):
        return "there is one worker, which is never idle while another decodes, and the learner shares its device"
    if config.learner.ranks > 1 and cluster.layout == "embedded" and not attaches(cluster.address):
        return f"learner.ranks={config.learner.ranks} share the only cores with the workers"
    return None


def no_lookahead(config: Config) -> str | None:
    """Why idle workers sample nothing of the next RL step; None: they do. `auto` leaves it off where idle workers have
    no device or cores of their own."""
    if config.rollout.lookahead == "off":
        return f"{KEY} is off"
    if (reason := cannot_look_ahead(config)) is not None:
        return reason
    if only_apart(config) and not attaches(config.cluster.address):
        return f"workers and learner share this machine's cores ({KEY}=always looks ahead all the same)"
    return None


def lookahead_text(config: Config) -> str:
    """Return the sentence of `paceline config` and of the run's event."""
    if (reason := no_lookahead(config)) is not None:
        return f"off: {reason}"
    if ahead_meanwhile(config):
        when = "in the tail of the rollout and while the learner works"
    elif only_apart(config):
        when = "in the tail of the rollout, on nodes where no worker decodes"
    else:
        when = "in the tail of the rollout"
    measured = ", while it is measured to pay" if config.rollout.lookahead == "auto" else ""
    return f"idle workers sample the next RL step {when}{measured}"


def ahead_meanwhile(config: Config) -> bool:
    """Whether workers look ahead while the learner works: it shares neither cores nor devices with them."""
    return config.cluster.layout == "disaggregated"


def only_apart(config: Config) -> bool:
    """A worker looks ahead only where no other worker of its node decodes: they share its cores."""
    return config.rollout.lookahead == "auto" and config.cluster.layout == "embedded"


def lookahead_issues(config: Config) -> Iterator[Issue]:
    """An explicit wish that cannot be met."""
    if config.rollout.lookahead == "always" and (reason := cannot_look_ahead(config)) is not None:
        yield Issue(KEY, f"always, but {reason}", remedy="set it to auto, or change that")
