"""Settings of the file and the environment, the files that the gateway makes, and the commands of its program."""
import base64
import os
import re
import subprocess
import time

import pytest

from files import Uploader, picture
from support import BINARY, PATIENCE, ROOT, Gateway

pytestmark = pytest.mark.embedded

CANARY = "canary-7f3a"  # in every value of a secret here, so that no output may have it
NUMBER = "7319264805"
# The settings with secrets, and of what type each is.
SECRETS = ["cluster.secret", "store.cassandra.password", "attachments.secret", "attachments.s3.secret_key"]


def check(tmp_path, file=None, command=("config", "check"), **variables):
    """Runs the program with a file and variables of the environment, and returns its exit code and all its output."""
    arguments = []
    if file is not None:
        (tmp_path / "gateway.toml").write_text(file)
        arguments = ["--config", str(tmp_path / "gateway.toml")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("CHAT_")}
    env |= {"CHAT__STORE__EMBEDDED__PATH": str(tmp_path / "data"), **variables}
    done = subprocess.run([BINARY, *arguments, *command], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def variable(key):
    return "CHAT__" + key.upper().replace(".", "__")


def in_file(key, value):
    section, name = key.rsplit(".", 1)
    return f"[auth]\ndevelopment = true\n[{section}]\n{name} = {value}\n"


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_is_any_text_and_never_shown(tmp_path, key):
    more = {variable("store.cassandra.username"): "chat"} if "password" in key else {}
    for value in [NUMBER * 4, f"[{CANARY}, 1, 2, 3, 4, 5, 6, 7, 8]", f'{{ a = "{CANARY} and much more" }}', "true" * 9, f'"{CANARY}" \' = and more texts']:
        code, output = check(tmp_path, **{variable(key): value}, **more)
        assert code == 0, (value, output)
        code, output = check(tmp_path, command=("config", "show"), **{variable(key): value}, **more)
        assert code == 0 and f'{key} = "***"    # environment {variable(key)}' in output, output
        assert CANARY not in output and NUMBER not in output and value not in output


@pytest.mark.parametrize("key", SECRETS)
def test_no_error_has_a_wrong_secret(tmp_path, key):
    for value in [NUMBER, f'["{CANARY}"]', f'{{ x = "{CANARY}" }}', "{}", "[]", "true", "1.5", "2026-01-01"]:
        code, output = check(tmp_path, in_file(key, value))
        assert code == 1 and f"{key}" in output and "gateway.toml" in output and "must be a text" in output, (value, output)
        assert CANARY not in output and NUMBER not in output and "2026" not in output, output
    # The file is not even TOML.
    for value in [f'"{CANARY}', CANARY, f'"{CANARY}" "{CANARY}"', f"[{CANARY}", f"{NUMBER}{NUMBER}{NUMBER}", f'"{CANARY}"\n{key.rsplit(".")[-1]} = "{CANARY}"', f'"{CANARY}\\q"', f"'{CANARY}\n'", f"0{NUMBER}"]:
        code, output = check(tmp_path, in_file(key, value))
        assert code == 1 and "gateway.toml" in output and ("line 4" in output or "line 5" in output), (value, output)
        assert CANARY not in output and NUMBER not in output, output
    # A table where a text is wanted.
    code, output = check(tmp_path, **{variable(key) + "__X": CANARY})
    assert code == 1 and "must be a text" in output and CANARY not in output, output
    bytes_ = {os.fsencode(variable(key)): b"\xff" + CANARY.encode()}
    code, output = check(tmp_path, **{os.fsdecode(name): os.fsdecode(value) for name, value in bytes_.items()})
    assert code == 1 and "must be UTF-8" in output and CANARY not in output, output


def test_no_error_has_a_secret_of_a_list(tmp_path):
    hook = 'name = "crm", url = "https://crm.example.org/"'
    for setting, value, where in [
        ("auth.keys", f'[{{ algorithm = "HS256", secret = {NUMBER} }}]', "auth.keys[0].secret"),
        ("auth.keys", f'[{{ algorithm = "HS256", secret = ["{CANARY}"] }}]', "auth.keys[0].secret"),
        ("auth.keys", f'[{{ algorithm = "HS256", secret = "{CANARY}" }}]', "auth.keys[0]"),
        ("auth.keys", f'[{{ algorithm = "HS256", secert = "{CANARY}" }}]', "auth.keys[0].secert"),
        ("auth.keys", f'[{{ secret = "{CANARY}" }}]', "auth.keys[0].algorithm"),
        ("auth.keys", f'"{CANARY}"', "auth.keys"),
        ("auth.keys", f'["{CANARY}"]', "auth.keys[0]"),
        ("auth.keys", f'{{ secret = "{CANARY}" }}', "auth.keys"),
        ("webhooks", f'[{{ {hook}, secrets = "{CANARY}" }}]', "webhooks[0].secrets"),
        ("webhooks", f'[{{ {hook}, secrets = [{NUMBER}] }}]', "webhooks[0].secrets[0]"),
        ("webhooks", f'[{{ {hook}, secrets = ["{CANARY}"] }}]', "webhooks[0].secrets"),
        ("webhooks", f'[{{ name = "crm", url = ["{CANARY}"] }}]', "webhooks[0].url"),
        ("webhooks", f'[{{ name = "crm", url = "{CANARY}", secrets = ["{CANARY}"] }}]', "webhooks[0].url"),
    ]:
        for file, more in [(f"{setting} = {value}\n", {}), (None, {variable(setting): value})]:
            code, output = check(tmp_path, file, **more)
            # A list of texts takes a single text from the environment.
            assert code == 1 and where in output, (value, output)
            assert ("gateway.toml" if file else variable(setting)) in output
            assert CANARY not in output and NUMBER not in output, output


# Settings that are no secrets, each with a secret that was put there by mistake, and what is said about it.
HEXADECIMAL = "5f0c7a19" * 5
MISPLACED = [
    ("auth.service_keys", '["shop", "SECRET"]', "auth.service_keys[0]"),
    ("auth.service_keys", '["SECRET"]', "auth.service_keys[0]"),
    ("auth.keys", '[{ algorithm = "SECRET", secret = "SECRET" }]', "auth.keys[0].algorithm"),
    ("auth.keys", '[{ algorithm = "RS256", public_key_file = "-----BEGIN PUBLIC KEY-----SECRET" }]', "auth.keys[0].public_key_file"),
    ("auth.keys", '[{ algorithm = "HS256", "SECRET" = 1 }]', "auth.keys[0].(a key that is not shown)"),
    ("auth.SECRET", '"x"', "auth.(a key that is not shown)"),
    ("auth.leeway_s", '"SECRET"', "auth.leeway_s"),
    ("client.origins", '["https://a.example.org", "SECRET"]', "client.origins[1]"),
    ("client.listen", '"SECRET"', "client.listen"),
    ("client.trusted_proxies", '["10.0.0.0/8", "SECRET"]', "client.trusted_proxies[1]"),
    ("cluster.SECRET", "1", "cluster.(a key that is not shown)"),
    ("consumers.SECRET.SECRET", "1", "consumers.(a key that is not shown).(a key that is not shown)"),
    ("store.kind", '"SECRET"', "store.kind"),
    ("store.cassandra.consistency", '"SECRET"', "store.cassandra.consistency"),
    ("store.cassandra.nodes", '["10.0.0.1:9042", "chat:SECRET@10.0.0.2:9042"]', "store.cassandra.nodes[1]"),
    ("store.cassandra.keyspace", '"SECRET"', "store.cassandra.keyspace"),
    ("store.cassandra.replication", '{ SECRET = "SECRET" }', "store.cassandra.replication.(a key that is not shown)"),
    ("attachments.store", '"SECRET"', "attachments.store"),
    ("attachments.scanner", '"SECRET"', "attachments.scanner"),
    ("push.content", '"SECRET"', "push.content"),
    ("push.allow", '["SECRET"]', "push.allow[0]"),
    ("push.web.hosts", '["https://SECRET"]', "push.web.hosts[0]"),
    ("push.web.contact", '"SECRET"', "push.web"),
    ("push.web.key_file", '"-----BEGIN PRIVATE KEY-----SECRET"', "push.web.key_file"),
    ("push.fcm.key_file", """'{"private_key": "SECRET"}'""", "push.fcm.key_file"),
    ("internal.hosts", '["https://SECRET"]', "internal.hosts"),
    ("log.format", '"SECRET"', "log.format"),
    ("log.filter", '"a=b=SECRET"', "log.filter"),
    ("webhooks", '[{ name = "crm", url = "https://crm.example.org/", events = ["message.created", "SECRET"], secrets = [] }]', "webhooks[0].events[1]"),
    ("webhooks", '[{ name = "crm", url = "https://crm.example.org/", kinds = ["SECRET"], secrets = [] }]', "webhooks[0].kinds[0]"),
    ("webhooks", '[{ name = "crm", url = "https://crm.example.org/", allow = ["SECRET"], secrets = [] }]', "webhooks[0].allow[0]"),
    ("webhooks", '[{ name = "SECRET", url = "https://me:SECRET@crm.example.org/", secrets = [] }]', "webhooks[0].name"),
]


@pytest.mark.parametrize("key, value, where", MISPLACED)
def test_no_error_has_a_secret_that_is_at_the_wrong_place(tmp_path, key, value, where):
    for secret in [f"{CANARY.upper()}/+{CANARY}_and_more", HEXADECIMAL]:
        quoted = f'"{secret}"' if "SECRET" in key else ""
        names = [quoted if part == "SECRET" else part for part in key.split(".")]
        text = value.replace("SECRET", secret) if "{ SECRET" not in value else f'{{ "{secret}" = "{secret}" }}'
        file = f"{'.'.join(names)} = {text}\nlimits.body_bytes = 0\n"
        in_environment = variable(key).replace("SECRET", secret)
        # A text is in the environment without quotation marks.
        plain = text[1:-1] if text[0] in "\"'" else text
        for source, more in [(file, {}), (None, {in_environment: plain})]:
            for command in [("config", "check"), ("config", "show"), ("serve",)]:
                code, output = check(tmp_path, source, command, **more)
                assert code == 1 and where in output, (key, output)
                assert CANARY not in output.lower() and HEXADECIMAL not in output.lower(), (key, output)


def test_the_name_of_an_unknown_setting_is_shown(tmp_path):
    code, output = check(tmp_path, "[limits]\nconections_per_adress = 7\n[s3_bucket]\na1 = 1\n", CHAT__AUTH__ISSUERS="x")
    assert code == 1
    for line in ["limits.conections_per_adress (", "s3_bucket.a1 (", "auth.issuers (environment CHAT__AUTH__ISSUERS): there is no such setting; the nearest is CHAT__AUTH__ISSUER"]:
        assert line in output, output


def test_names_of_datacenters_keep_their_case(tmp_path):
    for variables, lines in [
        ({"DC1": "3", "eu-West": "2"}, ["DC1 = 3    # environment CHAT__STORE__CASSANDRA__REPLICATION__DC1", "eu-West = 2    # environment CHAT__STORE__CASSANDRA__REPLICATION__eu-West"]),
        ({"dc_1": "3", "a__b": "1"}, ["dc_1 = 3", "a__b = 1"]),
        ({"REPLICATION_FACTOR": "2"}, ["replication_factor = 2"]),
    ]:
        variables = {f"CHAT__STORE__CASSANDRA__REPLICATION__{name}": value for name, value in variables.items()}
        code, output = check(tmp_path, command=("config", "show"), **variables)
        assert code == 0, output
        for line in lines:
            assert f"store.cassandra.replication.{line}" in output, output
    # The names of settings have no case.
    code, output = check(tmp_path, command=("config", "show"), chat__limits__Body_Bytes="777")
    assert code == 0 and "limits.body_bytes = 777    # environment CHAT__LIMITS__BODY_BYTES" in output


def test_items_of_a_list_lose_their_quotation_marks(tmp_path):
    for value in ['"https://a.org","https://b.org"', "'https://a.org' , https://b.org", '["https://a.org", "https://b.org"]', "[https://a.org, 'https://b.org',]", "https://a.org,https://b.org"]:
        code, output = check(tmp_path, command=("config", "show"), CHAT__CLIENT__ORIGINS=value)
        assert code == 0 and 'client.origins = ["https://a.org","https://b.org"]' in output, (value, output)
    for value in ['"https://a.org', "https://a.org'", "https://a.org/", "https://a.org/path", "https://*.a.org", "https://é.org", "://a.org", "https://", "a.org", "https://me@a.org", "https://a org"]:
        code, output = check(tmp_path, CHAT__CLIENT__ORIGINS=value)
        assert code == 1 and "client.origins[0]" in output, (value, output)
    code, output = check(tmp_path, CHAT__CLIENT__ORIGINS="*, capacitor://localhost, http://[::1]:3000, HTTPS://A.org:8443, chrome-extension://abcdef")
    assert code == 0, output


def test_the_check_finds_what_would_end_the_gateway(tmp_path):
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    cassandra = {"CHAT__STORE__KIND": "cassandra"}
    s3 = {"CHAT__ATTACHMENTS__STORE": "s3", "CHAT__ATTACHMENTS__S3__BUCKET": "chat", "CHAT__ATTACHMENTS__S3__ACCESS_KEY": "a", "CHAT__ATTACHMENTS__S3__SECRET_KEY": "b"}
    cluster = {**cassandra, "CHAT__CLUSTER__ENABLED": "true", "CHAT__CLUSTER__SECRET": CANARY * 4, "CHAT__CLUSTER__ADVERTISE": "10.0.0.1:7400"}
    assert check(tmp_path, **cluster)[0] == 0
    for variables, said in [
        ({"CHAT__LOG__FILTER": "a=b=c"}, "log.filter"),
        ({"CHAT__LOG__FILTER": "info,fjall=loud"}, "log.filter"),
        ({"CHAT__INTERNAL__LISTEN": "127.0.0.1:8080"}, "internal.listen (environment CHAT__INTERNAL__LISTEN): client.listen has this port too"),
        ({"CHAT__INTERNAL__LISTEN": "0.0.0.0:8080"}, "internal.listen"),
        ({**cluster, "CHAT__CLUSTER__LISTEN": "127.0.0.1:9090"}, "cluster.listen"),
        ({**cluster, "CHAT__CLUSTER__ADVERTISE": "http://10.0.0.1:7400"}, "cluster.advertise"),
        ({**cluster, "CHAT__CLUSTER__ADVERTISE": '"10.0.0.1:7400"'}, "cluster.advertise"),
        ({**cassandra, "CHAT__STORE__CASSANDRA__NODES": "http://10.0.0.1:9042"}, "store.cassandra.nodes[0]"),
        ({**cassandra, "CHAT__STORE__CASSANDRA__TLS_AUTHORITY_FILE": str(tmp_path / "nowhere.pem")}, "nowhere.pem"),
        ({**cassandra, "CHAT__STORE__CASSANDRA__TLS_AUTHORITY_FILE": str(empty)}, "empty.pem: it has no certificate"),
        ({**s3, "CHAT__ATTACHMENTS__S3__ENDPOINT": "https://[::1"}, "attachments.s3.endpoint"),
    ]:
        code, output = check(tmp_path, **variables)
        assert code == 1 and said in output and CANARY not in output, (variables, output)
    for variables in [{"CHAT__LOG__FILTER": "warn,chat_gateway=debug"}, {"CHAT__LOG__FILTER": "off"}, {"CHAT__INTERNAL__LISTEN": "127.0.0.2:8080"},
                      {"CHAT__INTERNAL__LISTEN": "[::1]:8080"}, {"CHAT__CLIENT__LISTEN": "127.0.0.1:0", "CHAT__INTERNAL__LISTEN": "127.0.0.1:0"},
                      {**s3, "CHAT__ATTACHMENTS__S3__ENDPOINT": "https://s3.example.org"}]:
        code, output = check(tmp_path, **variables)
        assert code == 0, (variables, output)


def test_the_wanted_type_decides_what_a_variable_means(tmp_path):
    variables = {
        "CHAT__STORE__CASSANDRA__USERNAME": "true",
        "CHAT__STORE__CASSANDRA__PASSWORD": "111111",
        "CHAT__STORE__CASSANDRA__DATACENTER": "",
        "CHAT__STORE__CASSANDRA__NODES": "10.0.0.1:9042, [::1]:9043",
        "CHAT__STORE__CASSANDRA__REPLICATION": "{ dc1 = 3, dc2 = 2 }",
        "CHAT__STORE__CASSANDRA__TIMEOUT_MS": " 3000 ",
        "CHAT__CLIENT__TRUSTED_PROXIES": '["10.0.0.0/8", "::1/128"]',
        "CHAT__CLIENT__ORIGINS": "https://a.example.org",
        "CHAT__CLIENT__PROXY_PROTOCOL": "true",
        "CHAT__AUTH__ISSUER": "12",
        "CHAT__AUTH__KEYS": f'[{{ algorithm = "HS256", secret = "{CANARY * 4}" }}]',
        "CHAT__PUSH__ALLOW": "[10.0.0.0/8,192.168.0.0/16]",
    }
    code, shown = check(tmp_path, command=("config", "show"), **variables)
    assert code == 0, shown
    for line in [
        'store.cassandra.username = "true"', 'store.cassandra.datacenter = ""', 'store.cassandra.nodes = ["10.0.0.1:9042","[::1]:9043"]',
        "store.cassandra.replication.dc1 = 3", "store.cassandra.replication.dc2 = 2", "store.cassandra.timeout_ms = 3000",
        'client.trusted_proxies = ["10.0.0.0/8","::1/128"]', 'client.origins = ["https://a.example.org"]', "client.proxy_protocol = true",
        'auth.issuer = "12"', 'push.allow = ["10.0.0.0/8","192.168.0.0/16"]',
    ]:
        assert f"{line}    # environment " in shown, (line, shown)
    assert "replication_factor" not in shown and CANARY not in shown and "111111" not in shown


def test_all_wrong_settings_are_named_at_once(tmp_path):
    code, output = check(
        tmp_path,
        '[limits]\nbody_bytes = "big"\nconections = 7\n[client]\nlisten = "here"\n[store]\nkind = "redis"\n[memory]\nmib = 1\n'
        '[[auth.keys]]\nalgorithm = "HS256"\nsecret = 1\n[[auth.keys]]\nalgorithm = "HS256"\n[[auth.keys]]\nalgorithm = "RS1"\n',
        CHAT__SESSION__PING_INTERVAL_MS="soon", CHAT__CLUSTER__ENABLED="yes", CHAT__LIMITS__REQUESTS_BURST="-1", CHAT__DRAIN__GRACE="1",
        CHAT__MESSAGES__EDIT_WINDOW_S="315360001",
    )
    assert code == 1
    file = str(tmp_path / "gateway.toml")
    for line in [
        f"limits.body_bytes ({file}): must be a whole number, at least 0",
        f"limits.conections ({file}): there is no such setting; the nearest is limits.connections",
        f"client.listen ({file}): must be an IP address and a port, such as 127.0.0.1:8080",
        f"store.kind ({file}): must be one of embedded, cassandra",
        f"auth.keys[0].secret ({file}): must be a text, in quotation marks",
        f"auth.keys[2].algorithm ({file}): must be one of HS256, RS256, ES256, EdDSA",
        f"memory.mib ({file}): must be at least 16 and at most 1048576",
        "session.ping_interval_ms (environment CHAT__SESSION__PING_INTERVAL_MS): must be a whole number, at least 0",
        "cluster.enabled (environment CHAT__CLUSTER__ENABLED): must be true or false",
        "limits.requests_burst (environment CHAT__LIMITS__REQUESTS_BURST): must be a whole number from 0 to 4294967295",
        "drain.grace (environment CHAT__DRAIN__GRACE): there is no such setting; the nearest is CHAT__DRAIN__GRACE_MS",
        "messages.edit_window_s (environment CHAT__MESSAGES__EDIT_WINDOW_S): must be at most 315360000",
    ]:
        assert line in output, (line, output)


def test_a_variable_that_only_looks_like_a_setting_is_refused(tmp_path):
    for name, meant in [
        ("CHAT_CLIENT_LISTEN", "CHAT__CLIENT__LISTEN"),
        ("CHAT_CLIENT__LISTEN", "CHAT__CLIENT__LISTEN"),
        ("CHAT__CLIENT_LISTEN", "CHAT__CLIENT__LISTEN"),
        ("CHAT_STORE_CASSANDRA_PASSWORD", "CHAT__STORE__CASSANDRA__PASSWORD"),
        ("CHAT_STORE_CASSANDRA_PASWORD", "CHAT__STORE__CASSANDRA__PASSWORD"),
    ]:
        code, output = check(tmp_path, **{name: CANARY})
        assert code == 1 and name in output and meant in output and CANARY not in output, output
    # Other programs have variables with this beginning, such as Kubernetes for a service with the name `chat`.
    code, output = check(tmp_path, CHAT_SERVICE_HOST="10.0.0.1", CHAT_PORT="tcp://10.0.0.1:80", CHAT_TEST_STORE="embedded", CHAT_SECRET=CANARY)
    assert code == 0, output


def test_the_log_names_variables_that_are_not_settings(start, monkeypatch):
    monkeypatch.setenv("CHAT_SERVICE_HOST", CANARY)
    gateway = start()
    [line] = [line for line in gateway.log() if "not settings" in line["message"]]
    assert "CHAT_SERVICE_HOST" in line["variables"] and CANARY not in str(line)


def modes(directory):
    """The modes of a directory and everything in it, without links."""
    found = {}
    for folder, folders, files in os.walk(directory):
        for path in [folder] + [os.path.join(folder, name) for name in files]:
            if not os.path.islink(path):
                found[path] = oct(os.stat(path).st_mode & 0o777)
    return found


def private(directory):
    return {path: mode for path, mode in modes(directory).items() if mode != ("0o700" if os.path.isdir(path) else "0o600")}


async def uploaded(gateway, user):
    alice = await gateway.connect(user)
    conversation = await alice.create("group", f"{user}-too")
    await Uploader(gateway, user).upload(conversation, picture())
    await alice.send(conversation, "look")
    await alice.close()


async def test_no_file_is_open_to_other_users_of_the_machine(tmp_path):
    data = tmp_path / "data"
    attachments = tmp_path / "attachments"
    gateway = Gateway(str(data), attachments__path=attachments)
    gateway.prefix = ["bash", "-c", 'umask 000; exec "$@"', "-"]
    try:
        gateway.start()
        await uploaded(gateway, "alice")
        assert gateway.stop() == 0
        logs = {path for path in private(data) if "gateway-" in path}  # those are the test's
        assert set(private(data)) <= logs and not private(attachments), (private(data), private(attachments))
        assert any("original" in path for path in modes(attachments)) and any(path.endswith(".jnl") for path in modes(data))
        # An earlier build, or a restored backup, left other modes.
        for directory in [data, attachments]:
            for path in modes(directory):
                os.chmod(path, 0o777 if os.path.isdir(path) else 0o666)
        gateway.start()
        await uploaded(gateway, "bob")
        gateway.kill()
        open_now = {path for path in private(data) if "gateway-" not in path}
        assert not open_now and not private(attachments), (open_now, private(attachments))
        # The commands of the program too.
        for path in modes(data):
            os.chmod(path, 0o777 if os.path.isdir(path) else 0o666)
        done = subprocess.run([*gateway.prefix, BINARY, "compact"], env=gateway.env(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    finally:
        gateway.close()


def test_a_token_is_of_a_gateway_of_this_folder_or_none(start, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("CHAT_")}
    done = subprocess.run([BINARY, "token", "alice"], env=env, cwd=elsewhere, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and list(elsewhere.iterdir()) == []
    assert "data/development.key" in done.stderr and "CHAT__STORE__EMBEDDED__PATH" in done.stderr and "--config" in done.stderr
    # A check of the settings makes no files either.
    done = subprocess.run([BINARY, "config", "check"], env=env, cwd=elsewhere, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and list(elsewhere.iterdir()) == [], done.stderr
    gateway = start()
    assert gateway.token("alice")
    for ttl in ["0s", "99999999999d", "3651d", "-1s", "1", "h", "", "1é", "99999999999999999999999s"]:
        done = gateway.command("token", "alice", f"--ttl={ttl}", check=False)
        assert done.returncode != 0 and done.stdout == "" and "from 1s to 3650d" in done.stderr, (ttl, done)
    for ttl in ["1s", "3650d"]:
        assert gateway.token("alice", "--ttl", ttl)


def documented_counters():
    """The counters that the documents name."""
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    return set(re.findall(r"\bchat_[a-z_]+_total\b", text))


async def test_counters_of_the_documents_exist_before_their_first_event(start, tmp_path):
    config = tmp_path / "gateway.toml"
    secret = "whsec_" + base64.b64encode(bytes(32)).decode()
    key = tmp_path / "push.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(key)], check=True, capture_output=True)
    config.write_text(
        '[auth]\ndevelopment = true\n'
        f'[push.web]\nkey_file = "{key}"\ncontact = "mailto:a@example.org"\n'
        f'[[webhooks]]\nname = "crm"\nurl = "https://crm.example.org/"\nsecrets = ["{secret}"]\n'
    )
    gateway = start(config=str(config))
    metrics = gateway.metrics()
    names = {name.split("{")[0] for name in metrics}
    counters = documented_counters()
    assert len(counters) > 10 and "chat_push_total" in counters
    # Those of Cassandra's requests by kind have their labels from requests.
    assert counters - names == {"chat_store_speculative_requests_total"}
    for name, value in metrics.items():
        if name.startswith(("chat_sessions_closed_total", "chat_connects_refused_total", "chat_push_total", "chat_consumer_events_total", "chat_store_retries_total")):
            assert value == 0, name
    for name in ['chat_sessions_closed_total{reason="too slow"}', 'chat_connects_refused_total{reason="origin"}',
                 'chat_push_total{provider="web",result="gone"}', "chat_store_retries_total", "chat_panics_total"]:
        assert name in metrics, sorted(metrics)
    assert metrics["chat_store_damaged"] == 0
    # A counter has labels in all of its series or in none.
    with_labels = {name.split("{")[0] for name in metrics if "{" in name}
    assert 'chat_pictures_total{outcome="failed"}' in metrics and not with_labels & set(metrics), with_labels & set(metrics)


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_log_file_has_no_colours(tmp_path, format):
    gateway = Gateway(str(tmp_path), log__format="json")
    gateway.start()
    gateway.stop()
    gateway.settings["log__format"] = format
    env = {**gateway.env(), "CLICOLOR_FORCE": "1", "TERM": "xterm-256color"}
    log = tmp_path / "log"
    with open(log, "wb") as file:
        process = subprocess.Popen([BINARY], env=env, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + PATIENCE
        while b"ready" not in log.read_bytes():
            assert time.monotonic() < deadline and process.poll() is None, log.read_bytes()
            time.sleep(0.01)
    finally:
        process.terminate()
        process.wait()
    assert b"\x1b" not in log.read_bytes() and b"development tokens are on" in log.read_bytes()
