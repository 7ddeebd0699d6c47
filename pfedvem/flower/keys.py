"""Certificates and node keys for a test federation, by the ``cryptography`` package.

FOLDER/ca.pem                          the certificate authority that nodes and users trust
FOLDER/server.pem, server.key          the SuperLink's certificate and its key
FOLDER/site-0.key, site-0.pub, ...     each node's own key pair, in OpenSSH's format
FOLDER/home/config.toml                where ``flwr`` finds the SuperLink: set FLWR_HOME to FOLDER/home

The authority's own key is not kept: nobody can sign a second certificate with it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pfedvem.errors import UserError

CURVE = ec.SECP384R1  # Flower accepts the NIST curves for node keys
LOOPBACK = ("localhost", "127.0.0.1")


def make_keys(folder: Path, sites: int, hosts: Sequence[str] = (), port: int = 8000, days: int = 30) -> list[Path]:
    """Makes everything for a federation of so many sites; gives the files. Nothing that is there is written over."""
    if sites < 1:
        raise UserError(f"A federation needs at least one site, not {sites}.")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; keys that are in use are not written over.")
    authority = ec.generate_private_key(CURVE())
    root = _certificate("pfedvem test authority", authority, None, authority, (), days)
    key = ec.generate_private_key(CURVE())
    certificate = _certificate("pfedvem SuperLink", key, root, authority, (*LOOPBACK, *hosts), days)
    files = {
        "ca.pem": root.public_bytes(serialization.Encoding.PEM),
        "server.pem": certificate.public_bytes(serialization.Encoding.PEM),
        "server.key": _private(key, serialization.PrivateFormat.PKCS8),
    }
    for site in range(sites):
        own = ec.generate_private_key(CURVE())
        files[f"site-{site}.key"] = _private(own, serialization.PrivateFormat.OpenSSH)
        files[f"site-{site}.pub"] = own.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    host = hosts[0] if hosts else LOOPBACK[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    link = {"address": address, "root-certificates": str((folder / "ca.pem").resolve())}
    files["home/config.toml"] = tomli_w.dumps({"superlink": {"default": "federation", "federation": link}}).encode()
    (folder / "home").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
    return [folder / name for name in files]


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _certificate(
    title: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    days: int,
) -> x509.Certificate:
    """A certificate for a key; one without an issuer is an authority that signs itself."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    now, authority = datetime.now(UTC), issuer is None
    usage = {
        "digital_signature": not authority,
        "key_cert_sign": authority,
        "crl_sign": authority,
        "content_commitment": False,
        "key_encipherment": False,
        "data_encipherment": False,
        "key_agreement": False,
        "encipher_only": False,
        "decipher_only": False,
    }
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.subject if issuer is not None else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ a little
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name):
            raise UserError(f"{name!r} is no name or address of a server.") from None
        return x509.DNSName(name)
