"""Whether a configuration can look ahead (`rollout.lookahead`), and if not, why. Pure: of the tree alone."""

from actors.engine.capabilities import BACKENDS
from config.tree import Config


def no_lookahead(config: Config) -> str | None:
    """Why idle workers sample nothing of the next RL step; None: they do."""
    rollout, speculation = config.rollout, config.rollout.speculation
    if rollout.lookahead == "off":
        return "rollout.lookahead is off"
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
    if config.drafter.train:
        return "idle workers train the drafter (drafter.train)"
    if rollout.workers.max == 1 and not ahead_meanwhile(config):
        return "there is one worker, which is never idle while another decodes, and the learner shares its device"
    return None


def ahead_meanwhile(config: Config) -> bool:
    """Workers look ahead while the learner works too: it shares neither cores nor devices with them."""
    return config.cluster.layout == "disaggregated"
