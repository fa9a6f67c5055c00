"""Owns the socket that the server listens on, and the files of its TLS.

It must not know what is served on it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat

from jaxpage.errors import ParameterError, unusable_file


def check_tls(certfile: str, keyfile: str | None, ca_certs: str | None) -> None:
    """Reads the files, so that a wrong one is known before a model is loaded.

    Raises:
        ParameterError: naming option and file, also for content that is no certificate or a key that does not belong
            to it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile), ("ssl_ca_certs", ca_certs)):
        if path is not None:
            try:
                with open(path, "rb"):
                    pass  # OpenSSL's own errors do not name the file
            except (OSError, ValueError) as error:
                raise unusable_file(name, path, error) from None
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        both = f"{certfile} and --ssl-keyfile {keyfile}" if keyfile else certfile
        raise ParameterError("ssl_certfile", f"{both}: {_reason(error)}") from None
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except OSError as error:
            raise ParameterError("ssl_ca_certs", f"{ca_certs}: {_reason(error)}") from None


def _no_password() -> str:
    raise ValueError("the key has a password")  # asking for it at the terminal would hang a service


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, ssl.SSLError) and error.reason else str(error)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` that does not listen yet: clients are refused until the model is ready.

    Raises:
        OSError: if the host is unknown, or the port is taken or not allowed.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


class UnixSocket(socket.socket):
    """A Unix socket bound to ``path``, whose file goes when it is closed. A file that a dead server left is replaced.

    Raises:
        OSError: if the path is taken by a living server or by anything but a socket, or cannot be made.
    """

    def __init__(self, path: str) -> None:
        _remove_stale(path)
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path: str | None = None
        try:
            self.bind(path)
        except OSError:
            self.close()
            raise
        self._path = path

    def close(self) -> None:
        """Closes the socket and removes its file."""
        super().close()
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _remove_stale(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError("the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError("another server listens on it")


def where(listener: socket.socket, scheme: str) -> str:
    """What a user types to reach ``listener``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"
