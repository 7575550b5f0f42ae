"""Serve an opened store."""

from __future__ import annotations

import socket

import uvicorn

from ragcache.errors import SettingsError
from ragcache.pipeline import RagCache
from ragcache.server.app import create_app


def run(cache: RagCache, host: str, port: int) -> None:
    """Serve until interrupted.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error}; give another --host or --port") from error
    with listener:
        config = uvicorn.Config(create_app(cache), log_level="info")
        uvicorn.Server(config).run(sockets=[listener])
