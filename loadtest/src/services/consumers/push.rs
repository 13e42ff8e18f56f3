//! Counts what push services are asked: nothing for a user who has a session, whatever is sent to them.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aws_lc_rs::{
    encoding::{AsDer as _, Pkcs8V1Der},
    rsa,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::{Options, Setup};
use crate::{Common, client::Client, ending, report::Report, worker::Worker};

/// The user who gets the messages.
const READER: &str = "reader";
/// The longest wait for a frame, so that the reader sees when it is to end.
const WAIT_MAX: Duration = Duration::from_millis(50);
/// The time within which the service must be asked when the user is gone.
const ASKED_WITHIN: Duration = Duration::from_secs(60);

pub(super) fn run(common: &Common, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let service = Service::start()?;
    let keys = ending::directory()?;
    let key_file = keys.path().join("firebase.json");
    fs::write(&key_file, service.account()?.to_string())?;
    let settings = format!(
        "[push]\ngrace_s = 0\nallow = [\"127.0.0.0/8\"]\n[push.fcm]\nkey_file = {key_file:?}\nurl = \"https://{}\"\n",
        service.address
    );
    let setup = Setup::begin(common, options.rate, options.groups, 1, settings, None)?;
    let session = reader(&setup.gateways.servers[0].address)?;
    thread::sleep(Duration::from_secs(options.push_seconds));
    let (messages, present) = (setup.senders.acknowledged(), service.connections());
    let received = session.stop()?;
    let left = Instant::now();
    while service.connections() == present && left.elapsed() < ASKED_WITHIN {
        thread::sleep(WAIT_MAX);
    }
    let asked_after = left.elapsed();
    let absent = service.connections() - present;
    let sent = setup.senders.end();
    report.figure(
        "push: messages to a user with a session",
        messages as f64,
        "",
    );
    report.figure("push: frames that the session got", received as f64, "");
    report.figure("push: connections to the push service", present as f64, "");
    report.figure(
        "push: user gone until the service is asked",
        asked_after.as_secs_f64(),
        "s",
    );
    let mut must = |holds: bool, what: &str| report.must(holds, format!("push: {what}"));
    must(messages > 0 && received > 0, "the session got nothing");
    must(present == 0, "a user with a session was pushed to");
    must(absent > 0, "a user without a session was not pushed to");
    must(sent.unanswered == 0, "messages were never acknowledged");
    must(sent.wrong.is_none(), "a reply is not as documented");
    Ok(())
}

/// A push service that counts connections, and ends each at once. A request needs one.
struct Service {
    address: String,
    connections: Arc<AtomicU64>,
}

impl Service {
    fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let connections = Arc::new(AtomicU64::new(0));
        let counted = connections.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                counted.fetch_add(1, Ordering::Relaxed);
                drop::<std::io::Result<TcpStream>>(stream);
            }
        });
        Ok(Self {
            address,
            connections,
        })
    }

    fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// The file of a service account, which gets its access tokens here.
    fn account(&self) -> anyhow::Result<Value> {
        let pair = rsa::KeyPair::generate(rsa::KeySize::Rsa2048)?;
        let der: Pkcs8V1Der<'_> = pair.as_der()?;
        let key = STANDARD.encode(der.as_ref());
        Ok(json!({
            "type": "service_account", "project_id": "load", "private_key_id": "load",
            "private_key": format!("-----BEGIN PRIVATE KEY-----\n{key}\n-----END PRIVATE KEY-----\n"),
            "client_email": "load@example.org", "token_uri": format!("https://{}/token", self.address),
        }))
    }
}

/// A user with a device, who reads what comes. Returns the number of frames.
fn reader(address: &str) -> anyhow::Result<Worker<u64>> {
    let mut client = Client::connect(address, READER, 0)?;
    client.ask(
        json!({"type": "device_set", "device": "phone", "provider": "fcm", "token": "load-token"}),
    )?;
    Ok(Worker::start(move |over| {
        let mut received = 0;
        while !over.is_over() {
            received += u64::from(client.next_within(WAIT_MAX)?.is_some());
        }
        Ok(received)
    }))
}
