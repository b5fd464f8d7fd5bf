"""`confide deploy`: a server and clients on real machines, over gRPC."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from confide.commands.options import Json, OpensRecipes, Sets, parse_numbers
from confide.commands.printing import print_summary
from confide.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    help="""Train with clients that keep their data on their own machines, over gRPC with TLS (needs confide\\[deploy]).

\b
  confide deploy keys make keys --clients 3 --host server.example     certificates and keys, once
  confide deploy server RECIPE --out runs/a --keys keys          on the server
  confide deploy client --init policy.yaml                       on each client: read it and change it
  confide deploy client --policy policy.yaml --server server.example:9092 --ca ca.pem --key client-0 --user 0
""",
)


Watch = Annotated[
    str | None,
    typer.Option(
        metavar="PORT", help="Serve /metrics (Prometheus) and /health on this port of this machine, or at HOST:PORT."
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="No TLS and no keys: for a closed test network only.")]


secrets = typer.Typer(
    no_args_is_help=True,
    help="""Make, add, rotate and revoke the keys of a federation.

A server that runs sees a change of its folder within seconds: a key that was revoked or rotated is cut.
""",
)
app.add_typer(secrets, name="keys")
Folder = Annotated[Path, typer.Argument(help="The folder that `confide deploy keys make` made.")]
Days = Annotated[float, typer.Option(help="How long certificates are valid.")]
Public = Annotated[
    Path | None, typer.Option(help="The public half of a key that the client made itself (`keys request`).")
]


@secrets.command()
def make(
    folder: Annotated[Path, typer.Argument(help="A new folder for certificates and keys.")],
    clients: Annotated[int, typer.Option(min=1, help="How many clients get a key pair.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address under which clients reach the server; may be repeated.")
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="For a simulation: so many users, dealt to the clients in turn.")
    ] = None,
    days: Days = 90,
    first_user: Annotated[int, typer.Option(min=0, help="For a relay's clients: the number of their first user.")] = 0,
) -> None:
    """Make a certificate authority, the server's certificate, and a key with a certificate for each client.

    The server keeps the folder. Client i needs ca.pem and its own client-i, nothing else. federation.json says which
    key speaks for which users; who has no key in it gets nothing.
    """
    from confide.deploy import keys as making

    made = making.make(folder, clients, host or ["127.0.0.1", "localhost"], users, days, first_user)
    print(
        f"{folder}: {len(made.nodes)} clients for {made.population} users; keep *.key secret, give client-i to client i"
        f"\nauthority {making.fingerprint(folder / making.CA)} (for `servers` in the clients' policies)"
    )


@secrets.command()
def request(file: Annotated[Path, typer.Argument(help="A new file for the private key.")]) -> None:
    """Make a key on the client's own machine; only FILE.pub has to leave it."""
    from confide.deploy import keys as making

    public = making.request(file)
    print(f"hand {public} to the server's operator, and put the certificate that you get into {file}.pem")


@secrets.command()
def add(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="What the client is called.")],
    users: Annotated[str, typer.Option(help="The users that it speaks for: the next numbers, for example 3 or 3,4.")],
    public: Public = None,
    days: Days = 90,
) -> None:
    """Let one more client in. The population grows, so a run that has begun goes on without it."""
    from confide.deploy import keys as making

    making.add(folder, name, _users(users), public, days)
    print(f"give {folder / name}{'.pem' if public else ''} and ca.pem to {name}")


@secrets.command()
def rotate(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The client, or `server`, or `authority`.")],
    public: Public = None,
    days: Days = 90,
) -> None:
    """Give a client or the server a new key. A client's old key is not let in from then on.

    The authority keeps its key and gets a certificate that lasts longer: give ca.pem to everybody again.
    """
    from confide.deploy import keys as making

    making.rotate(folder, name, public, days)
    if name == "authority":
        print(
            f"give {folder / making.CA} to everybody; its fingerprint is now {making.fingerprint(folder / making.CA)}"
        )
    elif name == "server":
        print("the server has a new key, and uses it for every connection from now on")
    else:
        print(f"{name} has a new key; give {folder / name}{'.pem' if public else ''} to {name}")


@secrets.command()
def revoke(folder: Folder, name: Annotated[str, typer.Argument(help="The client.")]) -> None:
    """Let a client in no more. Its users still count as users; `rotate` gives it a new key."""
    from confide.deploy import keys as making

    making.revoke(folder, name)
    print(f"{name} is not let in any more; a server that runs cuts it within seconds")


@app.command(cls=OpensRecipes)
def server(
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a shipped recipe or path of a YAML file; none with --resume.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. One that holds this run goes on.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    keys: Annotated[Path | None, typer.Option(help="The folder that `confide deploy keys make` made.")] = None,
    listen: Annotated[str, typer.Option(help="Address and port for the clients.")] = "0.0.0.0:9092",
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that a round waits for answers.")] = 600,
    minimum: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of a round's cohort that must answer; below it nothing is released."),
    ] = 0.5,
    tries: Annotated[int, typer.Option(min=1, help="How often a step is tried before the run stops.")] = 3,
    wait_for: Annotated[int, typer.Option(min=1, help="Begin once this many users are connected.")] = 1,
    users: Annotated[int | None, typer.Option(min=1, help="With --plain: the number of users.")] = None,
    watch: Watch = None,
    plain: Plain = False,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Run a recipe over clients on other machines.

    The server samples, bounds again what arrives, adds noise, steps, and keeps ledger and checkpoints. A round closes
    with those who answered by the deadline; the sum is divided by the expected cohort and gets its whole noise all the
    same. Ctrl-C stops after the step; the same command, or --resume RUN, goes on.
    """
    needs_grpc()
    from confide.deploy.deployment import Hosting, serve
    from confide.deploy.remote import Terms
    from confide.recipe import load
    from confide.runs import folder

    place = resume or out
    if place is None or (recipe is None) == (resume is None):
        raise UserError(
            "expected `confide deploy server RECIPE --out RUN ...` or `confide deploy server --resume RUN ...`"
        )
    if (keys is None) != plain:
        raise UserError(
            "give --keys FOLDER (see `confide deploy keys`), or --plain for a closed test network, not both"
        )
    wanted = folder.held_recipe(place) if recipe is None else load(recipe, set_ or [])
    terms = Terms(deadline=deadline, minimum=minimum, tries=tries)
    summary = serve(wanted, place, Hosting(listen, keys, users, watch=watch), terms, wait_for, as_json)
    print_summary(summary, place, as_json)


@app.command(cls=OpensRecipes)
def client(
    recipe: Annotated[
        str | None, typer.Argument(help="Your own copy of the recipe; without it the server tells the shape of it.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="What this client does for whom, and what it refuses; made by --init.")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(help="Write a policy to read and change, and do nothing else.", metavar="FILE")
    ] = None,
    server: Annotated[
        str, typer.Option(help="HOST:PORT of the server, as its certificate names it.")
    ] = "127.0.0.1:9092",
    ca: Annotated[Path | None, typer.Option(help="ca.pem of the federation.")] = None,
    key: Annotated[Path | None, typer.Option(help="This client's private key.")] = None,
    users: Annotated[
        str,
        typer.Option(
            "--users", "--user", help="The user, or users, that this client speaks for, for example 0 or 0,3."
        ),
    ] = "0",
    patience: Annotated[float, typer.Option(min=0, help="Seconds to keep trying a server that is away.")] = 3600,
    plain: Plain = False,
    set_: Sets = None,
) -> None:
    """Keep data here and train on it when the server asks. Ctrl-C ends it.

    What leaves this machine is one bounded update for each round that its user is drawn for. The client runs only the
    code that is installed here. Its policy says which data and encoder it uses, whom it answers, and what trust, noise
    and epsilon it wants at least: it shows what it is asked for, and refuses what is below.
    """
    needs_grpc()
    import torch

    from confide.deploy import keys as making
    from confide.deploy.address import Access, Address
    from confide.deploy.deployment import Client
    from confide.deploy.node import serve
    from confide.deploy.policy import read_policy, write_policy
    from confide.recipe import load

    authority = None if ca is None else making.fingerprint(ca)
    if init is not None:
        write_policy(init, server, authority)
        print(f"{init}: read it, change it, and start the client with --policy {init}")
        return
    if plain == (ca is not None and key is not None) or (plain and (ca or key)):
        raise UserError("give --ca and --key, or --plain for a closed test network, not both")
    own_users, access = _users(users), Access(Address.parse(server), ca, key)
    decided = read_policy(policy)
    decided.check_server(server, authority)
    torch.set_num_threads(1)
    own = None if recipe is None else load(recipe, set_ or [])
    serve(access, Client(decided, own_users, own, key=key), patience)


@app.command(cls=OpensRecipes)
def relay(
    recipe: Annotated[str, typer.Argument(help="The recipe of the server above.")],
    keys: Annotated[Path, typer.Option(help="Keys for this relay's clients: `confide deploy keys make --first-user`.")],
    ca: Annotated[Path, typer.Option(help="ca.pem of the server above.")],
    key: Annotated[Path, typer.Option(help="This relay's key there, which speaks for the users of all its clients.")],
    server: Annotated[
        str, typer.Option(help="HOST:PORT of the server above, as its certificate names it.")
    ] = "127.0.0.1:9092",
    listen: Annotated[str, typer.Option(help="Address and port for the clients.")] = "0.0.0.0:9093",
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that a round waits for answers at most.")] = 600,
    wait_for: Annotated[int, typer.Option(min=1, help="Begin once this many users are connected.")] = 1,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to keep trying a server that is away.")] = 3600,
    watch: Watch = None,
    set_: Sets = None,
) -> None:
    """Stand between clients and a server: add up what the clients send, and hand one sum up.

    For central trust. Every answer is checked and bounded again here; the model is the same, byte for byte, as if the
    clients were connected to the server itself.
    """
    needs_grpc()
    from confide.deploy.address import Access, Address
    from confide.deploy.deployment import Hosting
    from confide.deploy.deployment import relay as run
    from confide.deploy.remote import Terms
    from confide.recipe import load

    terms, access = Terms(deadline=deadline), Access(Address.parse(server), ca, key)
    run(load(recipe, set_ or []), Hosting(listen, keys, watch=watch), access, terms, wait_for, patience)


def _users(text: str) -> list[int]:
    def fits(users: list[int]) -> bool:
        return min(users) >= 0 and len(set(users)) == len(users)

    expected = "different numbers from 0 on, separated by commas, for example 0,3"
    return parse_numbers("users", text, int, fits, expected)


def needs_grpc() -> None:
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("msgpack") is None:
        raise UserError("deployment needs gRPC: pip install 'confide[deploy]'")
