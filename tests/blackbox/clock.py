"""Clocks of gateways that are not the one of this machine, by libfaketime."""
import asyncio
import glob
import os
import pathlib
import time

from support import eventually


def preload():
    """A command that starts a program with libfaketime. The program `faketime` would stay between a test and its gateway."""
    found = sorted(glob.glob(os.environ.get("LIBFAKETIME", "/usr/lib/*/faketime/libfaketimeMT.so.1")))
    assert found, "libfaketime is not installed"
    return ["env", f"LD_PRELOAD={found[0]}"]


def time_shift(shift):
    """A command that starts a program whose clock is later (`+25h`)."""
    return [*preload(), f"FAKETIME={shift}"]


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


async def swept(gateway, clock, check):
    """Turns the clock of a gateway forward until a sweep, of which there is one every five minutes, has made `check()` true.

    A clock that runs faster would not do: it makes each timeout as short, and one of them ends a request on a busy machine.
    So nothing else may ask the gateway while this turns the clock.
    """
    if await check():
        return
    # A sweep takes a while, and it must not lose its time to the next turn.
    for patience in (1, 2, 4, 8, 16, 32, 64):
        clock.forward(301)
        await told(gateway)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if await check():
                return
            await asyncio.sleep(0.02)
    raise AssertionError("seven sweeps have not done it")


async def noticed(gateway, check):
    """Waits until `check()`."""

    async def asked():
        await told(gateway)
        return check()

    return await eventually(asked)
