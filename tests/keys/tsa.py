"""A time-stamping authority on this machine: openssl with throw-away certificates."""

from __future__ import annotations

import subprocess
from pathlib import Path

CONFIG = """
[ req ]
distinguished_name = name
prompt = no
[ name ]
CN = unused
[ authority ]
basicConstraints = critical,CA:true
keyUsage = critical,keyCertSign
[ stamping ]
keyUsage = critical,digitalSignature
extendedKeyUsage = critical,timeStamping
[ tsa ]
default_tsa = one
[ one ]
serial = {folder}/serial
signer_cert = {folder}/tsa.pem
certs = {folder}/chain.pem
signer_key = {folder}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4
digests = sha256
ess_cert_id_chain = yes
"""


class Authority:
    """Root, intermediate and signer; answers requests with its whole chain inside, unsorted as openssl leaves it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.config = folder, folder / "tsa.cnf"
        self.config.write_text(CONFIG.format(folder=folder))
        (folder / "serial").write_text("01\n")
        self._openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "root.key", "-out", "root.pem",
            "-days", "3650", "-subj", "/CN=Root", "-config", self.config, "-extensions", "authority",
        )  # fmt: skip
        self._certify("between", "root", "authority")
        self._certify("tsa", "between", "stamping")
        (folder / "chain.pem").write_text((folder / "between.pem").read_text() + (folder / "root.pem").read_text())
        self.root = folder / "root.pem"

    def answer(self, request: bytes) -> bytes:
        (self.folder / "q.tsq").write_bytes(request)
        self._openssl("ts", "-reply", "-queryfile", "q.tsq", "-out", "a.tsr", "-config", self.config)
        return (self.folder / "a.tsr").read_bytes()

    def _certify(self, name: str, by: str, kind: str) -> None:
        self._openssl(
            "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr",
            "-subj", f"/CN={name}", "-config", self.config,
        )  # fmt: skip
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "3650", "-extfile", self.config, "-extensions", kind,
        )  # fmt: skip

    def _openssl(self, *words: str | Path) -> None:
        subprocess.run(["openssl", *map(str, words)], cwd=self.folder, check=True, capture_output=True)
