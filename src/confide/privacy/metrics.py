"""Which figures about the cohort a step releases with noise, beside the update and under the same budget.

pfl-research (Granqvist et al. 2024, `JointMechanism`) releases metrics and update together. Here the figures are more
of what the votes of an adaptive bound are (`confide.privacy.events`): every user adds a number from -1/2 to +1/2 to
each, with one noise on all of them, and one line of the ledger stands for the whole vector.

Differs from pfl-research: its `JointPLDPrivacyAccountant` composes the losses of the parts, each amplified by sampling
as if it had a cohort of its own. One cohort is behind all parts of a step, so what is amplified here is the Gaussian
vector that they make up together.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from confide.settings import Section

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class NoisyMetrics(Section):
    """Figures about the cohort that every step also releases, with noise, under the same budget.

    Examples:
        >>> from confide.privacy.metrics import NoisyMetrics
        >>> NoisyMetrics(loss=5, bounded=True).bounds
        {'loss': 5.0, 'bounded': 1.0}
    """

    loss: Positive | None = Field(
        None,
        description="the mean loss of the central model on the users' own data, before they train; a user's counts as "
        "at most this",
    )
    norm: Positive | None = Field(
        None, description="the mean norm of the updates before they are bounded; a user's counts as at most this"
    )
    bounded: bool = Field(False, description="the share of users whose update was shortened")
    accuracy: bool = Field(
        False, description="the mean over users of the share of a user's own examples that the central model has right"
    )
    noise: Positive | None = Field(
        None,
        description="deviation of the noise on each sum, to which a user adds 0 to 1; none: a twentieth of the cohort, "
        "or more. An adaptive bound's counts have the same",
    )

    @property
    def bounds(self) -> dict[str, float]:
        """The most that a user counts for in each figure that is asked for, in the order of the release."""
        most = {"loss": self.loss, "norm": self.norm, "bounded": self.bounded, "accuracy": self.accuracy}
        return {name: float(bound) for name, bound in most.items() if bound}
