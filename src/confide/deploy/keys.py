"""Keys and certificates of a federation: an authority, the server's certificate, a key and a certificate for each node.

`ca.pem`, `server.pem` and `server.key` are the server's. A client's file (`client-0`) holds its private key and the
certificate that the authority gave it: both sides of a connection prove who they are (mutual TLS), and who has no
certificate of this authority does not come further than the handshake. `federation.json` says which public key speaks
for which users; a key that is not in it, or not any more, is not let in. `ca.key` signs certificates and is needed
again only to add or rotate one; keep it elsewhere.

A client can make its own key (`request`) and hand over the public half alone; `add` then gives it a certificate.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Generic, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from confide.errors import UserError
from confide.files import write_atomically
from confide.privacy.trust.roster import Roster

T = TypeVar("T")
CA, CA_KEY, SERVER, SERVER_KEY, FEDERATION = "ca.pem", "ca.key", "server.pem", "server.key", "federation.json"
_SECRET = 0o600
_CURVE = ec.SECP256R1()  # the fastest that every TLS library knows: a server shakes thousands of hands


@dataclass(frozen=True)
class Node:
    """A client as the server knows it."""

    name: str
    public_key: str | None
    """In OpenSSH's form; none for one that was revoked."""
    users: tuple[int, ...]

    @property
    def key(self) -> ec.EllipticCurvePublicKey | None:
        if self.public_key is None:
            return None
        return _read_public(self.public_key.encode(), f"the public key of {self.name}")


@dataclass(frozen=True)
class Federation:
    """Who may take part."""

    nodes: tuple[Node, ...]

    @property
    def population(self) -> int:
        return sum(len(node.users) for node in self.nodes)

    def by_key(self) -> dict[bytes, Node]:
        """The nodes that are let in, by what names their key in a connection."""
        return {_digest(key): node for node in self.nodes if (key := node.key)}

    def roster(self, own: ec.EllipticCurvePrivateKey | None = None) -> Roster:
        """Who signs with which key; users of a revoked one sign nothing."""
        return Roster({user: key for node in self.nodes if (key := node.key) for user in node.users}, own)

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise UserError(f"no node is called {name!r}; there are {', '.join(node.name for node in self.nodes[:20])}")

    def with_node(self, changed: Node) -> Federation:
        kept = [changed if node.name == changed.name else node for node in self.nodes]
        return Federation(tuple(kept if changed in kept else [*kept, changed]))


def make(
    folder: Path, clients: int, hosts: Sequence[str], users: int | None = None, days: float = 90, first: int = 0
) -> Federation:
    """Make all that a federation needs. Users are dealt to the clients in turn; without a number each is one user.

    A relay's clients speak for a part of the users, from `first` on.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; keys are never overwritten. Choose another folder")
    population = clients if users is None else users
    if population < clients:
        raise UserError(f"--users {population} is less than --clients {clients}; every client speaks for at least one")
    folder.mkdir(parents=True, exist_ok=True)
    authority = _Authority(ec.generate_private_key(_CURVE), _named("Confide federation"))
    write_atomically(folder / CA_KEY, _pem(authority.key), mode=_SECRET)
    authority.renew(folder, days)
    _make_server(folder, authority, hosts, days)
    nodes = []
    for number in range(clients):
        public = _give(folder, authority, f"client-{number}", None, days)
        nodes.append(Node(f"client-{number}", public, tuple(range(first + number, first + population, clients))))
    return _write(folder, Federation(tuple(nodes)))


def add(folder: Path, name: str, users: Sequence[int], public: Path | None = None, days: float = 90) -> Node:
    """Let one more client in, with a key that is made here or whose public half it has handed over."""
    held = read(folder, part=True)
    if any(node.name == name for node in held.nodes):
        raise UserError(f"{name} is there already; `confide deploy keys rotate {folder} {name}` gives it another key")
    node = Node(name, _give(folder, _Authority.read(folder), name, public, days), tuple(users))
    _write(folder, _checked(Federation((*held.nodes, node)), folder / FEDERATION, part=True))
    return node


def rotate(folder: Path, name: str, public: Path | None = None, days: float = 90) -> None:
    """Give a client, or `server`, a new key. A client's old key is not let in from then on.

    `authority` keeps its key, so that the certificates which it has signed go on, and gets a certificate that lasts.
    """
    if name == "authority":
        _Authority.read(folder).renew(folder, days)
        return
    if name == "server":
        found = x509.load_pem_x509_certificate((folder / SERVER).read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        _make_server(folder, _Authority.read(folder), [str(each.value) for each in names], days)
        return
    held = read(folder, part=True)
    node, given = held.node(name), _give(folder, _Authority.read(folder), name, public, days)
    _write(folder, held.with_node(replace(node, public_key=given)))


def revoke(folder: Path, name: str) -> None:
    """Let a client in no more. Its users still count: the population is part of the guarantee."""
    held = read(folder, part=True)
    _write(folder, held.with_node(replace(held.node(name), public_key=None)))


def request(path: Path) -> Path:
    """Make a key that never leaves this machine; return the file of its public half."""
    key, public = ec.generate_private_key(_CURVE), path.with_name(path.name + ".pub")
    if path.exists() or public.exists():
        raise UserError(f"{path} exists; keys are never overwritten. Choose another name")
    write_atomically(path, _pem(key), mode=_SECRET)
    write_atomically(public, _openssh(key.public_key()).encode() + b"\n")
    return public


def read(path: Path, part: bool = False) -> Federation:
    """Read the clients of a federation, or of a relay's part of one, from its folder or from the file."""
    path = path if path.is_file() else path / FEDERATION
    try:
        document = json.loads(path.read_text())
        nodes = tuple(
            Node(str(n["name"]), None if n["public_key"] is None else str(n["public_key"]), tuple(map(int, n["users"])))
            for n in document["nodes"]
        )
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; make a federation's keys with `confide deploy keys make {path.parent}`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a list of nodes with name, public_key and users ({error})") from None
    return _checked(Federation(nodes), path, part)


class Followed(Generic[T]):
    """What is read from some files, and read again when one of them has changed.

    What cannot be read then leaves the last in force: half of it may be written, or a certificate has expired.
    """

    def __init__(self, read: Callable[[], T], *files: Path) -> None:
        self.read, self.files = read, files
        self.seen, self.last = stamps(*files), read()

    def changed(self) -> T | None:
        """The new content, if there is any."""
        now = stamps(*self.files)
        if now == self.seen:
            return None
        try:
            self.last, self.seen = self.read(), now
        except (UserError, OSError):
            return None
        return self.last

    def now(self) -> T:
        self.changed()
        return self.last


def roster_of(path: Path | None, key: Path | None) -> Callable[[], Roster]:
    """A client's roster, as its file says at the time. Without one it signs, and believes everybody."""

    def current() -> Roster:
        own = None if key is None else read_private(key)
        return Roster(None, own) if path is None or own is None else read(path).roster(own)

    return Followed(current, *(file for file in (path, key) if file is not None)).now


def stamps(*files: Path) -> list[tuple[int, int]]:
    """Tell whether files have changed: each is written anew and moved into its place."""
    found = (file.stat() if file.exists() else None for file in files)
    return [(0, 0) if each is None else (each.st_mtime_ns, each.st_ino) for each in found]


def _checked(made: Federation, path: Path, part: bool = False) -> Federation:
    users = sorted(user for node in made.nodes for user in node.users)
    first = users[0] if part and users else 0
    if users != list(range(first, first + len(users))) or not users:
        raise UserError(f"{path}: users must be 0, 1, 2, ... with one node each; found {users[:20]}")
    if len(made.by_key()) < sum(node.public_key is not None for node in made.nodes):
        raise UserError(f"{path}: two nodes have the same public key; each client needs its own")
    return made


def key_of(certificate: bytes) -> bytes:
    """Name the key of a certificate in PEM form, as `Federation.by_key` does."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve key")
    return _digest(key)


def fingerprint(path: Path) -> str:
    """Name a certificate by the hash of its bytes, as a policy does."""
    certificate = check_certificate(path)
    return f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"


def check_certificate(path: Path) -> x509.Certificate:
    """Refuse a certificate that TLS would refuse, with a reason that says what to do."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; make certificates with `confide deploy keys make`") from None
    except ValueError as error:
        raise UserError(f"{path} is not a certificate in PEM form ({error})") from None
    now = datetime.now(UTC)
    if now >= certificate.not_valid_after_utc:
        raise UserError(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; make a new one with `confide "
            "deploy keys rotate`"
        )
    if now < certificate.not_valid_before_utc:
        raise UserError(
            f"{path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is this machine's "
            "clock right?"
        )
    return certificate


def certificate_of(key: Path) -> Path:
    """Find the file that holds a client's certificate: its key's own, or the one beside it."""
    beside = key.with_name(key.name + ".pem")
    return beside if beside.exists() else key


def read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """A node's key."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a client needs its key (see `confide deploy keys`)") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} holds no private key in PEM form without a passphrase ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is not an elliptic-curve key; `confide deploy keys request` makes one")
    return key


def read_pair(path: Path, signed: Path | None = None) -> tuple[bytes, bytes]:
    """A private key and its certificate, both in PEM form; a client's is with the key or beside it."""
    key, signed = read_private(path), signed or certificate_of(path)
    certificate = check_certificate(signed)
    if certificate.public_key() != key.public_key():
        raise UserError(f"{signed} is the certificate of another key than {path}")
    return _pem(key), certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class _Authority:
    """Signs certificates."""

    key: ec.EllipticCurvePrivateKey
    name: x509.Name

    @staticmethod
    def read(folder: Path) -> _Authority:
        if not (folder / CA_KEY).exists():
            raise UserError(f"{folder / CA_KEY} is not there; put it back while a certificate is signed")
        own = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        return _Authority(read_private(folder / CA_KEY), own.subject)

    def renew(self, folder: Path, days: float) -> None:
        """Write its own certificate, which lasts ten times as long as those that it signs."""
        write_atomically(folder / CA, self.certificate(self.name, self.key.public_key(), 10 * days))

    def certificate(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, days: float, hosts: Sequence[str] | None = None
    ) -> bytes:
        """In PEM form: the authority's own for its own key, a server's where there are hosts, a client's otherwise."""
        own, ends = public == self.key.public_key(), datetime.now(UTC) + timedelta(days=days)
        # A day ago, since clocks of other machines may be hours behind.
        begins = min(datetime.now(UTC) - timedelta(days=1), ends - timedelta(minutes=1))
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(public)
        made = made.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)
        made = made.add_extension(x509.BasicConstraints(ca=own, path_length=0 if own else None), critical=True)
        made = made.add_extension(_usage(own), critical=True)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        made = made.add_extension(signer, critical=False)
        if not own:  # a client's certificate must not serve as a server's
            what = ExtendedKeyUsageOID.CLIENT_AUTH if hosts is None else ExtendedKeyUsageOID.SERVER_AUTH
            made = made.add_extension(x509.ExtendedKeyUsage([what]), critical=False)
        if hosts is not None:
            made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        return made.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _give(folder: Path, authority: _Authority, name: str, public: Path | None, days: float) -> str:
    """A certificate for a client's own public key, or a new file with key and certificate; returns the public key."""
    if public is None:
        own = ec.generate_private_key(_CURVE)
        content = _pem(own) + authority.certificate(_named(name), own.public_key(), days)
        write_atomically(folder / name, content, mode=_SECRET)
        return _openssh(own.public_key())
    try:
        key = _read_public(public.read_bytes(), str(public))
    except FileNotFoundError:
        raise UserError(f"{public} does not exist; `confide deploy keys request` makes it on the client") from None
    write_atomically(folder / f"{name}.pem", authority.certificate(_named(name), key, days))
    return _openssh(key)


def _make_server(folder: Path, authority: _Authority, hosts: Sequence[str], days: float) -> None:
    key = ec.generate_private_key(_CURVE)
    certificate = authority.certificate(_named(hosts[0]), key.public_key(), days, hosts)
    write_atomically(folder / SERVER_KEY, _pem(key), mode=_SECRET)
    write_atomically(folder / SERVER, certificate)


def _write(folder: Path, made: Federation) -> Federation:
    document = [{"name": n.name, "public_key": n.public_key, "users": list(n.users)} for n in made.nodes]
    write_atomically(folder / FEDERATION, (json.dumps({"nodes": document}, indent=2) + "\n").encode())
    return made


def _read_public(content: bytes, what: str) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_ssh_public_key(content)
    except (ValueError, TypeError) as error:
        raise UserError(f"{what} cannot be read ({error}); expected OpenSSH's form, ecdsa-sha2-...") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{what} is not an elliptic-curve key; `confide deploy keys request` makes one")
    return key


def _digest(key: ec.EllipticCurvePublicKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=authority, crl_sign=authority, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _openssh(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
