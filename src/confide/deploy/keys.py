"""Keys and certificates of a federation: a certificate authority, the server's certificate, a key pair for each client.

`ca.pem`, `server.pem` and `server.key` are for TLS. Every client signs what it sends with its own elliptic-curve key
(P-384, as Flower's node authentication wants), and `federation.json` says which public key speaks for which users: the
server lets nobody else in. `ca.key` signs certificates and is needed again only to renew one; keep it elsewhere.

For a test federation all is made at one place. In a real one each client makes its own pair (`ssh-keygen -t ecdsa -b
384 -m pem`) and hands over only the public half.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from confide.errors import UserError
from confide.files import write_atomically

CA, CA_KEY, SERVER, SERVER_KEY, FEDERATION = "ca.pem", "ca.key", "server.pem", "server.key", "federation.json"


@dataclass(frozen=True)
class Node:
    """A client as the server knows it."""

    name: str
    public_key: str
    """In OpenSSH's form."""
    users: tuple[int, ...]


@dataclass(frozen=True)
class Federation:
    """Who may take part."""

    nodes: tuple[Node, ...]

    @property
    def population(self) -> int:
        return sum(len(node.users) for node in self.nodes)


def make(folder: Path, clients: int, hosts: Sequence[str], users: int | None = None, days: float = 90) -> Federation:
    """Everything for a test federation. Users are dealt to the clients in turn; without a number each is one user."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; keys are never overwritten. Choose another folder")
    population = clients if users is None else users
    if population < clients:
        raise UserError(f"--users {population} is less than --clients {clients}; every client speaks for at least one")
    folder.mkdir(parents=True, exist_ok=True)
    ends = datetime.now(UTC) + timedelta(days=days)
    authority, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Confide federation")])
    root = _certificate(issuer, issuer, authority.public_key(), authority, ends, None)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    server = _certificate(subject, issuer, own.public_key(), authority, ends, hosts)
    for name, certificate in ((CA, root), (SERVER, server)):
        write_atomically(folder / name, certificate.public_bytes(serialization.Encoding.PEM))
    _write_secret(folder / CA_KEY, _pem(authority))
    _write_secret(folder / SERVER_KEY, _pem(own))
    nodes = []
    for number in range(clients):
        key, name = ec.generate_private_key(ec.SECP384R1()), f"client-{number}"
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _write_secret(folder / name, _openssh(key))
        write_atomically(folder / f"{name}.pub", public + b"\n")
        nodes.append(Node(name, public.decode(), tuple(range(number, population, clients))))
    made = Federation(tuple(nodes))
    document = [{"name": n.name, "public_key": n.public_key, "users": list(n.users)} for n in nodes]
    write_atomically(folder / FEDERATION, (json.dumps({"nodes": document}, indent=2) + "\n").encode())
    return made


def read(folder: Path) -> Federation:
    """The clients of a federation, each user with exactly one key."""
    path = folder / FEDERATION
    try:
        document = json.loads(path.read_text())
        nodes = tuple(
            Node(str(n["name"]), str(n["public_key"]), tuple(map(int, n["users"]))) for n in document["nodes"]
        )
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; make a federation's keys with `confide deploy keys {folder}`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a list of nodes with name, public_key and users ({error})") from None
    users = sorted(user for node in nodes for user in node.users)
    if users != list(range(len(users))) or not users:
        raise UserError(f"{path}: users must be 0, 1, 2, ... with one node each; found {users[:20]}")
    if len({node.public_key for node in nodes}) < len(nodes):
        raise UserError(f"{path}: two nodes have the same public key; each client needs its own")
    return Federation(nodes)


def fingerprint(path: Path) -> str:
    """Name a certificate by the hash of its bytes, as a policy does."""
    check_certificate(path)
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"


def check_certificate(path: Path) -> None:
    """Refuse a certificate that TLS would refuse, with a reason that says what to do."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; make certificates with `confide deploy keys`") from None
    except ValueError as error:
        raise UserError(f"{path} is not a certificate in PEM form ({error})") from None
    now = datetime.now(UTC)
    if now >= certificate.not_valid_after_utc:
        raise UserError(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; make a new one with `confide "
            "deploy keys` (clients then need the new ca.pem)"
        )
    if now < certificate.not_valid_before_utc:
        raise UserError(
            f"{path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is this machine's "
            "clock right?"
        )


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a client needs its private key (see `confide deploy keys`)") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a private key in OpenSSH's form without a passphrase ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is not an elliptic-curve key; expected ecdsa, for example P-384")
    return key


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    ends: datetime,
    hosts: Sequence[str] | None,
) -> x509.Certificate:
    """The authority's own where there are no hosts, the server's otherwise."""
    begins = min(datetime.now(UTC) - timedelta(minutes=5), ends - timedelta(minutes=1))
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    made = made.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)
    made = made.add_extension(x509.BasicConstraints(ca=hosts is None, path_length=None), critical=True)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    made = made.add_extension(issued_by, critical=False)
    if hosts is not None:
        made = made.add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
    return made.sign(signer, hashes.SHA384())


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _openssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def _write_secret(path: Path, content: bytes) -> None:
    """Readable by its owner alone from the first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
