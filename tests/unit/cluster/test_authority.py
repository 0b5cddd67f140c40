"""`disagg keys`: files for the owner only, nothing overwritten, and contexts that trust one authority."""

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509

from disagg.channel.keys import load_keys
from disagg.cluster.authority import days_left, make_keys
from disagg.core.errors import ConfigurationError


def test_every_file_is_for_its_owner_only_and_says_when_it_expires(tmp_path: Path) -> None:
    lines = make_keys(tmp_path / "new" / "keys", ("10.0.0.5", "node-7"), days=30)
    files = [path for path in (tmp_path / "new" / "keys").rglob("*") if path.is_file()]
    assert len(files) == 2 + 2 * 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=30)
    assert [f"{until:%Y-%m-%d}" in line for line in lines] == [False, True, True]
    left = days_left(tmp_path / "new" / "keys" / "node-7", datetime.datetime.now(datetime.UTC))
    assert 29.9 < left <= 30


def test_a_certificate_names_its_machine_and_loopback(tmp_path: Path) -> None:
    make_keys(tmp_path, ("10.0.0.5",), days=1)
    certificate = x509.load_pem_x509_certificate((tmp_path / "10.0.0.5" / "node.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(address) for address in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.5", "127.0.0.1", "::1"}
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_authority_is_kept_and_signs_more_machines_later(tmp_path: Path) -> None:
    make_keys(tmp_path, ("a",), days=10)
    before = (tmp_path / "ca.pem").read_bytes()
    make_keys(tmp_path, ("b",), days=3650)
    assert (tmp_path / "ca.pem").read_bytes() == (tmp_path / "b" / "ca.pem").read_bytes() == before
    assert days_left(tmp_path / "b", datetime.datetime.now(datetime.UTC)) <= 10  # no longer than its authority


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path, ("a",), days=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match="is there already"):
        make_keys(tmp_path, ("b", "a"), days=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigurationError, match=r"without ca\.key"):
        make_keys(tmp_path, ("c",), days=1)


@pytest.mark.parametrize("host", ["../x", "a/b", "", "-v", ".", "a b", "x" * 300])
def test_a_host_that_is_none_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match="--host"):
        make_keys(tmp_path / "keys", (host,), days=1)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("days", [0, -1, 4000])
def test_a_time_that_cannot_be_is_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(ConfigurationError, match="--days"):
        make_keys(tmp_path, ("a",), days=days)


def test_keys_that_others_can_read_or_that_are_not_there_are_refused(tmp_path: Path) -> None:
    assert load_keys("") is None
    make_keys(tmp_path, ("a",), days=1)
    assert load_keys(str(tmp_path / "a")) is not None
    with pytest.raises(ConfigurationError, match=r"no node\.pem"):
        load_keys(str(tmp_path))
    (tmp_path / "a" / "node.key").chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_keys(str(tmp_path / "a"))
    (tmp_path / "a" / "node.key").chmod(0o600)
    (tmp_path / "a" / "node.pem").write_text("no certificate")
    with pytest.raises(ConfigurationError, match="make them anew"):
        load_keys(str(tmp_path / "a"))
