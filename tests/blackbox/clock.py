"""Clocks of gateways that are not the one of this machine, by libfaketime."""
import asyncio
import glob
import os
import pathlib

from support import eventually


def preload():
    """A command that starts a program with libfaketime. The program `faketime` would stay between a test and its gateway."""
    found = sorted(glob.glob(os.environ.get("LIBFAKETIME", "/usr/lib/*/faketime/libfaketimeMT.so.1")))
    assert found, "libfaketime is not installed"
    return ["env", f"LD_PRELOAD={found[0]}"]


def time_shift(shift, speed=60):
    """A command that starts a program whose clock is later (`+25h`) and sixty times as fast: a sweep comes every five seconds."""
    return [*preload(), f"FAKETIME={shift} x{speed}"]


class Clock:
    """A clock that a test turns forward, for gateways that are started with `prefix`. One that waits notices it when it wakes."""

    def __init__(self, folder):
        self.file, self.ahead = pathlib.Path(folder, "clock"), 0
        self.forward(0)
        self.prefix = [*preload(), f"FAKETIME_TIMESTAMP_FILE={self.file}", "FAKETIME_NO_CACHE=1"]

    def forward(self, seconds):
        self.ahead += seconds
        new = self.file.with_suffix(".new")
        new.write_text(f"+{self.ahead}\n")
        new.replace(self.file)


async def told(gateway):
    """Asks a gateway something, so that it notices that its clock was turned."""
    assert await asyncio.to_thread(gateway.metrics)


async def noticed(gateway, check):
    """Waits until `check()`."""

    async def asked():
        await told(gateway)
        return check()

    return await eventually(asked)
