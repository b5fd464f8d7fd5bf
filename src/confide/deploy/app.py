"""The deployment as a plain Flower app, for `flwr run` on a SuperLink and SuperNodes that are there already.

`examples/flower-app/pyproject.toml` names `server` and `client`. The run's settings are Flower's run config (`recipe`,
`out`, `deadline`, `minimum`, `users`), a node's are its node config: `users`, `policy` (a file that `confide deploy
client --init` made), and `recipe` for a copy of its own, without which only a shipped recipe can be told. Rounds,
checks, noise, ledger and checkpoints are those of `confide deploy`.

What is different here: SuperNodes start a process for every message, so each answer builds the task anew; they run
whatever bundle the SuperLink sends, unless `--trusted-entities` says otherwise; who may join is the SuperLink's to
check, so a node itself says for which users it speaks. Secure aggregation keeps secrets between messages and is
refused.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from confide.deploy.deployment import Client, check_deployable, remote_engine, server_task
from confide.deploy.link import GridLink
from confide.deploy.node import reply_to
from confide.deploy.policy import read_policy, told_recipe
from confide.deploy.remote import Terms
from confide.engines.engine import Engine
from confide.errors import UserError
from confide.federated.task import Task
from confide.privacy.plan import Plan
from confide.recipe import Recipe, load, shipped
from confide.report.page import write_report
from confide.runs import folder

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config: dict[str, Any] = dict(context.run_config)
    wanted, out = load(str(config["recipe"])), Path(str(config["out"]))
    check_deployable(wanted)
    if wanted.privacy.trust == "distributed":
        raise UserError(
            "privacy.trust=distributed: a SuperNode keeps no secrets between messages; use `confide deploy`"
        )
    deadline = float(config.get("deadline", 600))
    # A node answers from a process that it starts for each message: to be asked who it is takes as long as a round.
    terms = Terms(deadline=deadline, minimum=float(config.get("minimum", 0.5)), greeting=deadline)

    def engine(wanted: Recipe, task: Task, plan: Plan) -> Engine:
        return remote_engine(wanted, task, plan, GridLink(grid), None, terms)

    deployed = folder.Deployed(server_task(wanted, int(config["users"])), engine)
    begun = time.monotonic()
    if (out / folder.RECIPE).exists():
        folder.resume(out, quiet=True, deployed=deployed, page=write_report)
    else:
        folder.train(wanted, out, quiet=True, deployed=deployed, page=write_report)
    print(f"{out}: {folder.summary_of(out)['metrics']} in {time.monotonic() - begun:.1f} s")


def _answer(message: Message, context: Context) -> Message:
    config: dict[str, Any] = dict(context.node_config)
    return reply_to(message, lambda kind, parcel: _client(config, context).answer(kind, parcel))


def _client(config: dict[str, Any], context: Context) -> Client:
    users = [int(part) for part in str(config["users"]).split("+")]
    policy = read_policy(Path(str(config["policy"])) if "policy" in config else None)
    if "recipe" in config:
        return Client(policy, users, load(str(config["recipe"])))
    told = str(context.run_config["recipe"])
    if told not in shipped():
        raise UserError(
            f"the run's recipe {told!r:.80} is none of the shipped ones, and this node has no copy of its own; give it "
            "one with the node config `recipe`"
        )
    return Client(policy, users, told_recipe(load(told).model_dump_json(), policy))


client.query("join")(_answer)
client.query("train")(_answer)
