"""`gaussian` with distributed trust: users add the noise in shares, and the server sees only their noisy sum.

In a deployment the shares are made by `confide.privacy.trust.own_noise` and hidden by secure aggregation. In one
process the result has the same distribution as with central trust, and is made in the same way.
"""

from __future__ import annotations

from confide.privacy.mechanisms.base import Asked, Mechanism


class Distributed(Mechanism):
    name = "gaussian"
    summary = "independent noise at every step"
    trust = "distributed"

    @classmethod
    def deployed_refusals(cls, asked: Asked) -> list[str]:
        if asked.uniform and asked.privacy.noise_scale is None:
            return []
        return [
            "privacy.trust=distributed: a client's share of the noise is made for uniform weights and for "
            "noise_multiplier or target_epsilon; leave users.weights and privacy.noise_scale out"
        ]

    @classmethod
    def extrapolates(cls, sampler: str) -> str | None:
        return "Not extrapolated for distributed trust, whose server knows the cohorts."
