"""TLS contexts for tests, from a certificate that is made when first needed and never stored."""

from __future__ import annotations

import functools
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

import pytest


def server_context() -> ssl.SSLContext:
    certificate, key = _self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("cert", certificate), ("key", key)):
            (Path(folder) / name).write_text(text)
        context.load_cert_chain(Path(folder) / "cert", Path(folder) / "key")
    return context


def client_context() -> ssl.SSLContext:
    """Trusts that one certificate, and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=_self_signed()[0])
    return context


@functools.cache
def _self_signed() -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command, which makes the test certificate, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder) / "cert.pem", Path(folder) / "key.pem"
        options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        files = ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(
            [openssl, "req", *options.split(), *subject, *files], check=True, capture_output=True
        )
        return certificate.read_text(), key.read_text()
