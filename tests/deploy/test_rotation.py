"""Keys change while everybody is connected: who has a new one goes on, and who has none any more is cut."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

from cryptography import x509

from confide.deploy import keys
from confide.errors import UserError
from support.streams import Streams


def shown(here: Streams) -> int:
    """The serial number of the certificate that the server shows to who connects now."""
    context = ssl.create_default_context(cafile=str(here.keys / keys.CA))
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(here.keys / "client-0")
    with (
        socket.create_connection((here.address.host, here.address.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return x509.load_der_x509_certificate(secure.getpeercert(True) or b"").serial_number


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_a_client_whose_key_is_rotated_in_its_place_is_cut_and_comes_back_with_the_new_one(tmp_path: Path) -> None:
    with Streams(tmp_path, 2) as here:
        for name in ("client-0", "client-1"):
            here.start(name)
        first = here.hub._sessions["client-0"]
        stolen = tmp_path / "stolen"
        stolen.write_bytes((here.keys / "client-0").read_bytes())
        keys.rotate(here.keys, "client-0")
        here.until(lambda: here.hub._sessions.get("client-0") not in (None, first))
        assert here.hub._sessions["client-0"].key != first.key
        assert [reply.error for reply in here.ask("client-0", "client-1")] == ["", ""]
        (here.keys / "stolen").write_bytes(stolen.read_bytes())
        with pytest.raises(UserError, match="does not let this client in"):
            here.run(_live(here, "stolen")).result(20)


def test_a_new_certificate_of_the_server_is_shown_without_a_restart_and_streams_go_on(tmp_path: Path) -> None:
    with Streams(tmp_path, 1) as here:
        here.start("client-0")
        held = here.hub._sessions["client-0"]
        before = shown(here)
        assert before == serial(here.keys / keys.SERVER)
        keys.rotate(here.keys, "server")
        assert serial(here.keys / keys.SERVER) != before
        assert shown(here) == serial(here.keys / keys.SERVER)
        assert here.hub._sessions["client-0"] is held
        assert [reply.error for reply in here.ask("client-0")] == [""]


def test_half_a_rotation_leaves_the_last_certificate_in_force(tmp_path: Path) -> None:
    with Streams(tmp_path, 1) as here:
        before = shown(here)
        certificate = (here.keys / keys.SERVER).read_bytes()
        keys.rotate(here.keys, "server")
        new = (here.keys / keys.SERVER).read_bytes()
        (here.keys / keys.SERVER).write_bytes(certificate)  # a new key with the old certificate
        assert shown(here) == before
        (here.keys / keys.SERVER).write_bytes(new)
        assert shown(here) == serial(here.keys / keys.SERVER) != before


def test_an_authority_that_is_renewed_keeps_what_it_has_signed(tmp_path: Path) -> None:
    with Streams(tmp_path, 2) as here:
        here.start("client-0")
        old = here.keys / "old.pem"
        old.write_bytes((here.keys / keys.CA).read_bytes())
        keys.rotate(here.keys, "authority", days=900)
        assert serial(here.keys / keys.CA) != serial(old)
        assert shown(here) == serial(here.keys / keys.SERVER)  # held against the new ca.pem
        here.start("client-1")
        keys.rotate(here.keys, "client-1")  # signed after the renewal
        here.until(lambda: "connected" in " ".join(here.said[-1:]))
        lasts = keys.check_certificate(here.keys / keys.CA).not_valid_after_utc
        assert lasts > keys.check_certificate(old).not_valid_after_utc


def test_a_roster_follows_both_the_others_keys_and_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.make(folder, 2, ["127.0.0.1"])
    roster = keys.roster_of(folder / keys.FEDERATION, folder / "client-0")
    signature = roster().sign(b"said")
    assert roster().verify(0, signature, b"said")
    keys.rotate(folder, "client-0")
    assert not roster().verify(0, signature, b"said")
    assert roster().verify(0, roster().sign(b"said"), b"said")


def test_a_key_behind_a_relay_is_added_rotated_and_revoked_like_any_other(tmp_path: Path) -> None:
    """Users of a relay begin where the server's own end, which these commands once took for a damaged folder."""
    folder = tmp_path / "below"
    before = keys.make(folder, 2, ["127.0.0.1"], first=5)
    keys.rotate(folder, "client-0")
    keys.revoke(folder, "client-1")
    keys.add(folder, "client-2", [7])
    after = keys.read(folder, part=True)
    assert [node.users for node in after.nodes] == [(5,), (6,), (7,)]
    assert after.nodes[0].public_key != before.nodes[0].public_key
    assert after.nodes[1].public_key is None
    with pytest.raises(UserError, match="users must be"):
        keys.add(folder, "client-3", [4, 9])


async def _live(here: Streams, name: str) -> None:
    from confide.deploy.node import live
    from support.streams import Echo

    await live(here.access(name), Echo(), 5)
