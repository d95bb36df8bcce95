"""Checks of new requests and reports of finished ones: which can never run, and which have ended before they start.
Pure functions."""

from dataclasses import dataclass

from actors.engine.batch.plan import Ticket
from actors.engine.stopping import End, find_end
from contracts.rollout import NOTHING_SAMPLED, Finished, FinishReason, Rejected, Request, Rollout, Sampled


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """An engine's limits on requests."""

    vocab_size: int
    model_tokens: int  # prompt and response
    kv_blocks: int
    block_tokens: int
    logprobs_t1: bool = True  # whether prefixes must have them

    def sequence_limit(self, request: Request) -> int:
        """Return the sequence length at which the request ends."""
        return min(len(request.prompt_tokens) + request.sampling.max_new_tokens, self.model_tokens)


def take_in(request: Request, limits: EngineLimits, weights_version: int, now_s: float) -> Ticket | Finished | Rejected:
    """Return a ticket to run, or the request's immediate end."""
    if (reason := reason_to_reject(request, limits)) is not None:
        return Rejected(request.request_id, reason)
    prefix = request.prefix if request.prefix is not None and len(request.prefix.tokens) else None
    known = 0 if prefix is None else len(prefix.tokens)
    ticket = Ticket(
        request=request,
        prefix=prefix,
        reported_tokens=known,
        limit=limits.sequence_limit(request),
        submitted_tokens=len(request.prompt_tokens) + known,
    )
    if (ended := ended_by_prefix(request, limits)) is None:
        return ticket
    response = (prefix or NOTHING_SAMPLED).first(ended.tokens)
    return finished(ticket, response, ended.reason, weights_version, now_s, ended.propensity)


def finished(
    ticket: Ticket, response: Sampled, reason: FinishReason, weights_version: int, now_s: float, propensity: float = 1.0
) -> Finished:
    """Return the event of a request that ends now with `response`."""
    drawn = len(ticket.request.prompt_tokens) + len(response) - ticket.submitted_tokens  # since it was submitted
    rollout = Rollout(
        request_id=ticket.request.request_id,
        sampled=response,
        finish_reason=reason,
        weights_version=weights_version,
        started_s=ticket.started_s or now_s,
        finished_s=now_s,
        verifications=max(0, drawn - ticket.spared_steps),
        propensity=propensity,
        reused_tokens=ticket.reused_tokens,
    )
    return Finished(rollout)


def reason_to_reject(request: Request, limits: EngineLimits) -> str | None:
    """Return why the request can never run here, and the remedy; None if it can."""
    prompt, sampling = request.prompt_tokens, request.sampling
    if prompt.ndim != 1 or len(prompt) == 0:
        return "the prompt is empty: every request needs at least one prompt token"
    if int(prompt.min()) < 0 or int(prompt.max()) >= limits.vocab_size:
        return (
            f"prompt token {int(prompt.max())} is outside the model's vocabulary of {limits.vocab_size}: "
            "the tokenizer does not belong to this model (model.tokenizer)"
        )
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}: it must be at least 1"
    if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
        return f"impossible sampling parameters: {sampling}"
    if len(prompt) >= limits.model_tokens:
        return (
            f"the prompt has {len(prompt)} tokens and leaves no room for a response within {limits.model_tokens}: "
            "raise rollout.engine.max_model_tokens (at most the model's own limit) or leave long prompts out "
            "(data.max_prompt_tokens)"
        )
    # The K/V of the last token are never needed.
    most = limits.sequence_limit(request) - 1
    capacity = limits.kv_blocks * limits.block_tokens
    if most > capacity:
        return (
            f"prompt and response may need {most} tokens of KV cache, the engine has {capacity}: raise "
            f"rollout.engine.kv_tokens to at least {most + limits.block_tokens} or lower "
            "rollout.sampling.max_new_tokens"
        )
    rule = request.stop
    for marker in () if rule is None else (rule.strings, rule.answer):
        if marker is not None and len(marker.tokens) and int(marker.tokens[-1]) >= limits.vocab_size:
            return (
                f"a stop rule contains token {int(marker.tokens[-1])}, outside the model's vocabulary of "
                f"{limits.vocab_size}: the tokenizer does not belong to this model (model.tokenizer)"
            )
    prefix = request.prefix
    if prefix is not None:
        if limits.logprobs_t1 and prefix.logprobs_t1 is None:
            return "the prefix has no log-probs at temperature 1: it is another backend's"
        columns = [prefix.logprobs] if prefix.logprobs_t1 is None else [prefix.logprobs, prefix.logprobs_t1]
        if any(len(column) != len(prefix.tokens) for column in columns):
            return "the prefix has different numbers of tokens and log-probs"
        if len(prefix.tokens) and not 0 <= int(prefix.tokens.min()) <= int(prefix.tokens.max()) < limits.vocab_size:
            return f"the prefix has tokens outside the model's vocabulary of {limits.vocab_size}"
    return None


def ended_by_prefix(request: Request, limits: EngineLimits) -> End | None:
    """Return how a re-issued request has already ended, if its prefix is complete."""
    if request.prefix is None:
        return None
    return find_end(request, request.prefix.tokens, limits.sequence_limit(request) - len(request.prompt_tokens))
