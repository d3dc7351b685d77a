"""What operators on the pool's host may ask for over its Unix socket, by verb."""

import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.config.credentials import Role
from kvtier.config.reloading import Reloader
from kvtier.errors import InvalidInputError, UnavailableError
from kvtier_pool.operator_server import RECORD, Serve
from kvtier_pool.operator_socket import has_gone, peer_of, send
from kvtier_pool.progress import PURGING, telling
from kvtier_pool.recording import Recordings
from kvtier_pool.service import PoolService

_log = logging.getLogger(__name__)


class OperatorVerbs:
    """Answers operators. Any thread."""

    def __init__(self, service: PoolService, reloader: Reloader, stopping: Callable[[], bool]) -> None:
        """:param stopping: whether the pool ends."""
        self._service = service
        self._reloader = reloader
        self._stopping = stopping
        self._recordings = Recordings(service.recording)

    def verbs(self) -> Mapping[str, Serve]:
        """Returns what serves each verb."""
        return {RECORD: self._record, "tenants": self._tenants, "reload": self._reload, "purge": self._purge}

    def _record(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._recordings.serve(connection, request, self._stopping)

    def _tenants(self, connection: socket.socket, request: dict[str, Any]) -> None:
        send(connection, self._service.administration.report(Role.OPERATOR, _name_of(connection)))

    def _purge(self, connection: socket.socket, request: dict[str, Any]) -> None:
        tenant = request.get("tenant")
        if not isinstance(tenant, str):
            raise InvalidInputError("a purge names its `tenant`")
        name, administration = _name_of(connection), self._service.administration
        if self._stopping():  # nothing more is read from the connection, which looks as if the operator had gone
            raise UnavailableError("the pool ends; the purge was not begun")
        if has_gone(connection):  # and may have given up long ago, while this process was stopped
            _log.info("%s has gone: the purge of tenant %r is not begun", name, tenant[:100])
            return
        with telling(connection, {PURGING: tenant[:100]}):
            report = administration.purge(Role.OPERATOR, name, tenant)
        send(connection, report)

    def _reload(self, connection: socket.socket, request: dict[str, Any]) -> None:
        send(connection, {"problem": self._reloader.reload(f"{_name_of(connection)} asked for it")})


def _name_of(connection: socket.socket) -> str:
    return f"user {peer_of(connection).uid}"
