"""Confide: private federated learning with a stated, checked guarantee for every user.

    import confide

    run = confide.train("convex/digits", "runs/a", {"privacy.target_epsilon": 2})
    print(run.metrics, run.epsilon, run.report)
    print(confide.evaluate(run))
    print(confide.compare("runs/a", "runs/b").to_json())
    print(confide.plan(target_epsilon=2, cohort=1000, population=10**6, rounds=500, delta=1e-7).point)

Nothing heavy is imported before it is used: `import confide` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confide.errors import Stopped, UserError

if TYPE_CHECKING:
    from confide.api import (
        Run,
        allow_code,
        audit,
        compare,
        diagnose,
        evaluate,
        export,
        guarantee,
        load,
        plan,
        publish,
        release,
        resume,
        retrieve,
        sweep,
        train,
        transcribe,
    )  # fmt: skip

__version__ = "0.1.0"
__all__ = [
    "Run",
    "Stopped",
    "UserError",
    "__version__",
    "allow_code",
    "audit",
    "compare",
    "diagnose",
    "evaluate",
    "export",
    "guarantee",
    "load",
    "plan",
    "publish",
    "release",
    "resume",
    "retrieve",
    "sweep",
    "train",
    "transcribe",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'confide' has no attribute {name!r}; it has {', '.join(__all__)}")
    from confide import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
