"""Claims about recipes in a deployment: which are refused, and what a client never takes from a server."""

from __future__ import annotations

import pytest

from confide import recipe
from confide.errors import UserError

pytest.importorskip("flwr", reason="deployment needs the extra deploy")

from confide.deploy.client import RefusedByClient
from confide.deploy.deployment import _told, check_deployable


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["privacy={mechanism: partial, tensors: [weight], noise_multiplier: 1}"], "without a guarantee"),
        (["privacy.placement=client"], "trust: distributed or trust: local"),
        (
            ["bounding={rule: clip, bound: 1, adaptive: {kind: car}}", "privacy={mechanism: none}"],
            "kind=car: needs every client's raw norm",
        ),
        (["privacy.trust=distributed", "users.weights=examples"], "uniform weights"),
    ],
)
def test_what_cannot_be_kept_when_users_are_elsewhere_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_deployable(recipe.load("convex/digits", sets))


def test_an_ordinary_recipe_is_taken_by_server_and_client() -> None:
    wanted = recipe.load("convex/digits")
    check_deployable(wanted)
    assert _told(wanted.model_dump_json(), with_data=False) == wanted


@pytest.mark.parametrize("with_data", [False, True])
def test_a_client_never_runs_code_that_a_server_names(with_data: bool) -> None:
    hostile = recipe.load("convex/digits", ["task={kind: python, factory: 'os:system', options: {command: id}}"])
    with pytest.raises(RefusedByClient, match=r"code of its choice here \(task.factory=os:system\)"):
        _told(hostile.model_dump_json(), with_data)
    rule = recipe.load("convex/digits", ["bounding={rule: python, function: 'os:system', bound: 1}"])
    with pytest.raises(RefusedByClient, match=r"code of its choice here \(bounding.function=os:system\)"):
        _told(rule.model_dump_json(), with_data)
