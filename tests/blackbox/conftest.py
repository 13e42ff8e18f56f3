import asyncio

import pytest

import support
from support import Gateway, clean


@pytest.fixture
def start():
    """Starts gateways that end with the test."""
    started = []

    def go(data=None, config=None, **settings):
        gateway = Gateway(data, config, **settings).start()
        started.append(gateway)
        return gateway

    yield go
    for gateway in started:
        gateway.close()
    for gateway in started:
        clean(gateway.directory)


@pytest.fixture(scope="session")
def shared_gateway():
    """Over Cassandra it is three: every client that connects comes to another one."""
    kind = support.Three if support.STORE == "cassandra" else Gateway
    gateway = kind(**support.UNLIMITED).start()
    yield gateway
    gateway.close()
    clean(gateway.directory)


@pytest.fixture
def gateway(shared_gateway):
    """One gateway for all tests that don't change its settings or stop it. Users are new in each test."""
    return shared_gateway


@pytest.fixture(params=["json", "msgpack"])
def codec(request):
    return request.param


@pytest.fixture
def names():
    """Users nobody else uses."""
    import uuid

    suffix = uuid.uuid4().hex[:8]
    return lambda *names: [f"{name}-{suffix}" for name in names]


@pytest.fixture
async def people(gateway, codec, names):
    """Connects users with fresh names; closes them at the end."""
    clients = []

    async def connect(*who):
        users = names(*who)
        new = [await gateway.connect(user, codec) for user in users]
        clients.extend(new)
        return new if len(new) > 1 else new[0]

    yield connect
    await asyncio.gather(*(client.close() for client in clients))
