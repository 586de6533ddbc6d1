"""The bench's reward as a verifier of ours."""

from pydantic import BaseModel
from work import spread

from services.reward.verifiers.base import Outcome, Request, Score


class Payload(BaseModel):
    """The row's answer, of which nothing is asked."""

    answer: str


class Spread:
    """See `work.spread`."""

    name, version, schema, stateless = "spread", "1", Payload, True

    def score(self, request: Request) -> Outcome:
        return Score(spread(request.response_text))
