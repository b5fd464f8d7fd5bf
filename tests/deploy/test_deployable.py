"""Claims about recipes in a deployment: which are refused."""

from __future__ import annotations

import pytest

from confide import recipe
from confide.deploy.deployment import check_deployable
from confide.errors import UserError


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["privacy={mechanism: partial, tensors: [weight], noise_multiplier: 1}"], "without a guarantee"),
        (["privacy.placement=client"], "trust: distributed or trust: local"),
        (
            ["bounding={rule: clip, bound: 1, adaptive: {kind: car}}", "privacy={mechanism: none}"],
            "kind=car: needs every client's raw norm",
        ),
        (["local.gradient_norms=true"], "do not tell a server"),
        (["privacy.trust=distributed", "users={weights: examples, public: true}"], "uniform weights"),
    ],
)
def test_what_cannot_be_kept_when_users_are_elsewhere_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_deployable(recipe.load("convex/digits", sets))
