"""Servers of moto. Each is a fork of this process, which has loaded the modules, because that takes more than a second.

Each line of the input is the port of a listener. It gets a connection to a new server, which writes its output there and ends
when the connection does. This process ends with its input.
"""

import gc
import os
import signal
import socket
import sys
import threading
import traceback

from moto.core.utils import get_service_model
from moto.moto_api._internal import mock_random
from moto.moto_server.werkzeug_app import create_backend_app
from moto.server import main

# What the tests use. The first request would load it otherwise.
create_backend_app("moto_api")
for service in ("iam", "s3", "secretsmanager", "sts"):
    create_backend_app(service)
    get_service_model(service)


def end_with(connection: socket.socket) -> None:
    try:
        connection.recv(1)
    finally:
        os._exit(0)


def serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (connection.fileno(), 1), (connection.fileno(), 2)):
        os.dup2(source, target)
    # Otherwise all servers would give the same keys.
    mock_random.seed()
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    main(["-H", "127.0.0.1", "-p", "0"])


# Garbage collection in a server need not look through what is loaded here.
gc.freeze()
# The kernel removes servers that have ended.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    with socket.create_connection(("127.0.0.1", int(line))) as connection:
        if os.fork() == 0:
            try:
                serve(connection)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(1)
    print("forked", flush=True)
