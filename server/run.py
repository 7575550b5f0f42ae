"""Serve an opened store."""

from __future__ import annotations

import logging
import socket

import uvicorn

from ragcache.errors import SettingsError
from ragcache.pipeline import RagCache
from ragcache.server.app import create_app

SHUTDOWN_SECONDS = 5
"""How long running answers may go on after a signal to stop."""


def run(cache: RagCache, host: str, port: int) -> None:
    """Serve until interrupted.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error}; give another --host or --port") from error
    with listener:
        config = uvicorn.Config(create_app(cache), log_level="info", timeout_graceful_shutdown=SHUTDOWN_SECONDS)
        logging.getLogger("uvicorn.error").info("ragcache: http://%s:%d/docs", host, listener.getsockname()[1])
        uvicorn.Server(config).run(sockets=[listener])
