"""What became of each choice so far, and what all of them took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_aot.runtime.requests.logprobs import TokenLogprob
from dflash_aot.runtime.requests.request import Delta


@dataclass
class Choice:
    """All deltas of one choice up to now."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [one for delta in self.deltas for one in delta.logprobs]

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None


def describe_usage(prompt_tokens: int, choices: Sequence[Choice]) -> Mapping[str, Any]:
    """OpenAI's numbers, and what speculation came to: tau is tokens per round, the target's own included."""
    deltas = [delta for choice in choices for delta in choice.deltas]
    tokens, rounds = sum(len(delta.token_ids) for delta in deltas), [one for delta in deltas for one in delta.rounds]
    drafted, accepted = sum(one.k for one in rounds), sum(one.accepted for one in rounds)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculative": {
            "rounds": len(rounds),
            "drafted": drafted,
            "accepted": accepted,
            "tau": 1 + accepted / len(rounds) if rounds else None,
        },
    }
