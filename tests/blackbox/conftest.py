import asyncio
import os

import pytest

import support
from support import Gateway, clean


@pytest.fixture
def start():
    """Returns a function that starts a gateway. All gateways it started are stopped at the end of the test."""
    started = []

    def go(data=None, config=None, prefix=(), **settings):
        gateway = Gateway(data, config, **settings)
        gateway.prefix = list(prefix)
        started.append(gateway.start())
        return gateway

    yield go
    for gateway in started:
        gateway.close()
    for gateway in started:
        clean(gateway.directory)


@pytest.fixture(autouse=True)
def no_wrong_frames():
    """A frame that breaks a promise fails the test, also if the client that read it was one of many that come and go."""
    yield
    found = support.wrong_frames[:]
    support.wrong_frames.clear()
    assert not found, found


@pytest.fixture(scope="session")
def shared_gateway():
    """The gateway of the `gateway` fixture. Over Cassandra it is three gateways, which take connections in turn."""
    kind = support.Three if support.STORE == "cassandra" else Gateway
    gateway = kind(**support.UNLIMITED).start()
    yield gateway
    gateway.close()
    clean(gateway.directory)


@pytest.fixture
def gateway(shared_gateway):
    """One gateway for all tests that neither change its settings nor stop it. Each test uses users of its own."""
    return shared_gateway


@pytest.fixture(params=["json", "msgpack"])
def codec(request):
    return request.param


def pytest_collection_modifyitems(config, items):
    """Over Cassandra each test runs in one encoding, in turn. The store does not know the encodings, and over the embedded
    store all tests run in both."""
    if support.STORE != "cassandra":
        return
    kept, left_out = [], []
    for item in items:
        given = getattr(item, "callspec", None)
        codec = given.params.get("codec") if given else None
        in_turn = ["json", "msgpack"][len(item.originalname) % 2]
        (kept if codec in (None, in_turn) else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


class FailedAtOnce:
    """Prints the name of a failed test when it fails. Pytest prints names at the end, which a run that is ended never reaches."""

    def __init__(self, reporter):
        self.reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reporter.ensure_newline()
            self.reporter.write_line(f"failed: {report.nodeid} ({report.when}): {crash.message.splitlines()[0] if crash else ''}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedAtOnce(reporter))


def pytest_runtest_setup(item):
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert beside == 1 or not item.get_closest_marker("alone"), "run it without -n, or leave it out: -m 'not alone'"
    group = item.get_closest_marker("xdist_group")
    # pytest-xdist 3.8 does not see the groups of pytest 9.2, and says nothing.
    assert beside == 1 or not group or item.nodeid.endswith(f"@{group.args[0]}"), "run it with --dist loadgroup, and a pytest whose groups it sees"


@pytest.fixture
def names():
    """Returns a function that makes user names unique to this test."""
    import uuid

    suffix = uuid.uuid4().hex[:8]
    return lambda *names: [f"{name}-{suffix}" for name in names]


@pytest.fixture
async def people(gateway, codec, names):
    """Returns a function that connects users with unique names. All are closed at the end of the test."""
    clients = []

    async def connect(*who):
        users = names(*who)
        new = [await gateway.connect(user, codec) for user in users]
        clients.extend(new)
        return new if len(new) > 1 else new[0]

    yield connect
    await asyncio.gather(*(client.close() for client in clients))
