"""`gaussian` with central trust: independent noise on the sum of every step, amplified by sampling.

PFL-ASR Algorithm 1, line 13; NORM Algorithms 1 to 3. The accountant knows Poisson cohorts, everybody, and (by RDP)
cohorts of a fixed size.
"""

from __future__ import annotations

from confide.privacy.mechanisms.base import Asked, Mechanism


class Gaussian(Mechanism):
    name = "gaussian"
    summary = "independent noise at every step"

    @classmethod
    def deployed_refusals(cls, asked: Asked) -> list[str]:
        problems = super().deployed_refusals(asked)
        if asked.privacy.placement != "client":
            return problems
        return [
            *problems,
            "privacy.placement=client with trust=central: the server would add the clients' noise for them; use "
            "placement: sum, trust: distributed or trust: local",
        ]
