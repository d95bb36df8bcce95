"""Who may speak to a coordinator, who may administer it, and what somebody on the network between learns."""

import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
import zmq
from grpc_health.v1 import health_pb2, health_pb2_grpc

from config.coordinator import AdminOptions, CoordinatorOptions, CurveOptions
from contracts.coordinator import Register, RolloutComplete, State
from coordinator.address import Address
from coordinator.admin.client import AdminClient, NoCoordinatorError, NotAllowedError
from coordinator.admin.credentials import CERTIFICATE_FILE, KEY_FILE, TOKEN_FILE, Credentials, write_certificate
from coordinator.errors import SetupError
from coordinator.service import CoordinatorService
from coordinator.transport.client import DriverClient
from coordinator.transport.security import ClientKeys, Keys, server_keys, write_keys
from coordinator.wire import Ack, Say
from tests.coordinator.cluster import OPTIONS, Raw, eventually, worker

ELSEWHERE = "127.0.0.2"  # as good as any address that is not the loopback's own


def changed(**values: object) -> CoordinatorOptions:
    return OPTIONS.model_copy(update=values)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Eavesdropper:
    """Passes on what goes to `address`, and keeps it."""

    def __init__(self, address: str, at: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server((at, 0))
        self.address = f"{at}:{self._listener.getsockname()[1]}"
        self.heard = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with closing(source), closing(sink):
            try:
                while data := source.recv(65536):
                    self.heard += data
                    sink.sendall(data)
            except OSError:
                return


@contextmanager
def overheard(address: str, at: str = "127.0.0.1") -> Iterator[Eavesdropper]:
    with closing(Eavesdropper(address, at)) as between:
        yield between


# Workers.


def test_beyond_loopback_a_run_encrypts_and_gives_every_worker_a_key_of_its_own(tmp_path: Path) -> None:
    keys = Keys(changed(host=ELSEWHERE), tmp_path / "keys")
    assert mode(tmp_path / "keys") == 0o700
    assert {mode(path) for path in (tmp_path / "keys").glob("*-key.json")} == {0o600}
    first, other = keys.worker("w0"), keys.worker("w1")
    assert first == keys.worker("w0") != other
    with (
        CoordinatorService(keys.options) as service,
        worker(service.endpoint, "w0", keys=first) as client,
        closing(DriverClient(service.endpoint, 1, OPTIONS, keys=keys.driver)) as driver,
        Raw(service.endpoint, other) as impostor,
    ):
        driver.rollout_started(1)
        eventually(lambda: client.connected and driver.connected)
        impostor.say(Say(1, 0, Register("w0", 9, "n", "g", State.IDLE)))
        impostor.say(Say(1, 0, RolloutComplete(1)))
        impostor.say(Say(1, 0, Register("w1", 1, "n", "g", State.BUSY)))
        assert impostor.answer() == Ack(1, 0, service.address.term)
        assert service.status().counts["impostor"] == 2
        # Who joins later is let in too, without a word to the coordinator.
        with worker(service.endpoint, "late", keys=keys.worker("late")) as late:
            eventually(lambda: late.connected)
        assert "unauthenticated" not in service.status().counts


def test_on_loopback_too_another_user_takes_no_name_and_gives_no_orders(tmp_path: Path) -> None:
    """Without keys the real worker was `outdated` for good, by one Register with a high incarnation."""
    keys = Keys(OPTIONS, tmp_path / "keys")
    with (
        CoordinatorService(keys.options, directory=tmp_path, members=["w0"]) as service,
        worker(service.endpoint, "w0", keys=keys.worker("w0")) as client,
        Raw(service.endpoint) as stranger,
    ):
        eventually(lambda: client.connected)
        stranger.say(Say(1 << 61, 0, Register("w0", 1 << 61, "n", "g", State.BUSY)))
        eventually(lambda: service.status().counts.get("unauthenticated", 0) > 0)
        assert [(each.name, each.incarnation) for each in service.status().workers] == [("w0", 1)]
        with AdminClient(service.address.admin) as admin:
            for order in (admin.pause, lambda: admin.drain(worker="w0"), admin.status):
                with pytest.raises(NotAllowedError):
                    order()
        with AdminClient(service.address.admin, Credentials.read(tmp_path)) as admin:
            assert admin.pause().paused
    assert {mode(path) for path in (tmp_path / "keys").iterdir()} == {0o600}
    assert mode(tmp_path / TOKEN_FILE) == 0o600


def test_nothing_else_in_the_folder_of_the_keys_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    before = Keys(OPTIONS, tmp_path).driver
    assert before != Keys(OPTIONS, tmp_path).driver
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_successor_knows_the_keys_and_a_new_driver_makes_new_ones(tmp_path: Path) -> None:
    keys = Keys(changed(curve=CurveOptions(enabled=True)), tmp_path / "keys")
    own = keys.worker("w0")
    for _ in range(2):
        with CoordinatorService(keys.options) as service, worker(service.endpoint, "w0", keys=own) as client:
            eventually(lambda client=client: client.connected)
    again = Keys(changed(curve=CurveOptions(enabled=True)), tmp_path / "keys")
    assert own is not None
    assert again.driver is not None
    assert again.driver.server != own.server
    with CoordinatorService(again.options) as service, worker(service.endpoint, "w0", keys=own):
        eventually(lambda: service.status().counts.get("unauthenticated", 0) > 0)
        assert service.status().workers == ()


def test_off_needs_to_be_said(tmp_path: Path) -> None:
    off = CurveOptions(enabled=False)
    for options in (changed(curve=off), changed(host=ELSEWHERE, curve=off)):
        keys = Keys(options, tmp_path / "keys")
        assert keys.options is options
        assert keys.driver is keys.worker("w0") is None
        CoordinatorService(options).close()
    assert not (tmp_path / "keys").exists()
    with pytest.raises(SetupError, match=r"curve\.directory: 127\.0\.0\.2 is not .*curve\.enabled=false"):
        CoordinatorService(changed(host=ELSEWHERE))


@pytest.mark.parametrize("encrypted", [True, False])
def test_an_eavesdropper_between_worker_and_coordinator_learns_no_name(tmp_path: Path, encrypted: bool) -> None:
    keys = Keys(changed(curve=CurveOptions(enabled=encrypted)), tmp_path / "keys")
    with (
        CoordinatorService(keys.options) as service,
        overheard(service.endpoint.removeprefix("tcp://")) as between,
        worker(f"tcp://{between.address}", "rollout-17", keys=keys.worker("rollout-17")) as client,
    ):
        eventually(lambda: client.connected)
        assert (b"rollout-17" in between.heard) != encrypted


def test_no_secret_is_shown_where_its_owner_is_printed(tmp_path: Path) -> None:
    """As in an actor's arguments, in a traceback."""
    own = Keys(changed(curve=CurveOptions(enabled=True)), tmp_path / "keys").worker("w0")
    assert own is not None
    assert own.public.decode() in repr(own)
    assert own.secret.decode() not in repr(own)
    assert "hidden" not in repr(Credentials("hidden"))
    assert server_keys(tmp_path / "keys").secret.decode() not in repr(server_keys(tmp_path / "keys"))


def test_a_wrong_key_is_nobodys(tmp_path: Path) -> None:
    keys = Keys(changed(curve=CurveOptions(enabled=True)), tmp_path / "keys")
    assert keys.driver is not None
    stranger = ClientKeys(*zmq.curve_keypair(), keys.driver.server)
    elsewhere = ClientKeys(keys.driver.public, keys.driver.secret, zmq.curve_keypair()[0])  # takes another for it
    with (
        CoordinatorService(keys.options) as service,
        Raw(service.endpoint, stranger) as first,
        Raw(service.endpoint, elsewhere) as second,
    ):
        for raw in (first, second):
            raw.say(Say(1, 0, RolloutComplete(1)))
        eventually(lambda: service.status().counts.get("unauthenticated", 0) >= 2)
        assert first.answer(0.0) is second.answer(0.0) is None
        assert service.status().rollout_step is None


# People.


def test_beyond_loopback_the_admin_service_wants_a_token_over_tls(tmp_path: Path) -> None:
    options = changed(admin_host=ELSEWHERE)
    with CoordinatorService(options, directory=tmp_path) as service:
        address, known = service.address.admin, Credentials.read(tmp_path)
        assert known.tls
        assert [mode(tmp_path / name) for name in (TOKEN_FILE, KEY_FILE)] == [0o600] * 2
        with AdminClient(address, known) as admin:
            assert admin.pause().paused
            assert next(admin.watch())
        for wrong in ("", "x" + known.token, known.token[:-1]):
            with AdminClient(address, Credentials(wrong, True, known.certificate)) as admin:
                with pytest.raises(NotAllowedError, match=f"{address} refuses: the token is missing or wrong"):
                    admin.resume()
                with pytest.raises(NotAllowedError):
                    next(admin.watch())
        with AdminClient(address, Credentials(known.token)) as admin, pytest.raises(NoCoordinatorError):
            admin.resume()  # unencrypted
        write_certificate(tmp_path / "other.crt", tmp_path / "other.key")
        other = Credentials(known.token, True, (tmp_path / "other.crt").read_bytes())
        with AdminClient(address, other) as admin, pytest.raises(NoCoordinatorError):
            admin.resume()  # somebody else's service gets no token
        with known.channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert service.status().paused
    with CoordinatorService(options, directory=tmp_path) as service, AdminClient(service.address.admin, known) as admin:
        admin.status()  # a successor asks for the same


def test_a_token_that_others_could_read_is_replaced(tmp_path: Path) -> None:
    options = changed(admin=AdminOptions(token=True))
    with CoordinatorService(options, directory=tmp_path):
        before = Credentials.read(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0o644)
    with CoordinatorService(options, directory=tmp_path) as service:
        after = Credentials.read(tmp_path)
        assert before.token != after.token
        assert mode(tmp_path / TOKEN_FILE) == 0o600
        with AdminClient(service.address.admin, before) as admin, pytest.raises(NotAllowedError):
            admin.status()


@pytest.mark.parametrize("host", ["127.0.0.1", ELSEWHERE])
def test_an_eavesdropper_between_people_and_coordinator_learns_no_token(tmp_path: Path, host: str) -> None:
    """On loopback it would, where nobody listens."""
    options = changed(admin_host=host, admin=AdminOptions(token=True))
    with CoordinatorService(options, directory=tmp_path) as service, overheard(service.address.admin) as between:
        known = Credentials.read(tmp_path)
        with AdminClient(between.address, known) as admin:
            admin.status()
        assert len(between.heard) > 100
        assert (known.token.encode() in between.heard) == (host == "127.0.0.1")


def test_a_token_alone_is_not_sent_in_clear_beyond_loopback(tmp_path: Path) -> None:
    """As --credentials finds it where somebody copied no certificate."""
    copied = tmp_path / "copied"
    copied.mkdir()
    with (
        CoordinatorService(changed(admin=AdminOptions(token=True)), directory=tmp_path) as service,
        overheard(service.address.admin, at=ELSEWHERE) as between,
    ):
        (copied / TOKEN_FILE).write_bytes((tmp_path / TOKEN_FILE).read_bytes())
        known = Credentials.read(copied)
        assert known.token
        with AdminClient(between.address, known) as admin, pytest.raises(NoCoordinatorError):
            admin.status()
        assert between.heard  # it was asked, not over this
        assert known.token.encode() not in between.heard


def test_a_service_that_listens_everywhere_leaves_an_address_that_others_can_call(tmp_path: Path) -> None:
    keys = Keys(changed(host="0.0.0.0", admin_host="0.0.0.0"), tmp_path / "keys")
    with CoordinatorService(keys.options, directory=tmp_path) as service:
        left = Address.read(tmp_path)
        assert left is not None
        assert left.endpoint == service.endpoint
        assert not any("0.0.0.0" in where for where in (left.admin, left.endpoint))
        with (
            AdminClient(left.admin, Credentials.read(tmp_path)) as admin,
            worker(left.endpoint, "w0", keys=keys.worker("w0")) as client,
        ):
            eventually(lambda: client.connected)
            assert [each.name for each in admin.status().workers] == ["w0"]


def test_a_certificate_and_keys_in_the_folder_of_the_run_stay_what_they_are(tmp_path: Path) -> None:
    write_keys(tmp_path)
    certificate, key = tmp_path / CERTIFICATE_FILE, tmp_path / KEY_FILE
    write_certificate(certificate, key)
    given = AdminOptions(certificate=str(certificate), key=f"{tmp_path}/../{tmp_path.name}/{KEY_FILE}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    options = changed(admin=given, curve=CurveOptions(directory=str(tmp_path)))
    with (
        CoordinatorService(options, directory=tmp_path) as service,
        AdminClient(service.address.admin, Credentials.read(tmp_path)) as admin,
    ):
        admin.status()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_folder_with_another_coordinator_json_is_left_alone(tmp_path: Path) -> None:
    write_certificate(tmp_path / CERTIFICATE_FILE, tmp_path / KEY_FILE)
    write_certificate(tmp_path / "given.crt", tmp_path / "given.key")
    (tmp_path / "coordinator.json").write_text('{"public": "", "secret": ""}', encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    given = AdminOptions(certificate=str(tmp_path / "given.crt"), key=str(tmp_path / "given.key"), token=True)
    with pytest.raises(SetupError):
        CoordinatorService(changed(admin=given), directory=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_certificate_that_was_given(tmp_path: Path) -> None:
    certificate, key = tmp_path / "given.crt", tmp_path / "given.key"
    write_certificate(certificate, key)
    given = AdminOptions(certificate=str(certificate), key=str(key), token=False)
    run = tmp_path / "run"
    with CoordinatorService(changed(admin=given), directory=run) as service:
        assert not (run / TOKEN_FILE).exists()  # on loopback nobody asked for one
        with AdminClient(service.address.admin, Credentials.read(run)) as admin:
            admin.status()
    write_certificate(tmp_path / "other.crt", tmp_path / "other.key")
    for wrong, says in ((tmp_path / "other.key", "does not belong"), (tmp_path / "none.key", "no certificate and key")):
        with pytest.raises(SetupError, match=says):
            CoordinatorService(changed(admin=given.model_copy(update={"key": str(wrong)})), directory=run)
    with CoordinatorService(changed(admin_host=ELSEWHERE), directory=run) as service:  # its own again
        assert (run / CERTIFICATE_FILE).read_bytes() != certificate.read_bytes()
        with AdminClient(service.address.admin, Credentials.read(run)) as admin:
            admin.status()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (changed(admin_host=ELSEWHERE, admin=AdminOptions(token=False)), r"admin\.token: false, .*ssh -L"),
        (changed(admin=AdminOptions(key="k.pem")), r"admin\.certificate: is missing.*set both"),
        (changed(curve=CurveOptions(enabled=False, directory="keys")), r"curve\.enabled: false, but"),
        (changed(host="0.0.0.0", curve=CurveOptions(enabled=False)), r"host: 0\.0\.0\.0 is open to everyone"),
        (changed(admin_host=ELSEWHERE), r"admin_host: .* needs a token and a certificate.*--directory"),
    ],
)
def test_what_would_be_open_is_refused_with_its_remedy(options: CoordinatorOptions, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        CoordinatorService(options)


def test_a_token_of_another_user_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).mkdir()  # as unreadable as another's file, for root too
    with pytest.raises(SetupError, match=r"admin-token cannot be read.*user who started the run"):
        Credentials.read(tmp_path)


def test_grpc_itself_sees_the_same(tmp_path: Path) -> None:
    """As another program would: the header of the documentation, nothing of ours."""
    with CoordinatorService(changed(admin=AdminOptions(token=True)), directory=tmp_path) as service:
        token = (tmp_path / TOKEN_FILE).read_text().strip()
        with grpc.insecure_channel(service.address.admin) as channel:
            call = channel.unary_unary("/paceline.admin.v1.Admin/GetStatus")
            assert call(b"", timeout=10, metadata=(("authorization", f"Bearer {token}"),))
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
