"""The configuration of docs/proxy.md on a real nginx: TLS, log-in, callers told apart, large bodies."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from demo.stack import answers, free_ports
from resource_manager.cli.install_files import write_files
from resource_manager.rest.api.servers import MAX_CLUSTER_BYTES
from tests.e2e.bench import wait_for
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "proxy.md").read_text()
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PROGRAM = [sys.executable, "-m", "resource_manager.cli"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="needs nginx (Debian: nginx-light)")]

MAIN = """daemon off; user root; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
include {folder}/gpu-manager.conf; }}
"""


@pytest.fixture
def proxied(tmp_path: Path, embedded_redis: RedisServer) -> Iterator[tuple[httpx.Client, str, Path]]:
    """Yield a client of the service through the proxy, an operator's token and the service's log."""
    certificate, key, log = (tmp_path / name for name in ("certificate.pem", "key.pem", "log"))
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    port, tls_port = free_ports(2)
    [written] = write_files("nginx", tmp_path)
    text = written.read_text().replace("/etc/ssl/gpu-manager/", f"{tmp_path}/")
    text = text.replace("listen 443", f"listen 127.0.0.1:{tls_port}")
    written.write_text(text.replace(":5000", f":{port}").replace("gpu-manager.example", "localhost"))
    (tmp_path / "nginx.conf").write_text(MAIN.format(folder=tmp_path))
    store = ["--store", embedded_redis.fresh_url()]
    [options] = re.findall(r's/"\$/ (.*)"/', PAGE)
    made = subprocess.run(
        [*PROGRAM, *store, "token", "create", "olga", "--role", "operator"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert NGINX is not None
    with log.open("w") as file:
        serve = [*PROGRAM, *store, "serve", "--port", str(port), *options.split()]
        processes = [
            subprocess.Popen(serve, stdout=file, stderr=file),
            subprocess.Popen([NGINX, "-c", tmp_path / "nginx.conf"]),
        ]
    try:
        wait_for(lambda: answers(port) and answers(tls_port), 60.0, "service and proxy")
        trusted = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=f"https://localhost:{tls_port}", verify=trusted) as client:
            yield client, made.stdout.strip(), log
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)


def test_the_service_behind_the_proxy_of_the_page(proxied: tuple[httpx.Client, str, Path]) -> None:
    client, token, log = proxied
    assert client.get("/readyz").status_code == 200
    assert client.get("/api/status").status_code == 401
    origin = str(client.base_url).rstrip("/")
    page = client.get("/login").text
    fields = dict(re.findall(r'name="(\w+)"[^>]*value="([^"]*)"', page)) | {"token": token}
    answer = client.post("/login", data=fields, headers={"Origin": origin})
    assert answer.status_code == 303, answer.text
    assert "Secure" in answer.headers["set-cookie"]
    assert client.get("/").status_code == 200, "with the session's cookie"
    with client.stream("GET", "/events") as events:
        assert next(events.iter_lines()), "the first event is not kept back"
    client.get("/api/status", headers={"Authorization": f"Bearer {token}", "X-Forwarded-For": "10.9.8.7"})
    assert "10.9.8.7" not in log.read_text(), "the proxy says who calls, not the caller"
    options = ("--silent", "--http2", "--output", os.devnull, "--write-out", "%{http_version} %{http_code}")
    curl = ["curl", *options, "--cacert", str(log.with_name("certificate.pem"))]
    log_in = ["--header", f"Origin: {origin}", "--data-urlencode", f"token={token}", f"{origin}/login"]
    browser = subprocess.run([*curl, *log_in], capture_output=True)
    assert browser.stdout == b"2 303", "as browsers ask, whose pages would take all connections of HTTP/1.1"
    bearer = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    large = client.put("/api/cluster", content=b" " * (MAX_CLUSTER_BYTES - 1), headers=bearer)
    assert large.status_code == 400, large.text
