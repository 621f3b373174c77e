# SPDX-License-Identifier: Apache-2.0
"""Free ports that stay free until they are used.

vLLM asks the system for a free port, lets go of it, and listens on it a while later. Meanwhile the
system hands the same port out again, as it does for each connection of Gloo.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from typing import Any

FIRST, COUNT = 10_000, 20_000  # below those that the system hands out by itself


def hand_out() -> None:
    """Makes ``bind`` to port 0 take the next of our ports, in this process and its forks."""
    bind = socket.socket.bind
    start = random.randrange(COUNT)  # several drivers may run
    counter = os.memfd_create("ports")  # forks share its position

    def bind_to_ours(self: socket.socket, address: Any) -> None:
        if self.family not in (socket.AF_INET, socket.AF_INET6) or address[1] != 0:
            return bind(self, address)
        for _ in range(COUNT):
            port = FIRST + (start + os.lseek(counter, 1, os.SEEK_CUR)) % COUNT
            try:
                return bind(self, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(errno.EADDRINUSE, "none of our ports is free")

    socket.socket.bind = bind_to_ours  # type: ignore[assignment, method-assign]
