"""Certificates of a service that are renewed while processes with clients of it go on."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from resource_manager.core.cluster_settings import SignOn
from resource_manager.jobs.airflow_api import AirflowTaskStates
from resource_manager.jobs.http_client import READ_AGAIN_S, Authorities, HttpClient
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.sign_on.provider import Provider


def certificate(path: Path) -> Path:
    """Write a certificate for 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, path.stem)])
    now = datetime.now(UTC)
    of_address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(of_address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_text = key.private_bytes(serialization.Encoding.PEM, form, no_password)
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key_text)
    return path


class Service(ThreadingHTTPServer):
    """Service by TLS that can be given another certificate, and counts who connects."""

    def __init__(self, of: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.renew(of)
        self.connections = 0

    def renew(self, of: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(of)

    def get_request(self) -> tuple[ssl.SSLSocket, object]:
        plain, address = self.socket.accept()
        self.connections += 1
        return self._context.wrap_socket(plain, server_side=True), address


class _Answers(BaseHTTPRequestHandler):
    """Those of a GPU manager, of an Airflow and of a provider of log-ins, in one."""

    def do_GET(self) -> None:
        url = f"https://{self.headers['Host']}"
        known = {"issuer": url, "authorization_endpoint": f"{url}/log-in", "state": "running"}
        body = json.dumps({"items": [], "next": None, **known}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Trust:
    """The file that SSL_CERT_FILE names, a service by TLS, and authorities read at `now`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "trusted.pem"
        self.now = 0.0
        self.authorities = Authorities(lambda: self.now)
        self.service = Service(certificate(folder / "first.pem"))
        self.trust("first")
        self.url = f"https://127.0.0.1:{self.service.server_port}"

    def trust(self, name: str) -> None:
        self.file.write_bytes((self._folder / f"{name}.pem").read_bytes())

    def renew(self) -> None:
        """Give the service another certificate, which the file does not have yet."""
        self.service.renew(certificate(self._folder / "second.pem"))

    def client(self) -> HttpClient:
        return HttpClient(self.authorities, base_url=self.url)


@pytest.fixture
def trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trust]:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
    trust = Trust(tmp_path)
    serving = threading.Thread(target=trust.service.serve_forever, args=(0.01,))
    serving.start()
    yield trust
    trust.service.shutdown()
    trust.service.server_close()
    serving.join()


def test_a_client_trusts_a_renewed_certificate_whose_file_was_replaced(trust: Trust) -> None:
    with trust.client() as client, trust.client() as other:
        assert client.get("/").status_code == other.get("/").status_code == 200
        trust.renew()
        trust.trust("second")
        trust.now += READ_AGAIN_S
        assert client.get("/").status_code == 200
        assert other.get("/").status_code == 200, "what one of them has read the other takes at once"
        assert trust.client().get("/").status_code == 200


def test_authorities_are_read_again_only_every_so_often(trust: Trust) -> None:
    with trust.client() as client:
        trust.renew()
        trust.now += READ_AGAIN_S
        for _ in range(3):
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                client.get("/")
        assert trust.service.connections == 4, "one more than calls"
        trust.trust("second")
        trust.now += READ_AGAIN_S
        assert client.get("/").status_code == 200


def test_a_file_that_is_away_for_a_moment_leaves_the_authorities_as_they_were(trust: Trust) -> None:
    with trust.client() as client, trust.client() as other:
        trust.renew()
        trust.file.unlink()
        trust.now += READ_AGAIN_S
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            client.get("/")
        trust.trust("second")
        assert other.get("/").status_code == client.get("/").status_code == 200, "without a wait"


def test_threads_that_doubt_the_authorities_while_one_reads_them_get_new_ones(
    trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one of a triggerer's calls failed at that moment."""
    old, read, given = trust.authorities.context(), httpx.create_ssl_context, []

    def read_while_another_asks() -> ssl.SSLContext:
        monkeypatch.setattr(httpx, "create_ssl_context", read)
        given.append(trust.authorities.context(old))
        return read()

    trust.now += READ_AGAIN_S
    monkeypatch.setattr(httpx, "create_ssl_context", read_while_another_asks)
    given.append(trust.authorities.context(old))
    assert len(given) == 2
    assert old not in given


def test_every_client_of_a_long_life_reads_them_again(trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    """A triggerer's of the service, and the service's of Airflow and of the provider of log-ins."""
    monkeypatch.setattr(HttpClient.__init__, "__defaults__", (trust.authorities,))
    client = ServiceClient(trust.url)
    airflow = AirflowTaskStates(trust.url, token="t")
    log_in = Provider(SignOn(issuer=trust.url, client_id="gpus", groups=()))
    trust.renew()
    trust.trust("second")
    trust.now += READ_AGAIN_S
    assert client.queue() == []
    assert airflow.run_is_unfinished("dag", "run")
    assert log_in.authorization_url("", "", "", "").startswith(f"{trust.url}/log-in?")
    client.close()
