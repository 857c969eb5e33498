"""Answers that no GPU manager gave, and none at all: outages, told in one line with place and remedy."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from resource_manager.cli import main
from resource_manager.errors import (
    BusyError,
    CorruptStateError,
    InvalidRequestError,
    StaleStateError,
    is_outage,
)
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.client_errors import ServiceBusyError, ServiceUnavailableError
from tests.builders import granted_lease
from tests.cli.targets import holding

PAGE = "<html><title>Bad Gateway</title></html>"

STRANGERS: list[tuple[int, dict[str, Any], str]] = [
    (502, {"html": PAGE}, r"^no answer from http://gpus: a proxy before it gave 502 to GET /api/status$"),
    (503, {"html": PAGE}, r"^no answer from http://gpus: a proxy before it gave 503 to GET /api/status$"),
    (504, {"json": {"message": "x"}}, r"^no answer from http://gpus: a proxy before it gave 504 to GET"),
    (413, {"html": PAGE}, r"^no answer from http://gpus: a proxy before it gave 413 to GET /api/status$"),
    (404, {"html": PAGE}, r"^http://gpus is not a GPU manager: GET /api/status gave 404$"),
    (404, {"json": {"message": "no route"}}, r"^http://gpus is not a GPU manager: GET /api/status gave 404$"),
    (
        302,
        {"headers": {"Location": "https://sso.example/in?state=s3cret"}},
        r"^http://gpus is not a GPU manager: GET /api/status gave 302 and leads to https://sso\.example/in$",
    ),
]


@pytest.mark.parametrize(("status", "content", "line"), STRANGERS)
def test_an_answer_of_a_proxy_is_an_outage_of_the_service_behind_it(
    status: int, content: dict[str, Any], line: str
) -> None:
    answer = httpx.MockTransport(lambda _: httpx.Response(status, **content))
    with (
        ServiceClient("http://gpus", transport=answer) as client,
        pytest.raises(ServiceUnavailableError, match=line) as caught,
    ):
        client.servers()
    assert is_outage(caught.value)
    ran = CliRunner().invoke(main, ["status"], obj=holding(ServiceClient("http://gpus", transport=answer)))
    assert ran.exit_code == 3, "as of a service that is out of reach, whatever the proxy's status"
    assert ran.output == f"Error: {caught.value}\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (httpx.ReadTimeout("timed out"), "timed out; whether POST /api/release was carried out is unknown"),
        (httpx.RemoteProtocolError("cut"), "cut; whether POST /api/release was carried out is unknown"),
        (httpx.ConnectTimeout("timed out"), "timed out"),
        (
            httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"),
            "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate; set SSL_CERT_FILE to the certificate "
            "of its authority",
        ),
        (
            httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING]"),
            "[SSL: UNEXPECTED_EOF_WHILE_READING]; does it speak TLS? If not, its address begins with http://",
        ),
        (httpx.ConnectError("CERTIFICATE_VERIFY_FAILED: Hostname mismatch, certificate of x (_ssl.c:1)"), ""),
    ],
)
def test_a_call_without_an_answer_says_whether_it_may_have_been_carried_out(
    error: httpx.HTTPError, line: str
) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    with (
        ServiceClient("https://gpus", transport=httpx.MockTransport(fail)) as client,
        pytest.raises(ServiceUnavailableError) as caught,
    ):
        client.release("t")
    assert str(caught.value) == f"no answer from https://gpus: {line or error}"


def test_a_renewal_that_hangs_is_given_up_in_time_for_another(open_client: FlaskClient) -> None:
    limits: list[float] = []
    service = httpx.WSGITransport(open_client.application)

    def answer(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"]["read"])
        return service.handle_request(request)

    with ServiceClient("http://localhost", transport=httpx.MockTransport(answer)) as client:
        token = granted_lease(client.submit("t", 2))["fencing_token"]
        client.renew("t", fencing_token=token)
        client.renew_all([{"task_id": "t", "fencing_token": token}])
    assert limits == [70.0, 15.0, 15.0]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_watch_goes_on_once_the_service_answers_again(
    open_client: FlaskClient, naps: list[float], as_json: bool
) -> None:
    service = httpx.WSGITransport(open_client.application)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(502) if len(naps) == 1 else service.handle_request(request)

    client = ServiceClient("http://localhost", transport=httpx.MockTransport(answer))
    options = ["status", "--watch", "0.5", *(["--json"] if as_json else [])]
    ran = CliRunner().invoke(main, options, obj=holding(client))
    assert ran.exit_code == 0
    line = "gpu-manager: no answer from http://localhost: a proxy before it gave 502 to GET /api/status\n"
    assert ran.stderr == line
    assert ran.stdout.count("total_servers" if as_json else "4 servers") == 2


@pytest.mark.parametrize(
    "variables",
    [
        {"ALL_PROXY": "socks5://127.0.0.1:1"},
        {"HTTP_PROXY": "foo://127.0.0.1:1"},
        {"HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "[::1]:*"},
    ],
)
def test_a_proxy_that_cannot_be_used_is_one_line_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequestError, match=r"no way to http://gpus by the environment \(HTTP_PROXY"):
        ServiceClient("http://gpus")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:5000", "ftp://gpus", "http://", "http:///api", "http://gpus:99999"]
)
def test_an_address_that_is_none_is_refused_before_anything_connects(url: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="not the address of a service, such as http://localhost:5000"
    ):
        ServiceClient(url)


@pytest.mark.parametrize("token", ["Bearer x", " x", "x\n", "\u2603"])
def test_a_token_with_a_character_that_none_has_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^the token has a space, a line break or"):
        ServiceClient("http://gpus", token)


def test_a_proxy_of_the_environment_is_named_when_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://ada:s3cret@127.0.0.1:9")
    with (
        ServiceClient("http://gpus") as client,
        pytest.raises(
            ServiceUnavailableError, match=r"http://gpus by the proxy http://ada@127\.0\.0\.1:9 \("
        ),
    ):
        client.servers()


def test_what_passes_by_itself_is_an_outage_whoever_tells_it() -> None:
    assert is_outage(StaleStateError(1, 2))
    assert is_outage(ServiceBusyError("too many calls"), BusyError)
    assert not is_outage(CorruptStateError("cannot be read"))
