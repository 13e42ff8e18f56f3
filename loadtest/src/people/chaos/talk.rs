//! People who talk until the end, and the checks then: everyone must have each of their logs, complete and in order.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde_json::json;

use super::{
    changes,
    person::{Person, live},
    world::{Cast, RETRY_AFTER, World, name},
};
use crate::{
    client::Client,
    latency::latencies,
    report::Report,
    server::Server,
    verify::{Entry, Log, check_logs, is_at, read_inbox, read_log},
    worker::lock,
};

/// Time within which everyone must have everything once nobody writes.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);

/// Owner of the public conversations, who is not one of the people.
const OWNER: &str = "owner";

/// People, each in a thread.
pub(crate) struct Talk {
    world: Arc<World>,
    people: Vec<Arc<Mutex<Person>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Talk {
    /// Creates the conversations, and lets everyone connect and talk.
    pub(crate) fn begin(servers: &[Server], cast: Cast) -> anyhow::Result<Self> {
        anyhow::ensure!(
            cast.users >= cast.participants,
            "--users must be at least --participants"
        );
        let address = &servers[0].address;
        let world = Arc::new(World {
            epoch: Instant::now(),
            addresses: Mutex::new(servers.iter().map(|s| s.address.clone()).collect()),
            groups: groups(address, &cast)?,
            lobbies: match cast.every_request {
                true => lobbies(address)?,
                false => Vec::new(),
            },
            cast,
            writing: AtomicBool::new(true),
            over: AtomicBool::new(false),
        });
        let people: Vec<_> = (0..world.cast.users)
            .map(|n| Person::new(n, &world))
            .collect::<Result<_, _>>()?;
        let threads = (0..)
            .zip(&people)
            .map(|(number, person)| {
                let (world, person) = (world.clone(), person.clone());
                thread::spawn(move || live(&world, &person, number))
            })
            .collect();
        Ok(Self {
            world,
            people,
            threads,
        })
    }

    /// From now on this is the gateway with this number.
    pub(crate) fn follow(&self, number: usize, server: &Server) {
        lock(&self.world.addresses)[number].clone_from(&server.address);
    }

    /// Microseconds from due to acknowledged of all messages so far.
    pub(crate) fn acknowledgements(&self) -> anyhow::Result<Histogram<u64>> {
        let mut all = latencies()?;
        for person in &self.people {
            all.add(&lock(person).acknowledgement)?;
        }
        Ok(all)
    }

    /// The number of messages and changes that were acknowledged so far.
    pub(crate) fn stored(&self) -> u64 {
        let of = |person: &Arc<Mutex<Person>>| {
            let person = lock(person);
            person.acknowledged.len() as u64 + person.changes.stored
        };
        self.people.iter().map(of).sum()
    }

    /// Ends the talk and checks everything. `address` is that of a gateway.
    pub(crate) fn end(&mut self, address: &str, report: &mut Report) -> anyhow::Result<()> {
        self.world.writing.store(false, Ordering::Relaxed);
        let logs = self.settled_logs(address);
        self.world.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
        judge(&self.people, &logs?, report)?;
        if self.world.cast.every_request {
            check_marks(address, &self.people, report)?;
        }
        Ok(())
    }

    /// Waits until all messages are acknowledged and received. Returns the log of each conversation.
    fn settled_logs(&self, address: &str) -> anyhow::Result<HashMap<String, Log>> {
        let until = Instant::now() + SETTLED_WITHIN;
        let busy = |person: &Arc<Mutex<Person>>| {
            let person = lock(person);
            !person.waiting.is_empty() || person.missing > 0
        };
        while self.people.iter().any(busy) && Instant::now() < until {
            thread::sleep(RETRY_AFTER);
        }
        let conversations = self.world.conversations();
        conversations
            .map(|id| Ok((id.clone(), self.settled_log(address, id, until)?)))
            .collect()
    }

    /// Waits until all messages of a conversation are received. Returns its log.
    fn settled_log(&self, address: &str, id: &str, until: Instant) -> anyhow::Result<Log> {
        let members: Vec<_> = self
            .people
            .iter()
            .filter(|p| lock(p).got.contains_key(id))
            .collect();
        let reader = members.first().map(|person| lock(person).name.clone());
        let reader = reader.as_deref().unwrap_or(OWNER);
        let log = read_log(address, reader, id)?;
        // A client reads history only after it noticed a gap, so the gateway must bring everything else to it.
        while members.iter().any(|p| lock(p).has(id) < log.len() as u64) && Instant::now() < until {
            thread::sleep(RETRY_AFTER);
        }
        Ok(log)
    }
}

/// Creates the conversations. Group `n` has the users from `n` on; the last conversation is a channel with everyone.
fn groups(address: &str, cast: &Cast) -> anyhow::Result<Vec<String>> {
    let mut groups = Vec::new();
    for number in 0..=cast.users {
        let (kind, count) = if number < cast.users {
            ("group", cast.participants)
        } else {
            ("channel", cast.users)
        };
        let members: Vec<String> = (number..number + count)
            .map(|n| name(n % cast.users))
            .collect();
        let mut maker = Client::connect(address, &members[0], 0)?;
        let create = json!({"type": "create", "kind": kind, "name": format!("{kind} {number}"),
            "participants": members[1..], "posting": "everyone"});
        groups.push(maker.create_patiently(create)?);
    }
    Ok(groups)
}

/// Creates a public group and a public channel.
fn lobbies(address: &str) -> anyhow::Result<Vec<String>> {
    let mut owner = Client::connect(address, OWNER, 0)?;
    let create = |kind| {
        owner.create_patiently(
            json!({"type": "create", "kind": kind, "name": "public", "public": true,
            "posting": "everyone"}),
        )
    };
    ["group", "channel"].map(create).into_iter().collect()
}

/// What all people received and sent together.
struct Totals {
    delivery: Histogram<u64>,
    acknowledgement: Histogram<u64>,
    lost: usize,
    misplaced: usize,
    unanswered: usize,
    got: usize,
    again: u64,
    acknowledged: usize,
    connections: u64,
}

impl Totals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            delivery: latencies()?,
            acknowledgement: latencies()?,
            lost: 0,
            misplaced: 0,
            unanswered: 0,
            got: 0,
            again: 0,
            acknowledged: 0,
            connections: 0,
        })
    }

    fn add(&mut self, person: &Person, logs: &HashMap<String, Log>) -> anyhow::Result<()> {
        self.delivery.add(&person.delivery)?;
        self.acknowledgement.add(&person.acknowledgement)?;
        for (group, got) in &person.got {
            self.got += got.len();
            let missing = |(seq, entry): &(&u64, &Entry)| got.get(seq) != Some(&entry.client_id);
            self.lost += logs[group].iter().filter(missing).count();
        }
        let acknowledged = person.acknowledged.iter();
        let wrong = acknowledged.filter(|(id, place)| !is_at(logs, place, id));
        self.misplaced += wrong.count();
        self.unanswered += person.waiting.len();
        self.again += person.again;
        self.acknowledged += person.acknowledged.len();
        self.connections += person.connections;
        Ok(())
    }
}

fn judge(
    people: &[Arc<Mutex<Person>>],
    logs: &HashMap<String, Log>,
    report: &mut Report,
) -> anyhow::Result<()> {
    check_logs(logs, report);
    let mut totals = Totals::new()?;
    for person in people {
        let person = lock(person);
        totals.add(&person, logs)?;
        report.must(
            person.wrong.is_empty(),
            format!("{}: {:?}", person.name, person.wrong.first()),
        );
    }
    println!(
        "  {} messages acknowledged, {} delivered over {} connections, {} delivered again",
        totals.acknowledged, totals.got, totals.connections, totals.again
    );
    println!(
        "  {} lost, {} not at their acknowledged seq, {} never answered",
        totals.lost, totals.misplaced, totals.unanswered
    );
    report.must(
        totals.lost + totals.misplaced + totals.unanswered == 0,
        "messages or deliveries were lost, misplaced or never answered".to_owned(),
    );
    check_changes(people, logs, report);
    report.figure("messages acknowledged", totals.acknowledged as f64, "");
    report.latency("from due to acknowledged", &totals.acknowledgement);
    report.latency("from due to delivered", &totals.delivery);
    Ok(())
}

/// Checks that every acknowledged edit, deletion and reaction is in the logs.
fn check_changes(people: &[Arc<Mutex<Person>>], logs: &HashMap<String, Log>, report: &mut Report) {
    let people: Vec<_> = people.iter().map(|person| lock(person)).collect();
    let (checked, wrong) = changes::check(people.iter().map(|person| &person.changes), logs);
    if checked > 0 {
        println!("  {checked} changes of messages checked, {wrong} lost or wrong");
    }
    report.must(
        wrong == 0,
        format!("{wrong} messages are not as their acknowledged changes left them"),
    );
}

/// Checks that no inbox has a lower read mark than was acknowledged.
fn check_marks(
    address: &str,
    people: &[Arc<Mutex<Person>>],
    report: &mut Report,
) -> anyhow::Result<()> {
    for person in people {
        let person = lock(person);
        let inbox = read_inbox(&mut Client::connect(address, &person.name, 0)?, report)?;
        for (conversation, seq) in &person.changes.read {
            let found = inbox.get(conversation).map(|item| item.read_seq);
            report.must(
                found.is_some_and(|found| found >= *seq),
                format!(
                    "{} read {conversation} up to {seq}, the inbox has {found:?}",
                    person.name
                ),
            );
        }
    }
    Ok(())
}
