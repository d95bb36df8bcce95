"""Expected response lengths per prompt, used to sort 'longest expected first'. Never decides what is sampled."""

from collections.abc import Mapping

_DECAY = 0.5  # weight of the newest visit; prompts return once per epoch, and the target model moves in between


class LengthModel:
    """Exponential mean of each prompt's response lengths; unseen prompts get the mean over all prompts.

    Lengths are in tokens. The state is a plain dict, so that a resumed run schedules like the interrupted one.
    """

    def __init__(self, default_tokens: float) -> None:
        self._default_tokens = default_tokens
        self._mean_tokens: dict[int, float] = {}
        self._over_all: float | None = None  # mean of these; None: to be computed

    def expected_tokens(self, prompt_id: int) -> float:
        known = self._mean_tokens.get(prompt_id)
        if known is not None:
            return known
        if not self._mean_tokens:
            return self._default_tokens
        if self._over_all is None:
            self._over_all = sum(self._mean_tokens.values()) / len(self._mean_tokens)
        return self._over_all

    def observe(self, prompt_id: int, mean_tokens: float) -> None:
        """Record the mean length of one prompt's rollouts in one RL step."""
        self._over_all = None
        old = self._mean_tokens.get(prompt_id, mean_tokens)
        self._mean_tokens[prompt_id] = (1 - _DECAY) * old + _DECAY * mean_tokens

    def state_dict(self) -> dict[str, float]:
        return {str(prompt_id): tokens for prompt_id, tokens in self._mean_tokens.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._over_all = None
        self._mean_tokens = {int(prompt_id): tokens for prompt_id, tokens in state.items()}
