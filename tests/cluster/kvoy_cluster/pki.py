"""Certificates and kubeconfigs of one throw-away cluster: valid for a week, keys never reused."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=7)
_CLOCK_SKEW = datetime.timedelta(hours=1)
ADMINS = "system:masters"


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self.key)

    def write(self, stem: Path) -> None:
        """As `stem`.crt and `stem`.key."""
        _write_private(stem.with_name(stem.name + ".crt"), self.certificate_pem)
        _write_private(stem.with_name(stem.name + ".key"), self.key_pem)


class Authority:
    """A certificate authority that signs for servers and clients."""

    def __init__(self, name: str) -> None:
        key = _new_key()
        subject = _subject(name)
        builder = _builder(subject, subject, key, key).add_extension(
            x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True
        )
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        self.pair = Pair(builder.sign(key, hashes.SHA256()), key)

    def sign(self, name: str, group: str | None = None, hosts: Sequence[str] = ()) -> Pair:
        """A pair for the user `name` of `group`, or for a server reached as one of `hosts`."""
        key = _new_key()
        issuer = self.pair.certificate.subject
        builder = (
            _builder(_subject(name, group), issuer, key, self.pair.key)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(
                x509.KeyUsage(True, False, False, False, False, False, False, False, False),
                critical=True,
            )
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
                ),
                critical=False,
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return Pair(builder.sign(self.pair.key, hashes.SHA256()), key)


class ClusterKeys:
    """All keys of a cluster, as files in one folder that only its owner can read."""

    def __init__(self, folder: Path, server: str, hosts: Sequence[str]) -> None:
        """`server`: the API's URL for clients; `hosts`: names and addresses it is reached by."""
        self.folder = folder
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._server = server
        self._authority = Authority("kubernetes")
        self._authority.pair.write(folder / "ca")
        front_proxy = Authority("front-proxy")
        front_proxy.pair.write(folder / "front-proxy-ca")
        front_proxy.sign("front-proxy-client").write(folder / "front-proxy-client")
        self._authority.sign("kube-apiserver", hosts=hosts).write(folder / "apiserver")
        self._authority.sign("kube-apiserver-kubelet-client", ADMINS).write(
            folder / "apiserver-kubelet"
        )
        _write_service_account_keys(folder)

    @property
    def authority_pem(self) -> bytes:
        return self._authority.pair.certificate_pem

    def write_server(self, stem: str, hosts: Sequence[str]) -> Path:
        """A server's pair as `stem`.crt and `stem`.key; returns the folder they are in."""
        path = self.folder / stem
        path.parent.mkdir(parents=True, exist_ok=True)
        self._authority.sign(path.name, hosts=hosts).write(path)
        return path.parent

    def write_kubeconfig(
        self, name: str, user: str, group: str | None = None, server: str | None = None
    ) -> Path:
        """Access for `user` of `group`, at another URL than the cluster's own if one is given."""
        pair = self._authority.sign(user, group)
        cluster = {
            "server": server or self._server,
            "certificate-authority-data": _base64(self.authority_pem),
        }
        credentials = {
            "client-certificate-data": _base64(pair.certificate_pem),
            "client-key-data": _base64(pair.key_pem),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "kvoy",
            "clusters": [{"name": "kvoy", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "kvoy", "context": {"cluster": "kvoy", "user": user}}],
        }
        path = self.folder / f"{name}.kubeconfig"
        _write_private(path, json.dumps(config).encode())
        return path


def _write_service_account_keys(folder: Path) -> None:
    key = _new_key()
    _write_private(folder / "sa.key", _key_pem(key))
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _write_private(folder / "sa.pub", public)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )


def _subject(name: str, group: str | None = None) -> x509.Name:
    """Kubernetes reads the user from the common name and the group from the organization."""
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _write_private(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
