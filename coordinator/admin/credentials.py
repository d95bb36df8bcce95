"""The admin service's token and certificate, as files of the run's folder: their form, their modes and their readers.
Opens no port.

`admin-token`             for administrators; readable by its owner only `admin.crt`, `admin.key`  a certificate of the
service's own, where none was given: clients trust this one alone

They outlive the coordinator, so that its successor uses the same.
"""

import hmac
import secrets
import stat
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from config.coordinator import LOOPBACK
from coordinator.address import Address
from coordinator.errors import SetupError
from coordinator.files import write_private

TOKEN_FILE, CERTIFICATE_FILE, KEY_FILE = "admin-token", "admin.crt", "admin.key"
OWN_NAME = "coordinator.paceline.internal"  # in a certificate of the service's own, wherever it listens
_LIFETIME = timedelta(days=3650)
_HEADER = "authorization"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a client; empty means none. certificate: PEM, trusted instead of the public authorities."""

    token: str = field(default="", repr=False)
    tls: bool = False
    certificate: bytes = b""

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read what the service left in `directory`, or copies of it. Raises SetupError."""
        address = Address.read(directory)
        tls = address.admin_tls if address is not None else (directory / CERTIFICATE_FILE).exists()
        return cls(
            _text(directory / TOKEN_FILE).strip(), tls, _text(directory / CERTIFICATE_FILE).encode() if tls else b""
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the gRPC metadata of every call."""
        return ((_HEADER, f"Bearer {self.token}"),) if self.token else ()

    def encrypts(self, address: str) -> bool:
        """Return whether calls to `address` (host:port) use TLS. Beyond loopback, a token is only sent encrypted."""
        return self.tls or (bool(self.token) and address.rpartition(":")[0] not in LOOPBACK)

    def channel(self, address: str) -> grpc.Channel:
        if not self.encrypts(address):
            return grpc.insecure_channel(address)
        options = [("grpc.ssl_target_name_override", OWN_NAME)] if _is_own(self.certificate) else []
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.certificate or None), options=options)


NO_CREDENTIALS = Credentials()


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token. The health check needs none, since probes have none."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()
        self._refuse = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: object, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        given = dict(details.invocation_metadata).get(_HEADER, "")
        known = hmac.compare_digest(str(given).encode(), self._wanted)
        if known or details.method.startswith("/grpc.health.v1.Health/"):
            return continuation(details)  # type: ignore[operator]
        return self._refuse


def _refuse(request: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")


def service_token(directory: Path) -> str:
    """Return the token in `directory`, or write a new one there. A file that others can read is replaced."""
    path = directory / TOKEN_FILE
    if path.exists() and not stat.S_IMODE(path.stat().st_mode) & 0o077 and (token := _text(path).strip()):
        return token
    token = secrets.token_urlsafe(32)
    write_private(path, token + "\n")
    return token


def service_certificate(directory: Path) -> tuple[bytes, bytes]:
    """Return private key and certificate, both PEM: those in `directory`, or new ones written there."""
    certificate, key = directory / CERTIFICATE_FILE, directory / KEY_FILE
    if not (certificate.exists() and key.exists()):
        write_certificate(certificate, key)
    return key.read_bytes(), certificate.read_bytes()


def given_certificate(certificate: str, key: str, directory: Path | None) -> tuple[bytes, bytes]:
    """Return private key and certificate, both PEM. A certificate that no authority signed is copied to `directory` for
    clients. Raises SetupError.
    """
    try:
        chain, secret = Path(certificate).read_bytes(), Path(key).read_bytes()
        certificates = x509.load_pem_x509_certificates(chain)
        public = certificates[0].public_key()
        private = serialization.load_pem_private_key(secret, None)
    except (OSError, ValueError, TypeError) as error:
        raise SetupError(
            f"coordinator.admin: {certificate} and {key} are no certificate and key in PEM: {error}; make some with "
            "python -m coordinator keys DIRECTORY, or leave both out"
        ) from None
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if public.public_bytes(*form) != private.public_key().public_bytes(*form):
        raise SetupError(f"coordinator.admin.key: {key} does not belong to the certificate {certificate}")
    if directory is not None:
        given = {Path(certificate).resolve(), Path(key).resolve()}
        for path in (directory / CERTIFICATE_FILE, directory / KEY_FILE):
            if path.resolve() not in given:  # it may already be there, as the only copy
                path.unlink(missing_ok=True)
        if certificates[-1].issuer == certificates[-1].subject:
            (directory / CERTIFICATE_FILE).write_bytes(chain)
    return secret, chain


def write_certificate(certificate: Path, key: Path) -> None:
    """Write a new self-signed pair: clients trust this certificate alone."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, OWN_NAME)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(OWN_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = secret.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(key, plain.decode())
    certificate.write_bytes(signed.public_bytes(pem))


def _is_own(certificate: bytes) -> bool:
    return bool(certificate) and OWN_NAME in x509.load_pem_x509_certificate(certificate).subject.rfc4514_string()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}; it belongs to the user who started the run") from None
